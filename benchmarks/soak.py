"""Does the proxy hold for long? A moderate load of all kinds for half an hour: `make soak`, or `soak.py --help`.

Agents with named rollouts and with none, streams, JSON, clients that leave in the middle of an answer, rewards.
Prints what the proxy takes every now and then, and the slope of its memory. Exits with 1 if an answer that a client
received whole is not in the store, a call was answered wrongly, or files stay open.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from servers import Server
from targets import start_proxy, start_upstream
from upstream import CHUNKS, IDS

FILES = 8  # open more than at first: nothing to worry about
PROMPT = "You are careful. " * 750  # 12 KB, the same for all agents, as a system prompt is
WORDS = ["add", "subtract", "multiply", "divide", "the", "numbers", "of", "rows", "columns", "in", "this", "table"]


@dataclass
class Seen:
    """What the clients saw: `whole`, the ids of the calls that were answered to the last byte."""

    counts: Counter[str] = field(default_factory=Counter)
    whole: list[str] = field(default_factory=list)
    rewards: int = 0
    wrong: list[str] = field(default_factory=list)


class Pace:
    """Gives each call its moment, so that there are `rate` calls a second however many agents there are."""

    def __init__(self, rate: float) -> None:
        self._gap, self._next = 1 / rate, time.monotonic()

    async def __call__(self) -> None:
        self._next = max(self._next + self._gap, time.monotonic() - 1)
        await asyncio.sleep(self._next - time.monotonic())


class Agents:
    """Agents that run one rollout after the other, each of a random kind."""

    def __init__(self, url: str, session: aiohttp.ClientSession, rate: float) -> None:
        self._url, self._session, self._pace = url, session, Pace(rate)
        self._random, self._numbers = random.Random(0), count()
        self.seen = Seen()

    async def run(self, until: float) -> None:
        kinds = {self._rollout: 4, self._conversation: 4, self._leave: 1}
        while time.monotonic() < until:
            kind = self._random.choices(list(kinds), list(kinds.values()))[0]
            try:
                await kind()
            except (aiohttp.ClientError, OSError) as error:
                self.seen.wrong.append(repr(error))

    async def _rollout(self) -> None:
        """Several turns of a rollout named by header, of a task with siblings; then its reward."""
        number = next(self._numbers)
        names = {"X-Rollout-Id": f"soak-{number}", "X-Task-Id": f"task-{number // 8}"}
        await self._turns("named", names)
        await self._reward(names["X-Rollout-Id"])

    async def _conversation(self) -> None:
        """The same without a name; the reward goes to the rollout that the answers tell."""
        if rollout_id := await self._turns("unnamed", {}):
            await self._reward(rollout_id)

    async def _turns(self, kind: str, headers: dict[str, str]) -> str | None:
        messages = [{"role": "system", "content": PROMPT}]
        rollout_ids = set()
        for _ in range(self._random.randint(1, 6)):
            messages.append({"role": "user", "content": self._question()})
            stream = self._random.random() < 0.5
            answer, rollout_id = await self._call(kind, messages, headers, stream)
            messages.append({"role": "assistant", "content": answer})
            rollout_ids.add(rollout_id)
        if len(rollout_ids) > 1:
            self.seen.wrong.append(f"one conversation, {len(rollout_ids)} rollouts")
        return next(iter(rollout_ids))

    async def _call(
        self, kind: str, messages: list[Any], headers: dict[str, str], stream: bool
    ) -> tuple[str, str | None]:
        await self._pace()
        body = {"model": "base", "messages": messages, "stream": stream}
        async with self._session.post(self._url + "/v1/chat/completions", json=body, headers=headers) as response:
            data = await response.read()
        if response.status != 200 or not data.endswith(b"data: [DONE]\n\n" if stream else b"}"):
            self.seen.wrong.append(f"{response.status} {data[-200:]!r}")
            return "", None
        self.seen.counts[f"{kind}, {'stream' if stream else 'JSON'}"] += 1
        self.seen.whole.append(response.headers["X-Call-Id"])
        return "tok" * (CHUNKS if stream else IDS), response.headers["X-Rollout-Id"]

    async def _leave(self) -> None:
        """Leave an answer in its middle."""
        await self._pace()
        body = {"model": "base", "messages": [{"role": "user", "content": self._question()}]}
        body |= {"slow": True, "stream": True}
        async with self._session.post(self._url + "/v1/chat/completions", json=body) as response:
            await response.content.readany()
            response.close()
        self.seen.counts["left"] += 1

    async def _reward(self, rollout_id: str) -> None:
        body = {"rollout_id": rollout_id, "reward": self._random.random()}
        async with self._session.post(self._url + "/reward", json=body) as response:
            text = await response.text()
        if response.status == 200:
            self.seen.rewards += 1
        else:
            self.seen.wrong.append(f"reward: {response.status} {text}")

    def _question(self) -> str:
        return " ".join(self._random.choices(WORDS, k=60))


@dataclass(frozen=True)
class Sample:
    at_s: float
    answers: int
    rss_mib: float
    files: int
    wal_mib: float
    store_mib: float
    cpu: float  # cores

    def line(self) -> str:
        return (
            f"{self.at_s:7.0f} {self.answers:9,} {self.rss_mib:8.1f} {self.files:6} "
            f"{self.wal_mib:8.1f} {self.store_mib:10.1f} {self.cpu:6.2f}"
        )


HEADER = "      s   answers  RSS MiB  files  WAL MiB  store MiB  cores"


async def watch(proxy: Server, store: Path, seen: Seen, until: float, every_s: float) -> list[Sample]:
    """A sample every now and then, and once when all is still."""
    began, samples = time.monotonic(), []
    print(HEADER, flush=True)
    before, cpu = began, proxy.cpu_s()
    while time.monotonic() < until:
        await asyncio.sleep(every_s)
        now, cpu_now = time.monotonic(), proxy.cpu_s()
        sample = Sample(
            now - began, len(seen.whole), proxy.rss_mib(), proxy.open_files(), _mib(store.with_name("store.db-wal")),
            _mib(store), (cpu_now - cpu) / (now - before),
        )  # fmt: skip
        before, cpu = now, cpu_now
        samples.append(sample)
        if len(samples) % max(1, round(60 / every_s)) == 0 or len(samples) == 1:
            print(sample.line(), flush=True)
    return samples


def _mib(path: Path) -> float:
    return path.stat().st_size / 2**20 if path.exists() else 0.0


def slope_mib_per_hour(samples: list[Sample]) -> float:
    """Least squares over the last two thirds."""
    late = samples[len(samples) // 3 :]
    times, values = [s.at_s / 3600 for s in late], [s.rss_mib for s in late]
    mean_t, mean_v = sum(times) / len(late), sum(values) / len(late)
    spread = sum((t - mean_t) ** 2 for t in times)
    return sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0


def missing(store: Path, seen: Seen) -> tuple[int, int]:
    """How many of the whole answers, and of the rewards, are not in the store."""
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
        stored = {row[0] for row in db.execute("SELECT call_id FROM calls WHERE status = 'ok'")}
        (rewards,) = db.execute("SELECT count(*) FROM rewards").fetchone()
    return len(set(seen.whole) - stored), seen.rewards - rewards


async def soak(proxy: Server, store: Path, options: argparse.Namespace) -> tuple[list[Sample], Seen, int]:
    """Load and watch; the samples, what the clients saw, and the files still open afterwards over those at first."""
    files = proxy.open_files()
    until = time.monotonic() + 60 * options.minutes
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        agents = Agents(proxy.url, session, options.rate)
        watching = asyncio.create_task(watch(proxy, store, agents.seen, until, options.every))
        await asyncio.gather(*(agents.run(until) for _ in range(options.agents)))
        samples = await watching
    return samples, agents.seen, await still_open(proxy, files)


async def still_open(proxy: Server, at_first: int, patience_s: float = 30.0) -> int:
    """How many files more than at first, once the connections to the upstream, idle now, had time to be closed."""
    for _ in range(int(patience_s)):
        if proxy.open_files() - at_first <= FILES:
            break
        await asyncio.sleep(1)
    return proxy.open_files() - at_first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=200.0, help="calls a second")
    parser.add_argument("--agents", type=int, default=64, help="at work at once")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two samples")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped as well
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "proxy" / "store.db"
        model = start_upstream()
        try:
            proxy = start_proxy(Path(directory) / "proxy", model.url)
            try:
                samples, seen, files = asyncio.run(soak(proxy, store, options))
            finally:
                proxy.stop()
            lost, lost_rewards = missing(store, seen)
        finally:
            model.stop()
    calls = ", ".join(f"{n:,} {kind}" for kind, n in sorted(seen.counts.items()))
    print(f"calls: {calls}; {seen.rewards:,} rewards")
    print(f"memory over the last two thirds: {slope_mib_per_hour(samples):+.1f} MiB an hour")
    print(f"lost: {lost} answers, {lost_rewards} rewards; {files:+} open files; {len(seen.wrong)} wrong answers")
    for text in seen.wrong[:5]:
        print(f"  {text}")
    if lost or lost_rewards or seen.wrong or files > FILES:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
