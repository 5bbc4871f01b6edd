"""`GET /status`: counts of rollouts and what waits for the trainer."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from ..access.sight import Sight
from .answers import ERRORS, Status, answers
from .requests import AgentRoute, Parts, caller_of, parts_for_all
from .verified import verified

router = APIRouter(tags=["status"], responses=ERRORS, route_class=AgentRoute)

NEWEST = 200
RECENT_CALLS = 500


@router.get("/status", response_model=None, responses=answers(Status))
async def get_status(request: Request) -> dict[str, Any]:
    """Count rollouts by mode and status, those that wait, and the newest rollouts and calls that are not trained on.

    `publishing` says why new weights could not be published; `standstill`, that nothing was learned lately; `collapse`,
    that publication is stopped, and why; `uncounted`, that none of the newest rewards acts on everybody. `verified`:
    how the live version was seen to be served, and when last. `recent` sums up the newest 500 calls. A training step
    takes `per_step` of those that wait.
    For a key that sees only its own rollouts, the answer counts these alone.
    """
    p, sight = await parts_for_all(request), caller_of(request).sight
    counts, waits = await _counted(p, sight)
    rollouts: dict[str, dict[str, int]] = {}
    for (mode, status), count in sorted(counts.items()):
        rollouts.setdefault(mode, {})[status] = count
    of_key = {} if sight.key_id is None else {"key_id": sight.key_id}
    newest, _ = await p.store.rollouts.page({"mode": "train"} | of_key, NEWEST)
    dropped = Counter(rollout.dropped for rollout in newest if rollout.dropped)
    found = await p.store.waiting.standstill(p.config.trainer.rollouts_per_step)
    uncounted = await p.store.trust.uncounted()
    collapse, seen = await p.store.steps.collapse(), await verified(p.store)
    unrewarded, names = await p.store.waiting.unrewarded(newest)
    view = {
        "rollouts": rollouts,
        "waiting": waits,
        "per_step": p.config.trainer.rollouts_per_step,
        "dropped": dict(dropped.most_common()),
        "unrewarded": unrewarded,
        "other_rewards": names,
        "publishing": None if p.swap is None else p.swap.why_not_published(),
        "untrainable": await p.store.calls.untrainable(NEWEST),
        "standstill": None if found is None else asdict(found) | {"story": found.story},
        "uncounted": None if uncounted is None else asdict(uncounted),
        "collapse": None if collapse is None else asdict(collapse),
        "verified": asdict(seen),
        "plugins": p.config.plugins,
        "recent": asdict(await p.store.traffic.recent(RECENT_CALLS)),
    }
    for plugin in p.plugins:
        view |= await plugin.status_fields(p.store, sight.key_id)
    return sight.of("status", view)


async def _counted(p: Parts, sight: Sight) -> tuple[dict[tuple[str, str], int], int]:
    """The rollouts that a caller sees, by mode and status, and how many of them wait for the trainer."""
    if sight.key_id is not None:
        return await p.store.rollouts.counts_of_key(sight.key_id)
    return await p.store.rollouts.counts(), await waiting(p)


async def waiting(p: Parts) -> int:
    """Return how many complete rollouts wait for the trainer."""
    trainer = p.config.trainer
    return await p.store.waiting.count(lone=trainer.takes_lone_rollouts, failed=trainer.failed_reward is not None)
