"""A plugin: it rewards short answers, counts them at a route of its own, and assigns credit."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter

from lightning_proxy.core.config.trainer import TrainerConfig
from lightning_proxy.core.records import CallEnd, CallStart, Reward
from lightning_proxy.proxy.plugins import AgentRoute, Core, Hooks, ProxyPlugin
from lightning_proxy.trainer.types import Sibling

router = APIRouter(route_class=AgentRoute, prefix="/plugins/brevity")
rewarded: list[str] = []  # calls


@router.get("/count")
async def count() -> dict[str, int]:
    return {"rewarded": len(rewarded)}


class proxy(ProxyPlugin):
    routers = (router,)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        async def on_call(start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
            tokens = sum(len(choice.token_ids) for choice in end.choices)
            reward = Reward(end.rollout_id, 1 / (1 + tokens), call_id=end.call_id, final=False, source="brevity")
            await core.store.rewards.post([reward])
            rewarded.append(end.call_id)

        yield Hooks(on_call=on_call)


def shared(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Give each call an equal part of what its rollout is above the mean (`trainer.credit: brevity:shared`)."""
    returns = [sibling.rewards.sum for sibling in group]
    mean = sum(returns) / len(returns)
    return [[(own - mean) / max(1, len(s.calls))] * len(s.calls) for own, s in zip(returns, group, strict=True)]
