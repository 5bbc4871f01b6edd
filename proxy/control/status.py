"""`GET /status`: counts of rollouts and what waits for the trainer. Contract, section 3."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from .answers import ERRORS, Status, answers
from .door import AgentRoute
from .parts import Parts
from .requests import parts_for_all

router = APIRouter(tags=["status"], responses=ERRORS, route_class=AgentRoute)

NEWEST = 200
RECENT_CALLS = 500


@router.get("/status", response_model=None, responses=answers(Status))
async def get_status(request: Request) -> dict[str, Any]:
    """Count rollouts by mode and status, those that wait, and the newest rollouts and calls that are not trained on.

    `publishing` says why new weights could not be published; `standstill`, that nothing was learned lately; `collapse`,
    that publication is stopped, and why. `recent` sums up the newest 500 calls.
    """
    p = await parts_for_all(request)
    rollouts: dict[str, dict[str, int]] = {}
    for (mode, status), count in sorted((await p.store.rollouts.counts()).items()):
        rollouts.setdefault(mode, {})[status] = count
    newest, _ = await p.store.rollouts.page({"mode": "train"}, NEWEST)
    dropped = Counter(rollout.dropped for rollout in newest if rollout.dropped)
    found = await p.store.waiting.standstill(p.config.trainer.rollouts_per_step)
    collapse = await p.store.steps.collapse()
    return {
        "rollouts": rollouts,
        "waiting": await waiting(p),
        "dropped": dict(dropped.most_common()),
        "publishing": None if p.swap is None else p.swap.why_not_published(),
        "untrainable": await p.store.calls.untrainable(NEWEST),
        "standstill": None if found is None else asdict(found) | {"story": found.story},
        "collapse": None if collapse is None else asdict(collapse),
        "recent": asdict(await p.store.traffic.recent(RECENT_CALLS)),
    }


async def waiting(p: Parts) -> int:
    """Return how many complete rollouts wait for the trainer."""
    trainer = p.config.trainer
    return await p.store.waiting.count(lone=trainer.takes_lone_rollouts, failed=trainer.failed_reward is not None)
