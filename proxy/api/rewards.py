"""`POST /reward`: records one reward or a list of them, all or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request

from ...core.config.rollouts import RewardsConfig
from ...core.errors import Forbidden
from ...core.http import in_thread_if_large
from ...core.records import Reward
from .answers import ERRORS, Rewarded, answers
from .bodies import RewardBody, RewardList
from .requests import AgentRoute, Parts, caller_of, json_response, own_key, parts, redacted_text

router = APIRouter(tags=["rewards"], responses=ERRORS, route_class=AgentRoute)


@router.post("/reward", response_model=None, responses=answers(Rewarded | list[Rewarded]))
async def post_reward(
    request: Request,
    body: RewardBody | RewardList,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Any:
    """Record one reward, or a list of them (all or none)."""
    bodies = body if isinstance(body, list) else [body]
    p, caller, sent = parts(request), caller_of(request), await request.body()
    await p.keys.require(caller, (b.rollout_id for b in bodies))
    if caller.rollout is not None and any(b.retrain for b in bodies):
        raise Forbidden("a rollout's own key cannot offer rollouts to the trainer again (retrain)")
    places = range(len(bodies)) if isinstance(body, list) else [None]
    rewards = await in_thread_if_large(len(sent), lambda: [*map(partial(_reward, p), bodies, places)])
    answer = await p.store.rewards.post(rewards, own_key(request, idempotency_key), sent, caller.sender)
    p.metrics.rewards.inc(len(answer))
    if caller.is_admin:
        for rollout_id in await p.store.rewards.changed([one["reward_id"] for one in answer]):
            caller.log_change(f"the reward of rollout {rollout_id} was changed")
    return json_response(answer if isinstance(body, list) else answer[0])


def _reward(p: Parts, body: RewardBody, place: int | None) -> Reward:
    """The reward of a body; Unprocessable outside of the range. `place`: where it stands in a list."""
    p.config.rewards.require(body.reward, "reward" if place is None else f"{place}.reward")
    final = body.call_id is None if body.final is None else body.final
    source, comment = redacted_text(p, body.source), redacted_text(p, body.comment)
    return Reward(body.rollout_id, body.reward, body.call_id, body.name, source, comment, final, body.retrain)


def with_range(document: Callable[[], dict[str, Any]], config: RewardsConfig) -> dict[str, Any]:
    """Return the OpenAPI document with the rewards that this server's configuration allows."""
    made = document()
    low, high = config.range
    made["components"]["schemas"]["RewardBody"]["properties"]["reward"].update(minimum=low, maximum=high)
    return made
