"""The numbers of a training step, summed over its micro-batches, and the reasons to skip it: not finite, wrong sampler.

They are reported under the names of `metric_schema`.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.config.trainer import TrainerConfig
from ..report.batch_metrics import MOST
from ..rows.prefix_tree import MicroBatch
from .losses import importance_ratios, weight_limits
from .scoring import ScoredTokens

# exp() of anything larger is useless in a metric and may overflow.
_MAX_LOG_RATIO = 20.0

# The numbers that are sums over micro-batches, and so over processes.
SUMS = (
    "loss", "entropy_sum", "kl_sum", "kl_base_sum", "ratio_sum", "clipped", "trained_tokens", "outside_tokens",
    "pulled_tokens", "masked_tokens", "fresh_tokens", "fresh_kl_sum",
    "computed_tokens", "padded_tokens", "micro_batches", "passes_halved", "rows_out_of_memory", "guided_tokens",
    "guidance_sum", "guide_gap_sum",
)  # fmt: skip

NAMED = 5

# Where the mean difference of log-probabilities may be so large, their root mean square is some times larger.
TAILS = 3.0
SAMPLER_TOKENS = 256  # a step judges its sampler by no fewer


def peak_memory_gib() -> float:
    """Return the memory of this process at its peak: what torch took of its GPU, or without one all of it."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass(slots=True)
