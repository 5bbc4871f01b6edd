"""Why a step is skipped: what in it is not finite, and which rollouts that came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

NAMED = 5


def fault_of_loss(rollout_ids: Sequence[str], parts: Mapping[str, Tensor]) -> str:
    """The first of `parts` (name -> (A, L), its rows of `rollout_ids`) that is not finite, else the loss itself."""
    for name, values in parts.items():
        finite = values.isfinite().all(1).tolist()
        if not all(finite):
            return f"{name} not finite in {named([r for r, fine in zip(rollout_ids, finite, strict=True) if not fine])}"
    return f"the loss is not finite over {named(rollout_ids)}"


def named(rollout_ids: Sequence[str]) -> str:
    """The rollouts in words, a few by name."""
    ids = list(dict.fromkeys(rollout_ids))
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return f"rollout{'s' if len(ids) != 1 else ''} {', '.join(ids[:NAMED])}{more}"
