"""What a training step reports: sums over micro-batches, turned into a few stable names."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_proxy.trainer.microbatches import MicroBatch
from lightning_proxy.trainer.scoring import Scores

# exp() of anything larger is of no use in a metric and may overflow.
_MAX_LOG_RATIO = 20.0


SUMS = (
    "loss", "entropy_sum", "kl_sum", "ratio_sum", "clipped", "trained_tokens", "computed_tokens", "padded_tokens",
    "micro_batches",
)  # fmt: skip


@dataclass(slots=True)
class StepMetrics:
    """`limits`: importance ratios outside of them count as clipped."""

    started: float
    limits: tuple[float, float]
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    skipped: bool = False
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    trained_tokens: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    micro_batches: int = 0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def add(self, micro_batch: MicroBatch, loss: Tensor, inputs: dict[str, Tensor], scores: Scores) -> None:
        mask = inputs["tool_mask"].bool()
        log_ratio = (scores.logprobs.detach()[:, 1:] - inputs["old_per_token_logps"])[mask]
        ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
        low, high = self.limits
        self.loss += float(loss)
        self.entropy_sum += float(scores.entropies[:, 1:][mask].sum())
        # k3 of http://joschu.net/blog/kl-approx.html, tokens sampled from the behaviour policy.
        self.kl_sum += float((ratio - 1 - log_ratio).sum())
        self.ratio_sum += float(ratio.sum())
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        self.clipped += float(torch.logical_or(ratio < low, ratio > high).sum())
        self.trained_tokens += len(ratio)
        self.computed_tokens += len(micro_batch.tree)
        self.padded_tokens += micro_batch.padded_tokens
        self.micro_batches += 1

    def sum(self, parts: Sequence[StepMetrics]) -> StepMetrics:
        """The metrics of all ranks' parts; what is no sum over micro-batches is ours."""
        if len(parts) == 1:
            return parts[0]
        whole = replace(self)
        for name in SUMS:
            setattr(whole, name, sum(getattr(part, name) for part in parts))
        whole.ratio_max = max(part.ratio_max for part in parts)
        return whole

    def result(self) -> dict[str, float]:
        """Finite or not as they came out; means are over trained tokens."""
        n = max(self.trained_tokens, 1)
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            "skipped": float(self.skipped),
            "entropy": self.entropy_sum / n,
            "kl": self.kl_sum / n,
            "ratio_mean": self.ratio_sum / n,
            "ratio_max": self.ratio_max,
            "clip_share": self.clipped / n,
            "trained_tokens": float(self.trained_tokens),
            "computed_tokens": float(self.computed_tokens),
            "padded_tokens": float(self.padded_tokens),
            "micro_batches": float(self.micro_batches),
            "step_s": time.perf_counter() - self.started,
        }
