"""Traffic recorded from real agent frameworks, replayed without its rollouts' names: are they found again?

The requests begin and end in the order in which they were recorded; the recording says with which versions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from math import comb
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from traffic.server import Traffic, app, config_of, read, serving

from support.served import proxy_of


class Replay:
    """Plays both the agents and the model; `found` is the rollout that the proxy gives each call."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.found: dict[int, str] = {}
        self._arrived = [asyncio.Event() for _ in traffic.calls]
        self._released = [asyncio.Event() for _ in traffic.calls]

    async def answer(self, request: web.Request, _: Any) -> tuple[int, Any] | None:
        n = int(request.headers["X-Replayed"])
        self._arrived[n].set()
        await self._released[n].wait()
        call = self.traffic.calls[n]
        return None if call.status is None else (call.status, call.answer)

    async def run(self, proxy: str) -> None:
        under_way: dict[int, asyncio.Task[None]] = {}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for n, ended in self.traffic.moments:
                if not ended:
                    under_way[n] = asyncio.create_task(self._ask(session, proxy, n))
                    await asyncio.wait_for(self._arrived[n].wait(), 20)
                elif self.traffic.calls[n].status is None:  # the client left
                    under_way[n].cancel()
                    await asyncio.gather(under_way[n], return_exceptions=True)
                else:
                    self._released[n].set()
                    await asyncio.wait_for(under_way[n], 20)

    async def _ask(self, session: aiohttp.ClientSession, proxy: str, n: int) -> None:
        call = self.traffic.calls[n]
        headers = {"X-Replayed": str(n), "X-Stainless-Retry-Count": str(call.retry), "Authorization": "Bearer same"}
        async with session.post(proxy + call.path, json=call.body, headers=headers) as answer:
            await answer.read()
            self.found[n] = answer.headers["X-Rollout-Id"]


async def replay(traffic: Traffic, directory: Path) -> dict[int, str]:
    """Ask again, at a server that answers in the API in which it was asked."""
    player = Replay(traffic)
    async with serving(app(player.answer)) as upstream:
        config = config_of(upstream, directory)
        policy = config.policy.model_copy(update={"dialects_through_chat": False})
        async with proxy_of(config.model_copy(update={"policy": policy})) as proxy:
            await player.run(proxy)
    return player.found


def pairs(calls: Iterable[int], *groups: Callable[[int], str]) -> int:
    """How many pairs of calls are in the same group, by all of the groupings."""
    return sum(comb(n, 2) for n in Counter(tuple(group(n) for group in groups) for n in calls).values())


async def test_rollouts_of_real_frameworks_are_found_again(tmp_path: Path) -> None:
    """Of pairs of calls: of those that were put into one rollout few are of two, and few of one rollout are apart."""
    traffic = read()
    found = await replay(traffic, tmp_path)

    def true(n: int) -> str:
        return traffic.calls[n].truth

    right = pairs(found, true, found.__getitem__)
    precision, recall = right / pairs(found, found.__getitem__), right / pairs(found, true)
    print(f"{len(found)} calls: precision {precision:.4f}, recall {recall:.4f}")
    assert precision >= 0.99 and recall >= 0.96
