"""Explains why a step is skipped: names the values that are not finite, and their rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

NAMED = 5


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
