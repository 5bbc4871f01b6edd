"""Decides which version answers a rollout of a test. Pure, so that every process decides the same."""

from __future__ import annotations

from hashlib import blake2b

from .tests import Assigned, Promotion

LONE = 2  # rollouts without a task are compared in pairs


def group_of(place: int, task_id: str | None, group_size: int) -> int:
    """Return the number of a rollout's group among those of its task: each so many in order of opening are siblings."""
    return place // (LONE if task_id is None else group_size)


def choose(promotion: Promotion, task_id: str | None, place: int, group_size: int, share: float) -> Assigned:
    """Return the version for the rollout at a place, from 0, among those of its task (None: of no task).

    A group is compared entirely or not at all. In it, one of each two rollouts in a row goes to each version; which
    one comes first is drawn by a hash (permuted blocks of two), so order says nothing.
    """
    group = group_of(place, task_id, group_size)
    if _drawn(promotion.n, task_id, "group", group) >= 2 * share:
        return Assigned(place, promotion.against, compared=False)
    within = place - group * (LONE if task_id is None else group_size)
    candidate_first = _drawn(promotion.n, task_id, "pair", group, within // 2) < 0.5
    is_candidate = (within % 2 == 0) == candidate_first
    return Assigned(place, promotion.version if is_candidate else promotion.against, compared=True)


def _drawn(*what: object) -> float:
    """A number in [0, 1) that is always the same for the same."""
    digest = blake2b("\n".join(map(repr, what)).encode(), digest_size=7).digest()
    return int.from_bytes(digest) / 256**7
