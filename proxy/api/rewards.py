"""`POST /reward`: records one reward or a list of them, all or none."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ...core.errors import Forbidden
from ...core.http import in_thread_if_large
from ...core.records import Reward
from .answers import Rewarded
from .bodies import RewardBody, RewardList
from .requests import AgentRoute, ControlRequest, OwnKey

router = APIRouter(tags=["rewards"], route_class=AgentRoute)


@router.post("/reward", response_model=Rewarded | list[Rewarded])
async def post_reward(request: ControlRequest, body: RewardBody | RewardList, key: OwnKey) -> Any:
    """Record one reward, or a list of them (all or none)."""
    bodies = body if isinstance(body, list) else [body]
    p, caller, sent = request.parts, request.caller, await request.body()
    await p.keys.require(caller, (one.rollout_id for one in bodies))
    if caller.rollout is not None and any(one.retrain for one in bodies):
        raise Forbidden("a rollout's own key cannot offer rollouts to the trainer again (retrain)")

    def checked() -> list[Reward]:
        rewards = []
        for place, one in enumerate(bodies):
            p.config.rewards.require(one.reward, f"{place}.reward" if isinstance(body, list) else "reward")
            source, comment = (text and p.redactor.text(text) for text in (one.source, one.comment))
            final = one.call_id is None if one.final is None else one.final
            rewards.append(Reward(
                one.rollout_id, one.reward, one.call_id, one.name, source, comment, final, one.retrain
            ))  # fmt: skip
        return rewards

    answer = await p.store.rewards.post(await in_thread_if_large(len(sent), checked), key, sent, caller.sender)
    p.metrics.rewards.inc(len(answer))
    if caller.is_admin:
        for rollout_id in await p.store.rewards.changed([one["reward_id"] for one in answer]):
            caller.log_change(f"the reward of rollout {rollout_id} was changed")
    return answer if isinstance(body, list) else answer[0]
