"""The configured loss: TRL's term for every token, and the weight of each token.

The loss does not depend on how calls are merged into rows and how a step is cut into micro-batches. Three things make
it so. A sequence in TRL's sense is one answer: the action of a call, the unit that has one advantage (arXiv 2508.03680,
section 3). The weights of tokens are known before the step begins; TRL divides by what a micro-batch holds. The KL to
the base model carries the same weights and cap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from ...core.config.trainer import TrainerConfig
from ..types import Sample


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss type: the TRL loss type whose term a token has, and the divisor of the sum over a rollout's tokens.

    Divisors: `own` is the number of the rollout's tokens, so that rollouts weigh the same; `mean` is the mean number
    over the step's rollouts, so that tokens weigh the same; `limit` is `trainer.max_sample_tokens`; `one` is 1.
    """

    term: Literal["dapo", "cispo", "sapo", "vespo"]
    divisor: Literal["own", "mean", "limit", "one"]


# TRL's grpo, dr_grpo, dapo, bnpo and luspo have the same term, and differ in what they divide by.
LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cispo": Loss("cispo", "own"),
        "grpo": Loss("dapo", "own"),
        "sapo": Loss("sapo", "own"),
        "vespo": Loss("vespo", "own"),
        "dapo": Loss("dapo", "mean"),
        "bnpo": Loss("dapo", "mean"),
        "dr_grpo": Loss("dapo", "limit"),
        "luspo": Loss("dapo", "one"),
    }
)


# `trainer.weighting` in place of the loss's own. For `sequence`, what is counted is answers.
WEIGHTINGS = {"token": "mean", "rollout": "own", "sequence": "mean"}


def weight_limits(config: TrainerConfig) -> tuple[float, float]:
    """Return the least and greatest importance ratio that do not count as clipped."""
    if LOSSES[config.loss_type].term == "dapo":
        return 1 - config.clip_low, 1 + config.clip_high
    return 0.0, config.importance_cap


def token_weights(samples: Sequence[Sample], config: TrainerConfig, compared: int = 0) -> dict[str, float]:
    """Return the weight of each trained token in the step's loss, by rollout, without rollouts that have no tokens.

    The loss is averaged over `compared` rollouts, those that teach nothing included; 0 stands for those of `samples`.
    With `weighting: sequence` it is the weight of each answer, which its tokens share (`loss_inputs`).
    """
    tokens: Counter[str] = Counter()
    for sample in samples:
        by_answer = config.weighting == "sequence"
        tokens[sample.rollout_id] += len([*answer_spans(sample)]) if by_answer else sample.trained_tokens
    tokens = +tokens  # drops rollouts without any
    mean = tokens.total() / max(len(tokens), 1)
    divisors = {"mean": mean, "limit": float(config.max_sample_tokens or 1), "one": 1.0}
    divisor = WEIGHTINGS.get(config.weighting, LOSSES[config.loss_type].divisor)
    rollouts = compared or len(tokens)
    return {rollout_id: 1 / (rollouts * divisors.get(divisor, own)) for rollout_id, own in tokens.items()}


@dataclass(frozen=True, slots=True)
class Answers:
    """The places of the A answers of B samples in (B, T) tensors. Each becomes a row of length L."""

    rows: Tensor  # (A, 1)
    columns: Tensor  # (A, L)
    mask: Tensor  # (A, L), 1.0 where there is a token

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Answers:
        spans = [(row, *span) for row, sample in enumerate(samples) for span in answer_spans(sample)]
        rows, starts, ends = torch.tensor(spans, device=device).reshape(-1, 3, 1).unbind(1)
        longest = int((ends - starts).max()) if spans else 0
        columns = starts + torch.arange(longest, device=device)
        return cls(rows, columns.minimum(ends - 1), (columns < ends).float())

    def take(self, values: Tensor) -> Tensor:
        """Gather (B, T) -> (A, L), with zeros where there is no token."""
        return torch.where(self.mask.bool(), values[self.rows, self.columns], 0.0)


def answer_spans(sample: Sample) -> Iterator[tuple[int, int]]:
    """Return [start, end) of each answer: an unbroken run of sampled tokens with one advantage."""
    end = 0
    for (sampled, _), tokens in groupby(zip(sample.mask, sample.advantages, strict=True)):
        start, end = end, end + len(list(tokens))
        if sampled:
            yield start, end


