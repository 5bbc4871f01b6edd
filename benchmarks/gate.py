"""What the gate before new versions makes of real ones: `make bench-gate`, `--help` for its options.

The task is the demo's: one-digit sums, SmolLM2-135M-Instruct, merged weights on two servers. For each seed, the demo's
first steps go live without a gate. Then come three versions, one after the other: a better one (more such steps), a
spoilt one (six steps on inverted rewards), and one that games its reward by length. Each is tested by new rollouts
until the gate decides, and each goes on from what is live then.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from results_page import Page, option

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.demo.config import EXAMPLE, GROUP_SIZE, TASKS_PER_STEP, DemoOptions, write_config
from lightning_proxy.commands.demo.demo import CONCURRENCY, PRELOADED
from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.commands.signals import run_until_signal
from lightning_proxy.commands.system.processes import ChildSpec, Supervisor, free_port
from lightning_proxy.proxy.errors import LightningError

Json = dict[str, Any]
CLI = (sys.executable, "-m", "lightning_proxy.cli")
LONGER = Path(__file__).with_name("longer.py")
TASKS_AT_ONCE = 8  # from one look at the decision to the next


@dataclass(frozen=True)
class Scenario:
    """A version to test. `trained`: the trainer's settings alone; `both`: the trainer's and the proxy's."""

    name: str
    expected: str
    steps: int
    trained: Mapping[str, str] = field(default_factory=dict)
    both: Mapping[str, str] = field(default_factory=dict)


FIRST_STEPS = 8  # before the gate is closed
UNWATCHED = {"LIGHTNING_TRAINER__COLLAPSE__ACTION": "off"}  # or another reward than before looks like a collapse
OPEN = {"LIGHTNING_POLICY__PROMOTION": "immediate"}
BY_LENGTH = {
    "LIGHTNING_TRAINER__REWARD_WEIGHTS": '{"longer": 1}',
    "LIGHTNING_REWARDS__FUNCTION": f"{LONGER}:longer",
    "LIGHTNING_POLICY__GATE__METRICS": '{"reward": 0.1, "answer_tokens": 0.2}',
}
SCENARIOS = (
    Scenario("better", "promoted", 4),
    Scenario("spoilt", "rejected", 6, UNWATCHED | {"LIGHTNING_TRAINER__REWARD_WEIGHTS": '{"reward": -1}'}),
    Scenario("games its reward", "rejected", 6, UNWATCHED, BY_LENGTH),
)


