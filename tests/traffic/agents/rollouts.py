"""Runs the rollouts of an agent program, many at once, each named in a header. Imported by the programs beside it."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version

ROLLOUTS = 8
SYSTEM = "You are a helpful research assistant. Use your tools when they help, and answer briefly."
NOUNS = [
    "harbour",
    "glacier",
    "railway",
    "orchard",
    "library",
    "volcano",
    "theatre",
    "lighthouse",
    "monastery",
    "canal",
]
PLACES = ["Lisbon", "Bergen", "Oaxaca", "Kyoto", "Tartu", "Dakar", "Hobart", "Cusco", "Tbilisi", "Galway", "Windhoek"]
ASKS = ["When was the oldest {} near {} built?", "Who keeps the {} of {}, and how many visit it in {} a year?"]


@dataclass
class Rollout:
    """One run of an agent on one task."""

    name: str
    task: str
    url: str
    random: random.Random
    key = "same"

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Rollout-Id": self.name}

    def more(self) -> str:
        """Something else that a user may want to know."""
        return question(self.random)


def question(source: random.Random) -> str:
    return source.choice(ASKS).format(source.choice(NOUNS), source.choice(PLACES), 1400 + source.randrange(600))


def found(query: str) -> str:
    """What every tool finds: always the same for the same query, often not much."""
    source = random.Random(query)
    if source.random() < 0.3:
        return "nothing found"
    return f"{source.choice(NOUNS)} of {source.choice(PLACES)}: {source.randrange(10**6)}"


def main(scenarios: dict[str, Callable[[Rollout], Awaitable[object]]], *packages: str) -> None:
    """Run all scenarios at once. The last two rollouts of each have the task of the one before."""
    asyncio.run(_main(scenarios, sys.argv[1]))
    print(json.dumps({package: version(package) for package in packages}))


async def _main(scenarios: dict[str, Callable[[Rollout], Awaitable[object]]], url: str) -> None:
    rollouts = {name: [_rollout(name, i, url) for i in range(ROLLOUTS)] for name in scenarios}
    runs = [_run(scenarios[name], rollout) for name, several in rollouts.items() for rollout in several]
    await asyncio.gather(*runs)


def _rollout(scenario: str, i: int, url: str) -> Rollout:
    task = question(random.Random(f"{scenario} {min(i, ROLLOUTS - 3)}"))
    return Rollout(f"{scenario}-{i}", task, f"{url}/v1", random.Random(f"{scenario} {i}"))


async def _run(scenario: Callable[[Rollout], Awaitable[object]], rollout: Rollout) -> None:
    await asyncio.sleep(rollout.random.random() / 5)
    try:
        await scenario(rollout)
    except Exception as error:
        print(f"{rollout.name}: {type(error).__name__}: {str(error)[:150]!r}")