def loss_inputs(
    samples: Sequence[Sample], answers: Answers, weights: Mapping[str, float], *, by_answer: bool = False
) -> dict[str, Tensor]:
    """Return the inputs of the loss, apart from the policy's log-probabilities: (A, L) each, 0 without a token.

    `by_answer`: the weights are those of answers, and not of tokens.
    """
    mask = answers.mask
    shares = mask / mask.sum(1, keepdim=True) if by_answer else mask
    of_rows = torch.tensor([weights[sample.rollout_id] for sample in samples], device=mask.device)
    return {
        "completion_mask": mask,
        "advantages": answers.take(padded([s.advantages for s in samples], mask.device)),
        "old_per_token_logps": answers.take(padded([s.logprobs for s in samples], mask.device)),
        "token_weights": of_rows[answers.rows] * shares,
    }


def leave_out_tokens(inputs: dict[str, Tensor], logprobs: Tensor) -> Tensor:
    """Take the tokens whose log-probability is -inf out of `inputs`; return the log-probabilities without them.

    The policy that is trained would not sample them: its top_p and the like leave them out under the present weights.
    The tokens that stay keep their weights.
    """
    outside = logprobs.detach().isneginf()
    for name in ("completion_mask", "token_weights"):
        inputs[name] = inputs[name].masked_fill(outside, 0.0)
    return torch.where(outside, inputs["old_per_token_logps"], logprobs)


def policy_loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: TrainerConfig) -> Tensor:
    """Sum each token's weight times its term, which is that of TRL's GRPOTrainer.

    `importance_cap` bounds weights that nothing else bounds: sapo's gate and vespo's weighting stay under 1.6 and 1.3
    with their default settings.
    """
    mask, term = inputs["completion_mask"], LOSSES[config.loss_type].term
    weighted = inputs["advantages"] * inputs["token_weights"]
    log_ratios = logprobs - inputs["old_per_token_logps"]
    ratios = importance_ratios(log_ratios, mask, config.importance_level)
    if term == "cispo":
        gains = ratios.detach().clamp(max=config.importance_cap) * weighted * logprobs
    elif term == "sapo":
        temperatures = torch.where(weighted > 0, config.sapo.temperature_pos, config.sapo.temperature_neg)
        gains = torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures * weighted
    elif term == "vespo":
        gains = _gamma_weights(log_ratios.detach(), weighted, mask, config) * weighted * logprobs
    else:
        clipped = ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
        bounded = ratios.clamp(max=max(config.importance_cap, 1 + config.clip_high))
        gains = torch.min(bounded * weighted, clipped * weighted)
    return -gains.sum()


def _gamma_weights(log_ratios: Tensor, advantages: Tensor, mask: Tensor, config: TrainerConfig) -> Tensor:
    """VESPO's weight of an answer, w^k · e^(λ - λw) of its sequence ratio w: (A, L)."""
    log_w = (log_ratios.clamp(-20.0, 20.0) * mask).sum(1, keepdim=True).clamp(math.log(1e-8), 20.0)
    good = advantages >= 0
    k = torch.where(good, config.vespo.k_pos, config.vespo.k_neg)
    limit = torch.where(good, config.vespo.lambda_pos, config.vespo.lambda_neg)
    return (limit + k * log_w - limit * log_w.exp()).exp()


def importance_ratios(log_ratios: Tensor, mask: Tensor, level: str) -> Tensor:
    """Turn (A, L) log-ratios into ratios: per token, or an answer's geometric mean (GSPO, arXiv 2507.18071)."""
    if level == "sequence":
        log_ratios = ((log_ratios * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(
            log_ratios
        )
    return log_ratios.exp()


def kl_penalty(logprobs: Tensor, reference: Tensor, inputs: Mapping[str, Tensor], cap: float) -> Tensor:
    """Compute the KL to the reference, weighted like the loss: sum of weight · min(ratio, cap) · (logp - ref)² / 2.

    Its gradient, ratio · (logp - ref) · ∇logp, is that of TRL's ratio · k3 (`use_bias_correction_kl`; DeepSeek-V3.2,
    arXiv 2512.02556). Apart from the cap, it is the unbiased gradient of the reverse KL.
    """
    ratios = (logprobs.detach() - inputs["old_per_token_logps"]).exp().clamp(max=cap)
    return (inputs["token_weights"] * ratios * (logprobs - reference) ** 2).sum() / 2


def padded(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Return (B, T) in float32, with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], True).to(device)
