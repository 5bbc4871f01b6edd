"""The numbers of a training step: sums over its passes, warnings about it, and reasons to skip it.

The numbers are reported under the names of `metric_schema`.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.config.trainer import TrainerConfig
from ..report.batch_metrics import MOST
from ..rows.prefix_tree import MicroBatch
from .losses import LOSSES, MAX_LOG_RATIO, Guided, LossInputs, clipped

# The sums that are reported as they are.
COUNTS = (
    "loss", "trained_tokens", "outside_tokens", "masked_tokens", "computed_tokens", "micro_batches", "passes_halved",
)  # fmt: skip
NAMED = 5
TAILS = 3.0  # how much larger differences' root mean square may be than their mean
SAMPLER_TOKENS = 256  # a step judges its sampler by no fewer


@dataclass(slots=True)
class Numbers:
    """Sums over passes, in one process or in all. `fault` says why the step is skipped."""

    sums: Counter[str] = field(default_factory=Counter)
    ratio_max: float = 0.0
    fault: str | None = None
    too_large: tuple[str, ...] = ()  # by row that memory ran out for, its rollout
    fitting: int = sys.maxsize  # nodes that may be in a pass, after one that did not fit

    def add(self, other: Numbers) -> None:
        self.sums.update(other.sums)
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.fault = self.fault or other.fault
        self.too_large += other.too_large
        self.fitting = min(self.fitting, other.fitting)

    def mean(self, name: str, over: str = "trained_tokens") -> float:
        return self.sums[name] / max(self.sums[over], 1)


@torch.no_grad()
def numbers_of(
    micro_batch: MicroBatch,
    rows: Tensor,
    given: LossInputs,
    guides: Guided,
    reference: Tensor | None,
    version: int | None,
    sums: Mapping[str, Tensor],
) -> Numbers:
    """Return the sums over a pass, including the given `sums`.

    Tensors are (A, L), one row per answer; `rows`, (A, 1), has the index of each answer's sample.

    `clipped` counts the tokens that TRL counts: those with an importance ratio beyond the loss's limit, on the side
    that their advantage pulls it to. `kl` is to the policies that sampled the answers, `kl_base` to the base model, if
    computed. `fresh` tokens are in rows that only `version` sampled.
    """
    config, mask = given.config, given.mask.bool()
    advantages, ratios, levels = given.advantages[mask], given.ratios[mask], given.level_ratios[mask]
    kl = k3((given.logprobs - given.sampled_logprobs)[mask])
    low, high = 0.0, config.cap
    if LOSSES[config.loss_type][0] is clipped:
        low, high = 1 - config.clip_low, 1 + config.clip_high
    current = torch.tensor([s.versions == (version,) for s in micro_batch.samples], device=mask.device)
    fresh = current[rows].expand_as(mask)[mask]
    found: dict[str, Tensor | int] = {
        **sums,
        "kl": kl.sum(),
        "fresh_kl": kl[fresh].sum(),
        "fresh_tokens": fresh.sum(),
        "ratio": ratios.sum(),
        "clipped": ((levels < low) & (advantages < 0) | (levels > high) & (advantages > 0)).sum(),
        "pulled_tokens": (advantages != 0).sum(),
        "guided_tokens": guides.there.sum(),
        "guidance": guides.added.abs().sum(),
        "guide_gap": guides.gap.sum(),
        "trained_tokens": len(ratios),
        "outside_tokens": sum(sample.trained_tokens for sample in micro_batch.samples) - len(ratios),
        "computed_tokens": len(micro_batch.tree),
        "micro_batches": 1,
    }
    if reference is not None:  # of a token under the policy, not under the one that sampled it
        found["kl_base"] = (ratios.clamp(max=config.cap) * k3((reference - given.logprobs)[mask])).sum()
    counter = Counter({name: value.item() if isinstance(value, Tensor) else value for name, value in found.items()})
    return Numbers(counter, float(ratios.max()) if len(ratios) else 0.0)


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p, q) >= 0 for tokens sampled from p, given log q/p (http://joschu.net/blog/kl-approx.html)."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp() - 1 - log_ratio


@dataclass(slots=True)
class StepMetrics:
    config: TrainerConfig
    entropy_coef: float
    started: float = field(default_factory=time.perf_counter)
    numbers: Numbers = field(default_factory=Numbers)
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def skipped(self) -> bool:
        return self.numbers.fault is not None or not self.numbers.sums["micro_batches"]

    @property
    def fresh_kl(self) -> float:
        return self.numbers.mean("fresh_kl", "fresh_tokens")

    def warnings(self, tolerance: float) -> dict[str, str]:
        """Return warnings about the step's tokens, by the name of the problem. `tolerance` is for `wrong_sampler`."""
        sums, found = self.numbers.sums, dict[str, str]()
        sampled = sums["trained_tokens"] + sums["outside_tokens"]
        if sums["fresh_tokens"] >= SAMPLER_TOKENS and (why := wrong_sampler(self.fresh_kl, tolerance)):
            found["sampler"] = why
        if sums["masked_tokens"] > MOST * sums["pulled_tokens"]:
            dropped = f"{sums['masked_tokens']:,} of {sums['pulled_tokens']:,} tokens with an advantage teach nothing"
            found["masked_tokens"] = f"{dropped}: trainer.loss {self.config.loss} masks or clips them"
        if sums["outside_tokens"] > MOST * sampled:
            dropped = f"{sums['outside_tokens']:,} of {sampled:,} sampled tokens teach nothing"
            found["outside_tokens"] = f"{dropped}: top_p and the like now exclude them, or a grammar cannot be replayed"
        return found

    def too_large(self) -> str | None:
        """Return a text that says which rollouts have rows that do not fit into memory; None if all fit."""
        if not (rows := self.numbers.too_large):
            return None
        of = f"{len(rows)} row{'s' if len(rows) != 1 else ''} of {some_rollouts(rows)}"
        return f"{of} took too much memory and cannot be trained on; lower trainer.max_sample_tokens"

    def result(self) -> dict[str, float]:
        """Return the step's metrics by name. Some of them may be infinite or NaN."""
        config, numbers, seconds = self.config, self.numbers, self.elapsed
        found = {name: float(numbers.sums[name]) for name in COUNTS} | {
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            "rows_out_of_memory": float(len(numbers.too_large)),
            "skipped": float(self.skipped),
            "entropy": numbers.mean("entropy"),
            "kl": numbers.mean("kl"),
            "sampler_difference": nats_apart(self.fresh_kl),
            "ratio_mean": numbers.mean("ratio"),
            "ratio_max": numbers.ratio_max,
            "clip_share": numbers.mean("clipped"),
            "memory_gib": peak_memory_gib(),
            "trained_tokens_per_s": numbers.sums["trained_tokens"] / seconds,
            "computed_tokens_per_s": numbers.sums["computed_tokens"] / seconds,
            "step_s": seconds,
            "forward_backward_s": self.forward_backward_s,
            "optimizer_s": self.optimizer_s,
        }
        if config.kl_coef or config.kl_metric:
            found["kl_base"] = numbers.mean("kl_base")
        if config.entropy.counts:
            found["entropy_coef"] = self.entropy_coef
        if config.has_guide:
            found["guided_share"] = numbers.mean("guided_tokens")
            found["guide_advantage"] = numbers.mean("guidance", "guided_tokens")
            found["guide_kl"] = -numbers.mean("guide_gap", "guided_tokens")
        return found