class StepMetrics:
    """Collects the numbers of one step.

    `clipped` counts tokens as TRL does: their importance ratio, at `trainer.importance_level`, is outside of the loss's
    limits on the side that their advantage pulls them to. `kl` is to the policies that sampled the answers, `kl_base`
    to the base model, where it is computed. The same of `fresh` tokens: those of rows that `version` alone sampled.
    """

    started: float
    config: TrainerConfig
    version: int | None = None
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    skipped: bool = False
    fault: str | None = None  # why the step is skipped; no number here decides that
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    kl_base_sum: float = 0.0
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    trained_tokens: int = 0
    outside_tokens: int = 0
    pulled_tokens: int = 0  # those with an advantage
    masked_tokens: int = 0
    fresh_tokens: int = 0
    fresh_kl_sum: float = 0.0
    computed_tokens: int = 0
    padded_tokens: int = 0
    micro_batches: int = 0
    passes_halved: int = 0
    rows_out_of_memory: int = 0
    guided_tokens: int = 0
    guidance_sum: float = 0.0
    guide_gap_sum: float = 0.0
    too_large: tuple[str, ...] = ()  # the rollouts of these rows
    fitting: int = sys.maxsize  # so many nodes may be in a pass, after one that did not fit
    entropy_coef: float = 0.0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def begun_anew(self) -> StepMetrics:
        """Return those of a step whose passes are all still to be made, but some were found too large."""
        return StepMetrics(
            self.started, self.config, self.version, entropy_coef=self.entropy_coef, passes_halved=self.passes_halved,
            rows_out_of_memory=self.rows_out_of_memory, too_large=self.too_large, fitting=self.fitting,
        )  # fmt: skip

    def add(
        self,
        micro_batch: MicroBatch,
        rows: Tensor,
        loss: Tensor,
        inputs: dict[str, Tensor],
        scores: ScoredTokens,
        reference: Tensor | None = None,
    ) -> None:
        """Add a micro-batch. `inputs`, `scores`, `reference` (under the base model) are (A, L), one row an answer.

        `rows`: (A, 1), the sample that each answer is in.
        """
        mask, logprobs = inputs["completion_mask"].bool(), scores.logprobs.detach()
        log_ratios = logprobs - inputs["old_per_token_logps"]
        log_ratio = log_ratios[mask]
        ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
        low, high = weight_limits(self.config)
        compared = importance_ratios(log_ratios, mask, self.config.importance_level)[mask]
        self.loss += float(loss)
        self.entropy_sum += float(scores.entropies.detach()[mask].sum())
        of_tokens = k3(log_ratio)
        self.kl_sum += float(of_tokens.sum())
        current = [sample.versions == (self.version,) for sample in micro_batch.samples]
        fresh = torch.tensor(current, device=mask.device)[rows].expand_as(mask)[mask]
        self.fresh_tokens += int(fresh.sum())
        self.fresh_kl_sum += float(of_tokens[fresh].sum())
        if reference is not None:
            weight = ratio.clamp(max=self.config.importance_cap)  # of a token under the policy, not the behaviour's
            self.kl_base_sum += float((weight * k3((reference - logprobs)[mask])).sum())
        self.ratio_sum += float(ratio.sum())
        self.ratio_max = max(self.ratio_max, float(ratio.max())) if len(ratio) else self.ratio_max
        advantages = inputs["advantages"][mask]
        self.clipped += float(((compared < low) & (advantages < 0) | (compared > high) & (advantages > 0)).sum())
        self.guided_tokens += int(inputs["guided"].sum())
        self.guidance_sum += float(inputs["guidance"].abs().sum())
        self.guide_gap_sum += float(inputs["guide_gap"].sum())
        self.pulled_tokens += int((advantages != 0).sum())
        self.masked_tokens += int(inputs["masked"].sum()) if "masked" in inputs else 0
        self.trained_tokens += len(ratio)
        self.outside_tokens += sum(sample.trained_tokens for sample in micro_batch.samples) - len(ratio)
        self.computed_tokens += len(micro_batch.tree)
        self.padded_tokens += micro_batch.padded_tokens
        self.micro_batches += 1

    def sendable(self) -> StepMetrics:
        """Return these numbers for other processes: the configuration's class, made at start, cannot be pickled."""
        return replace(self, config=TrainerConfig())

    def sum(self, parts: Sequence[StepMetrics]) -> StepMetrics:
        """Return the sums over all processes. Numbers that are no sums are this process's."""
        if len(parts) == 1:
            return self
        total = replace(self)
        for name in SUMS:
            setattr(total, name, sum(getattr(part, name) for part in parts))
        total.fault = next((part.fault for part in parts if part.fault), None)
        total.ratio_max = max(part.ratio_max for part in parts)
        total.too_large = tuple(rollout_id for part in parts for rollout_id in part.too_large)
        total.fitting = min(part.fitting for part in parts)
        return total

    @property
    def fresh_kl(self) -> float:
        return self.fresh_kl_sum / max(self.fresh_tokens, 1)

    @property
    def entropy(self) -> float:
        return self.entropy_sum / max(self.trained_tokens, 1)

    def warnings(self, tolerance: float) -> dict[str, str]:
        """Return what is wrong with the step's tokens, by name. `tolerance`: as in `wrong_sampler`."""
        found, sampled = dict[str, str](), self.trained_tokens + self.outside_tokens
        if self.fresh_tokens >= SAMPLER_TOKENS and (why := wrong_sampler(self.fresh_kl, tolerance)):
            found["sampler"] = why
        if self.masked_tokens > MOST * self.pulled_tokens:
            dropped = f"{self.masked_tokens:,} of {self.pulled_tokens:,} tokens with an advantage teach nothing"
            found["masked_tokens"] = f"{dropped}: trainer.loss {self.config.loss} masks or clips them"
        if self.outside_tokens > MOST * sampled:
            dropped = f"{self.outside_tokens:,} of {sampled:,} sampled tokens teach nothing"
            found["outside_tokens"] = f"{dropped}: top_p and the like leave them out under the present weights"
        return found

    def result(self) -> dict[str, float]:
        """Return metrics by the names of `metric_schema`. Means are over trained tokens, and may not be finite."""
        n, seconds = max(self.trained_tokens, 1), self.elapsed
        kl_base = {"kl_base": self.kl_base_sum / n} if self.config.kl_coef or self.config.kl_metric else {}
        bonus = {"entropy_coef": self.entropy_coef} if self.config.entropy.counts else {}
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            "skipped": float(self.skipped),
            "entropy": self.entropy,
            **bonus,
            **self._of_guide(),
            "kl": self.kl_sum / n,
            **kl_base,
            "sampler_difference": nats_apart(self.fresh_kl),
            "ratio_mean": self.ratio_sum / n,
            "ratio_max": self.ratio_max,
            "clip_share": self.clipped / n,
            "trained_tokens": float(self.trained_tokens),
            "outside_tokens": float(self.outside_tokens),
            "masked_tokens": float(self.masked_tokens),
            "computed_tokens": float(self.computed_tokens),
            "padded_tokens": float(self.padded_tokens),
            "micro_batches": float(self.micro_batches),
            "passes_halved": float(self.passes_halved),
            "rows_out_of_memory": float(self.rows_out_of_memory),
            "memory_gib": peak_memory_gib(),
            "trained_tokens_per_s": self.trained_tokens / seconds,
            "computed_tokens_per_s": self.computed_tokens / seconds,
            "step_s": seconds,
            "forward_backward_s": self.forward_backward_s,
            "optimizer_s": self.optimizer_s,
        }

    def _of_guide(self) -> dict[str, float]:
        if not self.config.has_guide:
            return {}
        guided = max(self.guided_tokens, 1)
        return {
            "guided_share": self.guided_tokens / max(self.trained_tokens, 1),
            "guide_advantage": self.guidance_sum / guided,
            "guide_kl": -self.guide_gap_sum / guided,
        }


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p, q) >= 0 for tokens sampled from p, given log q/p (http://joschu.net/blog/kl-approx.html)."""
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp() - 1 - log_ratio


def nats_apart(kl: float) -> float:
    """Return about how far apart log-probabilities are (root mean square) where two distributions have this KL."""
    return math.sqrt(2 * max(0.0, kl))


def wrong_sampler(kl: float, tolerance: float) -> str | None:
    """Return why tokens cannot be samples of the weights that they should be of; None where rounding explains the KL.

    `kl`: of the server's distribution from the trainer's, by tokens that the same weights sampled. `tolerance`: the
    largest mean difference of log-probabilities that rounding explains.
    """
    apart = nats_apart(kl)
    if apart <= TAILS * tolerance:
        return None
    return (
        f"wrong sampler: the log-probabilities that the server reports are {apart:.2g} nats from those of the same "
        f"weights in the trainer, where rounding explains {TAILS * tolerance:.2g}. Either the server samples otherwise "
        "than it reports: start vLLM with `lightning-proxy vllm` (it adds --logprobs-mode processed_logprobs and "
        "--enable-scale-out). Or it serves another model than policy.model, or in another dtype than trainer.dtype. "
        "policy.verify_tolerance sets the limit"
    )


def fault_of_loss(rollout_ids: Sequence[str], inputs: Mapping[str, Tensor], logprobs: Tensor) -> str:
    """Return the first part of the loss that is not finite, or else the loss. Parts are (A, L), a row per id."""
    parts = {
        "captured log-probabilities": inputs["old_per_token_logps"],
        "advantages": inputs["advantages"],
        "the policy's log-probabilities": logprobs,
    }
    for name, values in parts.items():
        finite = values.isfinite().all(1).tolist()
        if not all(finite):
            bad = [rollout_id for rollout_id, fine in zip(rollout_ids, finite, strict=True) if not fine]
            return f"{name} not finite in {some_rollouts(bad)}"
    return f"the loss is not finite over {some_rollouts(rollout_ids)}"


def some_rollouts(rollout_ids: Sequence[str]) -> str:
    """Return the rollouts in words, a few by name."""
    ids = list(dict.fromkeys(rollout_ids))
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return f"rollout{'s' if len(ids) != 1 else ''} {', '.join(ids[:NAMED])}{more}"
