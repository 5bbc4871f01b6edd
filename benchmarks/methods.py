"""What each training method makes of the same number of rollouts: `make bench-methods`, `--help` for its options.

The task is the demo's: one-digit sums, SmolLM2-135M-Instruct. Each seed splits the sums anew. Methods that learn from
recordings share the rollouts that the base model made for the seed; live ones make as many of their own. Every result
is measured by `eval` on the 20 held-out sums, 8 answers each at temperature 1, and is one line of results.jsonl.
What is there is not measured again, so the same command goes on after a stop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from results_page import Page, option

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.demo.config import EXAMPLE, GROUP_SIZE, TASKS_PER_STEP, DemoOptions, write_config
from lightning_proxy.commands.demo.demo import PRELOADED
from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.commands.signals import run_until_signal
from lightning_proxy.commands.system.processes import ChildSpec, Supervisor
from lightning_proxy.proxy.errors import LightningError

Json = dict[str, Any]
CLI = (sys.executable, "-m", "lightning_proxy.cli")
STEP_ROLLOUTS = GROUP_SIZE * TASKS_PER_STEP
CONCURRENCY = 64
SAMPLES = 8
RECORDED = "recorded"
ALL_THERE = "recorded"  # a file beside the store


@dataclass(frozen=True)
class Method:
    """`tune`: what `train --method` runs over recordings. `live`: RL makes the rollouts itself.

    `taught`: with the teacher at `--teacher`. `env` overrides the configuration for the trainer alone.
    """

    tune: str | None = None
    live: bool = False
    taught: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def directory(self, name: str) -> str:
        """Methods that only learn from recordings share them."""
        return name if self.live else RECORDED


# The rate is RL's. A good answer is a bare number, right or wrong: worth 0.2 or more, which few are at first.
SAME = {"learning_rate": "2e-4", "batch_tokens": "1024"}


def _tuned(method: str, **settings: str) -> dict[str, str]:
    return {f"LIGHTNING_TRAINER__{method.upper()}__{name.upper()}": value for name, value in (SAME | settings).items()}


METHODS = {
    "base": Method(),
    "sft": Method("sft", env=_tuned("sft", min_reward="0.2")),
    "sft-small-batches": Method("sft", env=_tuned("sft", min_reward="0.2", batch_tokens="128")),
    "dpo": Method("dpo", env=_tuned("dpo", margin="0.15")),
    "kto": Method("kto", env=_tuned("kto", epochs="1", threshold="0.15", up_weight="20")),
    "rl": Method(live=True),
    "teacher": Method(live=True, taught=True, env={"LIGHTNING_TRAINER__REWARD_WEIGHTS": '{"reward": 0}'}),
    "full": Method(live=True, env={"LIGHTNING_TRAINER__WEIGHTS": "full", "LIGHTNING_TRAINER__LEARNING_RATE": "2e-5"}),
}


@dataclass(frozen=True)
class Work:
    """A method and a seed."""

    name: str
    seed: int

    @property
    def method(self) -> Method:
        return METHODS[self.name]


class Place:
    """A directory with a configuration, a store and a policy of its own, served while methods are measured there."""

    def __init__(self, directory: Path, seed: int, rollouts: int, teacher: str | None) -> None:
        self._directory, self._seed, self._rollouts, self._teacher = directory, seed, rollouts, teacher
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, EXAMPLE / "tasks.py", directory, f"--seed={seed}"], check=True)
        model = prepare_model(cache_directory())
        self._config = write_config(directory, model, DemoOptions(seed=seed))
        settings = yaml.safe_load(self._config.read_text())
        self._url = f"http://127.0.0.1:{settings['proxy']['port']}"
        self._ports = {"vllm": (settings["vllm"]["port"], "/health"), "serve": (settings["proxy"]["port"], "/readyz")}

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Supervisor]:
        async with Supervisor(self._directory / "logs", _say) as servers:
            for command, (port, path) in self._ports.items():
                url = f"http://127.0.0.1:{port}{path}"
                server = ChildSpec(command, self._cli(command), health_url=url, start_timeout_s=900)
                await servers.wait_healthy(await servers.start(server))
            yield servers

    async def measure(self, work: Work) -> Json:
        """Go back to the base model, let the method learn, and evaluate; a line of results.jsonl."""
        method = work.method
        if not method.live:
            await self._record()
        async with ApiClient(self._url) as api:
            if (await api.policy())["live_version"] != 0:
                await self._command("policy", "promote", "0")
            before = len(await self._steps(api))
            used: list[Json] = []
            if method.tune is not None:
                used.append(await self._tune(method))
            if method.live:
                used.append(await self._reinforce(method))
            steps = (await self._steps(api))[before:]
        return {
            "method": work.name,
            "seed": work.seed,
            "rollouts": self._rollouts if used else 0,
            "held_out": await self._evaluate(work.name),
            "cpu_s": round(sum(one["cpu_s"] for one in used), 1),
            "peak_mib": max((one["peak_mib"] for one in used), default=0),
            "env": dict(method.env),
            "steps": [{"step": step["step"], "version": step["version"], **step["metrics"]} for step in steps],
        }

    async def _record(self) -> None:
        """Rollouts of the base model, once."""
        if not (self._directory / ALL_THERE).exists():
            await self._work()
            (self._directory / ALL_THERE).touch()

    async def _tune(self, method: Method) -> Json:
        assert method.tune is not None
        # What a run that was killed had done would not be in the processor time of this one.
        shutil.rmtree(self._directory / "policy" / method.tune, ignore_errors=True)
        return await self._trained(["--method", method.tune], method)

    async def _reinforce(self, method: Method) -> Json:
        """The trainer takes its steps while the agent works."""
        steps = self._rollouts // STEP_ROLLOUTS
        training = asyncio.ensure_future(self._trained(["--max-steps", str(steps)], method))
        working = asyncio.ensure_future(self._work("--ahead", "0"))
        try:
            done, _ = await asyncio.wait({training, working}, return_when=asyncio.FIRST_EXCEPTION)
            for future in done:
                future.result()
            return training.result()
        finally:
            for future in (working, training):
                future.cancel()
            await asyncio.gather(working, training, return_exceptions=True)

    async def _work(self, *options: str) -> None:
        """Let the agent work on training tasks, in the seed's order."""
        file = self._directory / "work.jsonl"
        tasks = [json.loads(line) for line in (self._directory / "train.jsonl").read_text().splitlines()]
        chosen = islice(_without_end(tasks, self._seed), self._rollouts // GROUP_SIZE)
        file.write_text("".join(json.dumps(task) + "\n" for task in chosen))
        await self._command("run", "--tasks", str(file), "--group-size", str(GROUP_SIZE), *options, *self._agent())

    async def _evaluate(self, name: str) -> Json:
        out = self._directory / f"{name}.json"
        tasks = str(self._directory / "held_out.jsonl")
        await self._command("eval", "--tasks", tasks, "--samples", str(SAMPLES), "--out", str(out), *self._agent())
        row = json.loads(out.read_text())["rows"][0]
        kept = ("policy_versions", "rollouts", "failed", "mean_reward")
        return {"right": row["pass_at_k"]["1"]["value"], **{key: row[key] for key in kept}}

    def _agent(self) -> list[str]:
        return [
            "--concurrency", str(CONCURRENCY), "--preload", ",".join(PRELOADED),
            "--", sys.executable, str(EXAMPLE / "demo_agent.py"),
        ]  # fmt: skip

    async def _command(self, *arguments: str) -> None:
        await _ended(self._cli(*arguments), {}, sys.stdout.fileno())

    async def _trained(self, options: Sequence[str], method: Method) -> Json:
        """Run `train`; its processor seconds and its largest memory."""
        taught = {"LIGHTNING_TRAINER__TEACHER__BASE_URL": str(self._teacher)} if method.taught else {}
        with (self._directory / "logs" / "train.log").open("ab") as log:
            usage = await _ended(self._cli("train", *options), {**method.env, **taught}, log.fileno())
        return {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss // 1024}

    async def _steps(self, api: ApiClient) -> list[Json]:
        page = await api.request("GET", "/policy/steps", params={"limit": "1000"})
        return sorted(page["data"], key=lambda step: step["step"])

    def _cli(self, *arguments: str) -> list[str]:
        return [*CLI, "--config", str(self._config), *arguments]


def _without_end(tasks: Sequence[Json], seed: int) -> Iterator[Json]:
    order = random.Random(seed)
    while True:
        yield from order.sample(tasks, len(tasks))


async def _ended(argv: Sequence[str], env: Mapping[str, str], output: int) -> resource.struct_rusage:
    """Run a command to its end; what it used. LightningError if it fails."""
    _say("$ lightning-proxy " + " ".join(argv[len(CLI) + 2 :]))
    process = subprocess.Popen(argv, env=os.environ | env, stdout=output, stderr=output)  # noqa: ASYNC220 - wait4
    waiting = asyncio.ensure_future(asyncio.to_thread(os.wait4, process.pid, 0))
    try:
        _, status, usage = await asyncio.shield(waiting)
    except asyncio.CancelledError:
        process.terminate()
        await waiting
        raise
    finally:
        process.returncode = -1  # it was waited for
    if code := os.waitstatus_to_exitcode(status):
        raise LightningError(f"{' '.join(argv[len(CLI) + 2 :])}: exit code {code}")
    return usage


def _say(what: str) -> None:
    print(what, flush=True)


def read(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(results: Iterable[Json]) -> Iterator[str]:
    """A row for each method: the mean over seeds, and the lowest and highest of them."""
    yield "| method | seeds | rollouts | held out: right | mean reward | CPU minutes of training | peak memory |"
    yield "|---|---|---|---|---|---|---|"
    found = list(results)
    for name in METHODS:
        rows = [row for row in found if row["method"] == name]
        if rows:
            right = _spread([100 * row["held_out"]["right"] for row in rows], "{:.0f}", " %")
            reward = _spread([row["held_out"]["mean_reward"] for row in rows], "{:.2f}")
            minutes = _spread([row["cpu_s"] / 60 for row in rows], "{:.1f}")
            seeds = ", ".join(str(row["seed"]) for row in sorted(rows, key=lambda row: row["seed"]))
            peak = max(row["peak_mib"] for row in rows) / 1024
            yield f"| {name} | {seeds} | {rows[0]['rollouts']:,} | {right} | {reward} | {minutes} | {peak:.1f} GiB |"


def _spread(values: Sequence[float], how: str, unit: str = "") -> str:
    mean, low, high = (how.format(value) for value in (fmean(values), min(values), max(values)))
    return f"{mean}{unit} [{low} to {high}]"


async def measure(works: Sequence[Work], directory: Path, rollouts: int, teacher: str | None) -> None:
    """Measure what is not in results.jsonl yet."""
    file = directory / "results.jsonl"
    done = {(row["method"], row["seed"]) for row in read(file)}
    left = [work for work in works if (work.name, work.seed) not in done]
    for (seed, where), there in groupby(left, key=lambda work: (work.seed, work.method.directory(work.name))):
        path = directory / f"seed-{seed}" / where
        if not (path / ALL_THERE).exists():
            shutil.rmtree(path, ignore_errors=True)  # what was stopped begins anew
        place = Place(path, seed, rollouts, teacher)
        async with place.served() as servers:
            for work in there:
                row = await servers.guard(place.measure(work))
                with file.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                _say("\n".join(table(read(file))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="base,sft,dpo,rl,kto", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rollouts", type=int, default=512, help=f"a multiple of {STEP_ROLLOUTS}")
    parser.add_argument("--dir", type=Path, default=Path("lightning-methods"), help="of the measurement, and to go on")
    parser.add_argument("--teacher", metavar="URL", help="of a vLLM with a better model, for the method teacher")
    option(parser, "methods")
    options = parser.parse_args()
    names = options.methods.split(",")
    if unknown := set(names) - set(METHODS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if options.teacher is None and any(METHODS[name].taught for name in names):
        parser.error("--teacher says where the teacher is")
    if options.rollouts <= 0 or options.rollouts % STEP_ROLLOUTS:
        parser.error(f"--rollouts is a multiple of {STEP_ROLLOUTS}")
    works = [Work(name, int(seed)) for seed in options.seeds.split(",") for name in METHODS if name in names]
    directory = options.dir.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        run_until_signal(measure(works, directory, options.rollouts, options.teacher))
    except LightningError as error:
        print(f"methods: {error}", file=sys.stderr)
        return error.exit_code
    page = Page("Methods at equal numbers of rollouts")
    page.text([f"{options.rollouts:,} rollouts:", "", *table(read(directory / "results.jsonl"))])
    page.save(options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
