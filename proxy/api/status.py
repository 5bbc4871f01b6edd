"""`GET /status`: counts of rollouts, what waits for the trainer, and how the live version is served."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from fastapi import APIRouter

from ...core.json_text import fields_of
from ...store.store import Store
from .answers import Status, Verified
from .requests import ControlRequest, Parts, UserRoute

router = APIRouter(tags=["status"], route_class=UserRoute)

NEWEST = 200
RECENT_CALLS = 500


@router.get("/status", response_model=Status)
async def get_status(request: ControlRequest) -> dict[str, Any]:
    """Count rollouts by mode and status, those that wait, and the newest rollouts and calls that are not trained on.

    For a key that sees only its own rollouts, the answer counts these alone.
    """
    p, sight = request.parts, request.caller.sight
    store, filters, per_step = p.store, {"mode": "train"}, p.config.trainer.rollouts_per_step
    if sight.key_id is None:
        counts, waits = await store.rollouts.counts(), await waiting(p)
    else:
        counts, waits = await store.rollouts.counts_of_key(sight.key_id)
        filters["key_id"] = sight.key_id
    rollouts = defaultdict[str, dict[str, int]](dict)
    for (mode, status), count in sorted(counts.items()):
        rollouts[mode][status] = count
    newest, _ = await store.rollouts.page(filters, NEWEST)
    unrewarded, names = await store.waiting.unrewarded(newest)
    standstill = await store.waiting.standstill(per_step)
    view = {
        "rollouts": rollouts,
        "waiting": waits,
        "per_step": per_step,
        "dropped": dict(Counter(one.dropped for one in newest if one.dropped).most_common()),
        "unrewarded": unrewarded,
        "other_rewards": names,
        "publishing": None if p.swap is None else p.swap.why_not_published(),
        "untrainable": await store.calls.untrainable(NEWEST),
        "standstill": None if standstill is None else fields_of(standstill) | {"story": standstill.story},
        "uncounted": await store.trust.uncounted(),
        "collapse": await store.steps.collapse(),
        "verified": await verified(store),
        "plugins": p.config.plugins,
        "recent": await store.reports.traffic(RECENT_CALLS),
    }
    for plugin in p.plugins:
        view |= await plugin.status_fields(store, sight.key_id)
    return sight.of("status", view)


async def waiting(p: Parts) -> int:
    """Return how many complete rollouts wait for the trainer."""
    trainer = p.config.trainer
    return await p.store.waiting.count(lone=trainer.takes_lone_rollouts, failed=trainer.failed_reward is not None)


async def verified(store: Store) -> Verified:
    """Read how the live version was verified, and when it was last probed."""
    live = await store.versions.live()
    step, probed = await store.steps.of_version(live.version), await store.probes.of(live.version)
    metrics = step.metrics if step is not None and step.metrics.get("version") == live.version else {}
    deviations, by = metrics.get("verify_deviations"), metrics.get("verified_by")
    if live.version == 0:
        story = "the base model: there is nothing to verify"
    elif not live.verified:
        story = "not verified yet: merged weights on a single server are compared once they answer agents"
    elif by is not None:
        story = f"by {by} alone: answers did not tell new weights from old"
    elif deviations is None:
        story = "it was verified; how clearly is not recorded"
    else:
        story = f"the new weights are {deviations:.3g} standard deviations from the old"
    return Verified(
        live.version, live.verified, deviations, metrics.get("verify_difference"), by,
        None if probed is None else probed.at, None if probed is None else probed.problem, story,
    )  # fmt: skip
