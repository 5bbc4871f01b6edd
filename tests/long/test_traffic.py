"""Traffic recorded from real agent frameworks, replayed without its rollouts' names: are they found again?

The requests begin and end in the order in which they were recorded; the recording says with which versions.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from traffic.server import Call, Traffic, app, config_of, read, serving

from support.served import proxy_of

QUOTED = 30  # characters: what no two rollouts say by chance


class Replay:
    """Plays both the agents and the model; `found` is the rollout that the proxy gives each call."""

    def __init__(self, traffic: Traffic, key: Callable[[Call], str]) -> None:
        self.traffic, self.key = traffic, key
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
        headers = {"X-Replayed": str(n), "Authorization": f"Bearer {self.key(call)}"}
        headers |= {"X-Stainless-Retry-Count": str(call.retry)}
        async with session.post(proxy + call.path, json=call.body, headers=headers) as answer:
            await answer.read()
            self.found[n] = answer.headers["X-Rollout-Id"]


async def replay(traffic: Traffic, directory: Path, key: Callable[[Call], str]) -> dict[int, str]:
    """Ask again, at a server that answers in the API in which it was asked."""
    player = Replay(traffic, key)
    async with serving(app(player.answer)) as upstream:
        config = config_of(upstream, directory)
        policy = config.policy.model_copy(update={"dialects_through_chat": False})
        async with proxy_of(config.model_copy(update={"policy": policy})) as proxy:
            await player.run(proxy)
    return player.found


def undecidable(calls: Sequence[Call]) -> set[str]:
    """Rollouts that ask again what others ask as well, or were told the same about it: no text tells who goes on."""
    asked, told, again = defaultdict(set), defaultdict(set), set()
    for call in calls:
        about = json.dumps([call.body.get(name) for name in ("messages", "input", "previous_response_id")])
        asked[about].add(call.truth)
        if call.retry:
            again.add(about)
        if call.status == 200:
            told[about, json.dumps([call.answer.get(name) for name in ("choices", "output", "content")])].add(
                call.truth
            )
    alike = [*told.values(), *(asked[about] for about in again)]
    return {truth for truths in alike if len(truths) > 1 for truth in truths}


def roots_of(traffic: Traffic) -> list[int]:
    """For each call, the first call of its rollout that quotations lead back to.

    A call quotes an earlier one of its rollout if it holds QUOTED characters, or an id, of the answer that neither the
    question to it nor an answer of any other rollout holds; or if it sends the same again. What a call quotes first
    counts; a call that quotes nothing is a root, even if a later one quotes both it and others.
    """
    answered: dict[str, list[tuple[int, set[str]]]] = defaultdict(list)
    said_by, roots = defaultdict(set), list(range(len(traffic.calls)))
    for call in traffic.calls:
        for piece in pieces(call):
            said_by[piece].add(call.truth)
    for n, ended in traffic.moments:
        call = traffic.calls[n]
        body = text_of(call.body)
        if ended:
            own = {piece for piece in pieces(call) if len(said_by[piece]) == 1 and piece not in body}
            answered[call.truth] = sorted([*answered[call.truth], (n, own)], key=lambda entry: entry[0])
            continue
        for earlier, own in answered[call.truth]:
            if any(piece in body for piece in own) or (call.retry and traffic.calls[earlier].body == call.body):
                roots[n] = roots[earlier]
                break
    return roots


def pieces(call: Call) -> Iterable[str]:
    """Parts of an answer of QUOTED characters, and its ids."""
    if call.status != 200:
        return
    yield call.answer["id"]
    for text in strings([call.answer.get(name) for name in ("choices", "output", "content")]):
        if len(text) >= 20 and " " not in text:
            yield text
        for line in text.splitlines():
            yield from (line[i : i + QUOTED] for i in range(0, len(line) - QUOTED + 1, QUOTED // 2))


def text_of(body: Any) -> str:
    return "\n".join(strings(body))


def strings(value: Any) -> Iterable[str]:
    """All texts in a JSON value, and in JSON within a text."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)
    elif isinstance(value, str):
        is_json = value.startswith(("{", "["))
        try:
            yield from strings(json.loads(value)) if is_json else [value]
        except ValueError:
            yield value


Group = Callable[[int], Any]


def pairs(calls: Iterable[int], *groups: Group) -> int:
    """How many pairs of calls are in the same group, by all of the groupings."""
    return sum(comb(n, 2) for n in Counter(tuple(group(n) for group in groups) for n in calls).values())


class Row(NamedTuple):
    calls: int
    precision: float
    recall: float
    decidable: float  # the part of the true pairs that quotations connect
    recall_there: float


def measure(traffic: Traffic, found: dict[int, str], roots: list[int], truths: set[str]) -> Row:
    """Precision over pairs of calls of which one at least is of these rollouts; recall over pairs of these."""

    def true(n: int) -> str:
        return traffic.calls[n].truth

    inside = [n for n in found if true(n) in truths]
    outside = [n for n in found if true(n) not in truths]
    together = pairs(found, found.__getitem__) - pairs(outside, found.__getitem__)
    right, connected = pairs(inside, true, found.__getitem__), pairs(inside, roots.__getitem__)
    return Row(
        len(inside),
        right / together if together else 1.0,
        right / pairs(inside, true),
        connected / pairs(inside, true),
        pairs(inside, roots.__getitem__, found.__getitem__) / connected if connected else 1.0,
    )


async def test_rollouts_of_real_frameworks_are_found_again(tmp_path: Path) -> None:
    traffic = read()
    found = await replay(traffic, tmp_path, lambda call: "same")
    roots, twins = roots_of(traffic), undecidable(traffic.calls)
    everyone = {call.truth for call in traffic.calls}
    others, everybody = (measure(traffic, found, roots, truths) for truths in (everyone - twins, everyone))
    print("without who tells or asks the same:", others, "all:", everybody)
    assert others.precision >= 0.99
    assert others.recall_there >= 0.99
    assert others.decidable >= 0.85  # or else the recording holds too little to be found
    assert everybody.precision >= 0.98


async def test_agents_with_different_keys_never_share_a_rollout(tmp_path: Path) -> None:
    """Also where they ask, and are told, the same."""
    traffic = read()
    twins = undecidable(traffic.calls)

    def key(call: Call) -> str:
        return "odd" if int(call.truth[-1]) % 2 else "even"

    moments = [(n, ended) for n, ended in traffic.moments if traffic.calls[n].truth in twins]
    found = await replay(Traffic(traffic.versions, traffic.calls, moments), tmp_path, key)
    keys = defaultdict(set)
    for n, rollout in found.items():
        keys[rollout].add(key(traffic.calls[n]))
    assert len(keys) >= 10
    assert all(len(of_one) == 1 for of_one in keys.values())
