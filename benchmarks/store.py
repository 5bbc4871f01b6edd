"""What grows with the store: `make bench-store`, about ten minutes.

Fills a store with 100,000 calls, 10,000 versions and steps, and one rollout of 500 turns. Asks each route of a proxy on
it, and takes each look that a trainer and a proxy take at every poll, second and step, beside a nearly empty store, in
turns. None may take over 3 times as long but by the size of its answer: its bytes, or the calls that it is of.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filled import SIBLINGS, Size, fill
from report import Page, option
from servers import Server
from targets import start_proxy, start_upstream

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.trainer import TrainerConfig
from lightning_proxy.core.records import Reward
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.store.database import Feed
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.groups import WaitingGroups

FULL, SMALL = Size(100_000, 10_000, 500), Size(400, 50, 20)
EMPTY = Size(4 * SIBLINGS * 8, 4, 4)
REPEATS = 15
TIMES = 3.0  # slower than beside an empty store, and by its answer's size
NO_JSON = ("/", "/feed", "/metrics", "/docs", "/redoc", "/openapi.json")
ROLLOUTS = ("r1", "long")

Look = Callable[[Store], Awaitable[object]]
tests_of = cache(lambda store: Promotions(store.database))


@dataclass(frozen=True)
class Figure:
    """What one route or look takes in the filled store and in the empty one.

    Milliseconds, bytes of its answer, and how many calls it is of, if it is of the long rollout.
    """

    when: str
    name: str
    ms: tuple[float, float]
    size: tuple[int, int]
    calls: tuple[int, int] = (1, 1)

    @property
    def times(self) -> float:
        return self.ms[0] / self.ms[1]

    @property
    def larger(self) -> float:
        return max(1.0, self.size[0] / max(1, self.size[1]), self.calls[0] / self.calls[1])

    @property
    def grows(self) -> bool:
        return self.times > TIMES * self.larger


def looks(size: Size) -> list[tuple[str, str, Look]]:
    """What is read and written at each call, second, poll and step. `size` says which version is the newest."""
    newest, task = size.versions, "task-0"

    waiting: dict[Store, WaitingGroups] = {}  # what a trainer keeps from poll to poll

    async def groups(store: Store) -> None:
        known = waiting.setdefault(store, WaitingGroups(TrainerConfig(tasks_per_step=1_000_000), store))
        await known.next(fewer=False, since=None)

    async def step(store: Store) -> None:
        groups = await store.waiting.groups()
        rollouts = [one.rollout_id for group in groups[:1] for one in (await store.waiting.siblings(group))[0]]
        await store.steps.claim(rollouts[:0], newest)
        await store.steps.release_unfinished()

    return [
        ("a call", "a version by its served name", lambda s: s.versions.named(f"policy-v{newest}")),
        ("a call", "an adapter by its served name", lambda s: s.versions.named(f"policy-v{newest}.planner")),
        ("a call", "the live version", lambda s: s.versions.live_now()),
        ("a call", "the version that a rollout keeps", lambda s: s.rollouts.get("r1")),
        ("a call", "the test under way", lambda s: tests_of(s).now()),
        ("a second", "versions to serve", lambda s: s.versions.to_serve({newest, newest - 1})),
        ("a second", "versions of running rollouts", lambda s: s.versions.pinned(0.0)),
        ("a second", "whether anything was ever published", lambda s: s.versions.is_new()),
        ("a second", "the newest of the feed", lambda s: Feed(s.database).newest()),
        ("a second", "the test under way, with its numbers", lambda s: tests_of(s).under_way()),
        ("a poll", "the last step", lambda s: s.steps.last()),
        ("a poll", "the live version as a row", lambda s: s.versions.live()),
        ("a poll", "why publishing has stopped", lambda s: s.steps.collapse()),
        ("a poll", "what a probe found", lambda s: s.versions.probed(newest)),
        ("a poll", "groups that wait", groups),
        ("a poll", "rollouts without a task that wait", lambda s: s.waiting.lone(limit=SIBLINGS)),
        ("a poll", "rewards of the newest versions", lambda s: s.rewards.since(newest - 2, 64)),
        ("a poll", "whether training stands still", lambda s: s.waiting.standstill(SIBLINGS)),
        ("a step", "claim and give back", step),
        ("a step", "a reward", lambda s: s.rewards.post([Reward("r1", 0.5, final=False)])),
        ("a step", "a rollout with its calls", lambda s: s.calls.of("r1")),
        ("a step", "earlier rollouts of a task", lambda s: s.waiting.earlier("r1", task, 8)),
        ("a step", "the newest steps", lambda s: s.steps.newest(4)),
        ("a step", "versions with files", lambda s: s.versions.with_files()),
        ("a step", "checkpoints to remove", lambda s: s.steps.old_checkpoints(100)),
        ("a step", "unfinished versions", lambda s: s.versions.of_status("publishing")),
    ]


async def looked(directory: Path, sizes: tuple[Size, Size], repeats: int) -> list[Figure]:
    """Each look at the filled store and at the empty one, in turns."""
    async with AsyncExitStack() as stack:
        stores = [Store(await stack.enter_async_context(opened(store_of(directory, n)))) for n in range(2)]
        found = []
        for both in zip(*map(looks, sizes), strict=True):
            took: tuple[list[float], list[float]] = ([], [])
            bytes_ = [0, 0]
            for _ in range(repeats):
                for n, (_, _, look) in enumerate(both):
                    began = time.perf_counter()
                    answer = await look(stores[n])
                    took[n].append(1000 * (time.perf_counter() - began))
                    bytes_[n] = len(repr(answer))
            when, name, _ = both[0]
            found.append(Figure(when, name, (min(took[0]), min(took[1])), (bytes_[0], bytes_[1])))
        return found


def routes(server: Server, size: Size) -> Iterator[str]:
    """Every route of the document that is read, with values for what it needs."""
    document = server.get("/openapi.json")
    values = {"a": "0", "b": str(size.versions), "run": "1", "name": "greeting", "person": "anna"}
    for path, methods in sorted(document["paths"].items()):
        if "get" not in methods or path in NO_JSON:
            continue
        needed = [p["name"] for p in methods["get"].get("parameters", []) if p["required"] and p["in"] == "query"]
        query = "?" + "&".join(f"{name}={values[name]}" for name in needed) if needed else ""
        for rollout in ROLLOUTS if "{rollout_id}" in path else ("",):
            yield path.replace("{rollout_id}", rollout).replace("{name}", values["name"]) + query


def asked(directory: Path, upstream: Server, sizes: tuple[Size, Size], repeats: int) -> list[Figure]:
    """Each route of a proxy on the filled store and of one on the empty store, in turns."""
    with ExitStack() as stack:
        servers = [start_proxy(directory / str(n), upstream.url) for n in range(2)]
        for server in servers:
            stack.callback(server.stop)
            server.settle()
            server.send("POST", "/prompts", {"name": "greeting", "text": "Be kind to everybody who asks."})
        connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=120) for server in servers]
        found = []
        for both in zip(*(routes(s, size) for s, size in zip(servers, sizes, strict=True)), strict=True):
            took: tuple[list[float], list[float]] = ([], [])
            bytes_, status = [0, 0], 0
            for _ in range(repeats):
                for n, path in enumerate(both):
                    began = time.perf_counter()
                    status, bytes_[n] = ask(connections[n], path)
                    took[n].append(1000 * (time.perf_counter() - began))
            name = f"`GET {both[0]}`" + ("" if status == 200 else f" ({status})")
            calls = (sizes[0].turns, sizes[1].turns) if "/long" in name else (1, 1)
            found.append(Figure("a request", name, (min(took[0]), min(took[1])), (bytes_[0], bytes_[1]), calls))
        return found


def ask(connection: http.client.HTTPConnection, path: str) -> tuple[int, int]:
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, len(answer.read())


def store_of(directory: Path, n: int) -> StoreConfig:
    return StoreConfig(url=f"sqlite:///{directory / str(n) / 'store.db'}")


def measure(size: Size, repeats: int) -> list[Figure]:
    sizes = (size, EMPTY)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        for n, one in enumerate(sizes):
            (directory / str(n)).mkdir()
            asyncio.run(fill(store_of(directory, n), one))
        upstream = start_upstream()
        stack.callback(upstream.stop)
        return [*asked(directory, upstream, sizes, repeats), *asyncio.run(looked(directory, sizes, repeats))]


def table(figures: list[Figure], size: Size, repeats: int, page: Path | None) -> None:
    told = Page("What grows with the store")
    told.text([
        f"{size.calls:,} calls, {size.versions:,} versions and as many steps, and a rollout of {size.turns} turns,",
        f"beside {EMPTY.calls} calls, {EMPTY.versions} versions and {EMPTY.turns} turns.",
        f"The fastest of {repeats} tries, which take turns.",
        f"**Bold**: over {TIMES:g} times as long as its answer is larger: in bytes or, of the long rollout, in calls.",
    ])  # fmt: skip
    head = ("at", "what", "ms", "ms, empty", "times", "kB", "kB, empty", "larger", "ms by size")
    rows = []
    for f in figures:
        times = f"**{f.times:.1f}**" if f.grows else f"{f.times:.1f}"
        sizes = f"{f.size[0] / 1000:,.1f}", f"{f.size[1] / 1000:,.1f}", f"{f.larger:.1f}", f"{f.times / f.larger:.1f}"
        rows.append((f.when, f.name, f"{f.ms[0]:.2f}", f"{f.ms[1]:.2f}", times, *sizes))
    told.table("", head, rows)
    told.save(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("calls", FULL.calls), ("versions", FULL.versions), ("turns", FULL.turns)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tries", type=int, default=REPEATS, help="of each route and look")
    parser.add_argument("--small", action="store_true", help="a small store, asked twice: does all of it run?")
    option(parser)
    options = parser.parse_args()
    size = SMALL if options.small else Size(options.calls, options.versions, options.turns)
    repeats = 2 if options.small else options.tries
    figures = measure(size, repeats)
    table(figures, size, repeats, options.page)
    if not options.small and (grown := [f.name for f in figures if f.grows]):
        raise SystemExit(f"grows with the store: {', '.join(grown)}")


if __name__ == "__main__":
    main()