class Place:
    """Two vLLM servers and a store for one seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._seed = directory, seed
        directory.mkdir(parents=True)
        subprocess.run([sys.executable, EXAMPLE / "tasks.py", directory, f"--seed={seed}"], check=True)
        self._config = write_config(directory, prepare_model(cache_directory()), DemoOptions(seed=seed))
        settings = yaml.safe_load(self._config.read_text())
        self._ports = settings["vllm"]["port"], free_port()
        settings["upstreams"][0]["replicas"] = [f"http://127.0.0.1:{self._ports[1]}/v1"]
        settings["policy"]["promotion"] = "gated"
        self._config.write_text(yaml.safe_dump(settings, sort_keys=False))
        self._port = settings["proxy"]["port"]
        self._tasks = _without_end([*map(json.loads, (directory / "train.jsonl").read_text().splitlines())], seed)

    async def measure(self, names: Iterable[str]) -> AsyncIterator[Json]:
        """Yield what became of each version."""
        async with Supervisor(self._directory / "logs", _say) as servers:
            for port in self._ports:
                env = {"LIGHTNING_VLLM__PORT": str(port)}
                url = f"http://127.0.0.1:{port}/health"
                spec = ChildSpec(f"vllm-{port}", self._cli("vllm"), env, health_url=url, start_timeout_s=900)
                await servers.wait_healthy(await servers.start(spec))
            async with self._proxy(OPEN):
                await self._learn()
            for scenario in (one for one in SCENARIOS if one.name in names):
                async with self._proxy(scenario.both) as api:
                    yield await self._test(scenario, api)

    @asynccontextmanager
    async def _proxy(self, env: Mapping[str, str]) -> AsyncIterator[ApiClient]:
        url = f"http://127.0.0.1:{self._port}"
        async with Supervisor(self._directory / "logs", _say) as proxy, ApiClient(url, patience_s=60) as api:
            spec = ChildSpec("serve", self._cli("serve"), env, health_url=f"{url}/readyz")
            await proxy.wait_healthy(await proxy.start(spec))
            yield api

    async def _learn(self) -> None:
        """The demo's first steps, on rollouts of the live version alone."""
        training = asyncio.ensure_future(self._ended(["train", "--max-steps", str(FIRST_STEPS)], OPEN))
        working = asyncio.ensure_future(self._work(FIRST_STEPS * TASKS_PER_STEP, OPEN, "--ahead", "0"))
        try:
            await asyncio.gather(training, working)
        finally:
            for future in (working, training):
                future.cancel()
            await asyncio.gather(working, training, return_exceptions=True)

    async def _test(self, scenario: Scenario, api: ApiClient) -> Json:
        before = await _newest_test(api)
        last = (await api.policy())["steps"] + scenario.steps
        env = {**scenario.both, **scenario.trained, "LIGHTNING_TRAINER__PROMOTE_EVERY": str(last)}
        tasks = scenario.steps * TASKS_PER_STEP
        # Rollouts of earlier versions are on their way, too: they may fill a step, or have no reward for it.
        while (await api.policy())["steps"] < last:
            await self._work(tasks, scenario.both)
            await self._ended(["train", "--once", "--max-steps", str(last)], env)
            tasks = TASKS_PER_STEP
        began = time.monotonic()
        while (found := await _newest_test(api)).get("n") == before.get("n") or found["status"] == "testing":
            await self._work(TASKS_AT_ONCE, scenario.both)
        return {
            "seed": self._seed,
            "candidate": scenario.name,
            "expected": scenario.expected,
            "steps": scenario.steps,
            "test_s": round(time.monotonic() - began, 1),
            "live_version": (await api.policy())["live_version"],
            **found,
        }

    async def _work(self, tasks: int, env: Mapping[str, str], *more: str) -> None:
        """Let the agent work on so many tasks, in the seed's order."""
        file = self._directory / "work.jsonl"
        file.write_text("".join(json.dumps(task) + "\n" for task in itertools.islice(self._tasks, tasks)))
        agent = ["--preload", ",".join(PRELOADED), "--", sys.executable, str(EXAMPLE / "demo_agent.py")]
        options = ["--tasks", str(file), "--group-size", str(GROUP_SIZE), "--concurrency", str(CONCURRENCY)]
        await self._ended(["run", *options, *more, *agent], env)

    async def _ended(self, arguments: list[str], env: Mapping[str, str]) -> None:
        with (self._directory / "logs" / f"{arguments[0]}.log").open("ab") as log:
            argv = self._cli(*arguments)
            process = await asyncio.create_subprocess_exec(*argv, env=os.environ | env, stdout=log, stderr=log)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                process.terminate()
                await process.wait()
                raise
        if code:
            raise LightningError(f"{arguments[0]}: exit code {code}; its log is in {self._directory / 'logs'}")

    def _cli(self, *arguments: str) -> list[str]:
        return [*CLI, "--config", str(self._config), *arguments]


async def _newest_test(api: ApiClient) -> Json:
    """The newest test; without one, an empty one."""
    versions = (await api.request("GET", "/policy/versions"))["data"]
    tests = [version["promotion"] for version in versions if version["promotion"]]
    return max(tests, key=lambda test: int(test["n"]), default={})


def _without_end(tasks: list[Json], seed: int) -> Iterator[Json]:
    order = random.Random(seed)
    while True:
        yield from order.sample(tasks, len(tasks))


def _say(what: str) -> None:
    print(what, flush=True)


def table(results: Iterable[Json]) -> Iterator[str]:
    """A row for each test, with a difference for each metric."""
    yield "| seed | version | steps | decided | rollouts | groups | live | candidate | difference | e, drop | e, safe |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in results:
        evidence = row["evidence"]
        for name, one in evidence["metrics"].items():
            numbers = (f"{one[key]:.3g}" for key in ("live", "candidate", "difference", "e_drop", "e_safe"))
            what = f"{row['candidate']}: {name}" if len(evidence["metrics"]) > 1 else row["candidate"]
            cells = (row["seed"], what, row["steps"], row["status"], evidence["rollouts"], one["pairs"], *numbers)
            yield f"| {' | '.join(map(str, cells))} |"


async def measure(seeds: Iterable[int], names: Iterable[str], directory: Path) -> list[Json]:
    file = directory / "results.jsonl"
    results: list[Json] = []
    for seed in seeds:
        async for row in Place(directory / f"seed-{seed}", seed).measure(names):
            results.append(row)
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
            _say(f"seed {seed}, {row['candidate']}: {row['status']} in {row['test_s']} s: {row['reason']}")
    return results


def main() -> int:
    names = ",".join(scenario.name for scenario in SCENARIOS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--versions", default=names, help=f"of {names}")
    parser.add_argument("--dir", type=Path, default=Path("lightning-gate"), help="a new directory")
    option(parser, "gate")
    options = parser.parse_args()
    directory = options.dir.absolute()
    directory.mkdir(parents=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    try:
        results = run_until_signal(measure(seeds, options.versions.split(","), directory))
    except LightningError as error:
        print(f"gate: {error}", file=sys.stderr)
        return error.exit_code
    page = Page("Real versions before the gate")
    page.text(table(results))
    page.save(options.page)
    return 0 if all(row["status"] == row["expected"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
