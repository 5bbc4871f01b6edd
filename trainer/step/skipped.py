"""Explains why a step is skipped: values that are not finite, a sampler that is not the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

NAMED = 5
# Where the mean difference of log-probabilities may be so large, their root mean square is some times larger.
TAILS = 3.0
SAMPLER_TOKENS = 256  # a step judges its sampler by no fewer


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