def peak_memory_gib() -> float:
    """Return the peak memory in GiB: what torch reserved on the GPU, or without a GPU what this process used."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def nats_apart(kl: float) -> float:
    """Return the root mean square difference of log-probabilities, in nats, that this KL divergence implies."""
    return math.sqrt(2 * max(0.0, kl))


def wrong_sampler(kl: float, tolerance: float) -> str | None:
    """Return why tokens cannot be samples from the weights that served them; None if rounding explains the KL.

    `kl` is between the server's distribution and the trainer's, on tokens that the same weights sampled. `tolerance` is
    the largest mean difference of log-probabilities that rounding explains.
    """
    apart = nats_apart(kl)
    if apart <= TAILS * tolerance:
        return None
    return (
        f"wrong sampler: the log-probabilities that the server reports are {apart:.2g} nats from what the same "
        f"weights give in the trainer, where rounding explains {TAILS * tolerance:.2g}. Either the server does not "
        "sample as it reports: start vLLM with `lightning-proxy vllm` (it adds --logprobs-mode processed_logprobs and "
        "--enable-scale-out). Or it serves a model other than policy.model, or in a dtype other than trainer.dtype. "
        "policy.verify_tolerance sets the limit"
    )


def fault_of_loss(rollout_ids: Sequence[str], given: LossInputs) -> str:
    """Return in words which part of the loss, or else the whole loss, is not finite, and for which rollouts."""
    parts = {
        "captured log-probabilities": given.sampled_logprobs,
        "advantages": given.advantages,
        "the policy's log-probabilities": given.logprobs,
    }
    for name, values in parts.items():
        if bad := [one for one, row in zip(rollout_ids, values, strict=True) if not row.isfinite().all()]:
            return f"{name} are not finite in {some_rollouts(bad)}"
    return f"the loss is not finite for {some_rollouts(rollout_ids)}"


def some_rollouts(rollout_ids: Sequence[str]) -> str:
    """Return the rollouts in words, a few by name."""
    ids = list(dict.fromkeys(rollout_ids))
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return f"rollout{'s' if len(ids) != 1 else ''} {', '.join(ids[:NAMED])}{more}"
