"""One run of an example with one seed: every stage is a command of lightning-proxy, shown as it is run."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.commands.system.processes import ChildSpec, Supervisor, free_port
from lightning_proxy.proxy.errors import ConfigError, LightningError

Json = dict[str, Any]
HERE = Path(__file__).parent
CLI = (sys.executable, "-m", "lightning_proxy.cli")
CONCURRENCY = 32
TEACHER_CONCURRENCY = 8


@dataclass(frozen=True)
class Plan:
    """What is done with each seed.

    `python`: the interpreter of the agent's environment. `preload`: what `run --preload` imports once. `model`: None is
    SmolLM2-135M-Instruct. `imitate`: rollouts of the teacher that are recorded; 0: RL begins with the model as it is.
    `steps`: of RL, at most. `train`, `held_out`: how many tasks. `samples`: rollouts of a held-out task, each time.
    """

    example: Path
    python: Path
    preload: Sequence[str]
    model: str | None
    imitate: int
    steps: int
    train: int
    held_out: int
    samples: int


class Lesson:
    """One seed's run, in a directory of its own."""

    def __init__(self, plan: Plan, seed: int, directory: Path) -> None:
        self._plan, self._seed, self._directory = plan, seed, directory
        self._ports = {name: free_port() for name in ("proxy", "vllm", "teacher")}
        self._minutes: dict[str, float] = {}

    async def run(self) -> Json:
        """The result, as it goes into results.json."""
        self._prepare()
        async with Supervisor(self._logs, _say) as servers:
            with self._timed("start"):
                for name, command, path in (("vllm", "vllm", "/health"), ("proxy", "serve", "/readyz")):
                    url = f"http://127.0.0.1:{self._ports[name]}{path}"
                    server = ChildSpec(name, _shown(self._cli(command)), self._env, url, start_timeout_s=900)
                    await servers.wait_healthy(await servers.start(server))
            return await servers.guard(self._stages())

    async def _stages(self) -> Json:
        held_out = {"base": await self._evaluate("base")}
        if self._plan.imitate:
            await self._imitate()
            held_out["sft"] = await self._evaluate("sft")
        await self._reinforce()
        steps = _curve(await self._steps())
        if not steps:
            _say(f"\nRL took no step. The trainer said:\n{(self._logs / 'trainer.log').read_text().strip()}")
        held_out["rl"] = await self._evaluate("rl")
        return {
            "example": self._plan.example.name,
            "model": Path(self._model).name,
            "seed": self._seed,
            "imitate": self._plan.imitate,
            "steps_asked": self._plan.steps,
            "held_out": held_out,
            "steps": steps,
            "minutes": self._minutes,
        }

    async def _imitate(self) -> None:
        """Record the teacher's rollouts, and learn from the good ones."""
        serve = [sys.executable, str(HERE / "teach.py"), str(self._ports["teacher"]), str(self._tasks("taught"))]
        url = f"http://127.0.0.1:{self._ports['teacher']}/v1/models"
        with self._timed("sft"):
            async with Supervisor(self._logs) as teachers:
                teacher = ChildSpec("teacher", _shown(serve), self._env, url, start_timeout_s=60)
                await teachers.wait_healthy(await teachers.start(teacher))
                asked = ["--tasks", str(self._tasks("taught")), "--group-size", "1"]
                asked += ["--concurrency", str(TEACHER_CONCURRENCY)]
                await _run([*self._cli("run"), *asked, *self._agent], self._env | {"MODEL": "teacher"})
            # All agents learn to say what they should; which of them RL improves upon is trainer.agents.
            await _run([*self._cli("train"), "--method", "sft"], self._env | {"LIGHTNING_TRAINER__AGENTS": "null"})

    async def _reinforce(self) -> None:
        """The trainer takes its steps while the agent works on the training tasks, until either is done."""
        train = ChildSpec("trainer", _shown(self._cli("train")), self._env, may_end=True)
        work = [*self._cli("run"), "--tasks", str(self._tasks("train")), "--ahead", "0"]
        work += ["--group-size", str(self._trainer["group_size"]), "--concurrency", str(CONCURRENCY), *self._agent]
        with self._timed("rl"):
            async with Supervisor(self._logs) as trainers:
                trainer = await trainers.start(train)
                print(f"its steps: {_short(str(trainer.log))}", flush=True)
                trained = asyncio.ensure_future(trainer.process.wait())
                worked = asyncio.ensure_future(_run(work, self._env))
                try:
                    await asyncio.wait({trained, worked}, return_when=asyncio.FIRST_COMPLETED)
                    if trained.done() and trained.result() != 0:
                        raise trainer.death()
                    if trained.done():
                        _say("\nthe trainer has taken its last step: rollouts under way are stopped")
                    if worked.done():
                        worked.result()
                finally:
                    trained.cancel()
                    worked.cancel()
                    await asyncio.gather(trained, worked, return_exceptions=True)

    async def _evaluate(self, name: str) -> Json:
        """Mean reward of the held-out tasks with the live version, its 95 % interval, and each task's own."""
        out = self._directory / f"{name}.json"
        asked = ["--tasks", str(self._tasks("held_out")), "--samples", str(self._plan.samples), "--out", str(out)]
        with self._timed("evaluations"):
            await _run([*self._cli("eval"), *asked, "--concurrency", str(CONCURRENCY), *self._agent], self._env)
        row = json.loads(out.read_text())["rows"][0]
        kept = ("policy_versions", "tasks", "rollouts", "failed", "mean_reward", "interval")
        by_task = {task: found["mean_reward"] for task, found in row["by_task"].items()}
        return {key: row[key] for key in kept} | {"by_task": by_task}

    async def _steps(self) -> list[Json]:
        async with ApiClient(f"http://127.0.0.1:{self._ports['proxy']}") as api:
            page = await api.request("GET", "/policy/steps", params={"limit": "1000"})
        return sorted(page["data"], key=lambda step: step["step"])

    def _prepare(self) -> None:
        if self._directory.exists():
            if not self._config.is_file():
                raise ConfigError(f"{self._directory} is there and no earlier lesson's: choose another --dir")
            shutil.rmtree(self._directory)
        self._logs.mkdir(parents=True)
        self._config.write_text(yaml.safe_dump(self._settings(), sort_keys=False))
        self._write_tasks()

    def _write_tasks(self) -> None:
        sys.path.insert(0, str(self._plan.example))
        import tasks

        plan = self._plan
        train, held_out = tasks.split(self._seed, plan.train, plan.held_out)
        enough = islice(cycle(train), 2 * plan.steps * self._trainer["tasks_per_step"])
        for name, lines in (("train", enough), ("taught", train[: plan.imitate]), ("held_out", held_out)):
            self._tasks(name).write_text("".join(json.dumps(task) + "\n" for task in lines))

    def _settings(self) -> Json:
        """The example's config.yaml, and what belongs to this run: model, ports, files, how many steps."""
        url = "http://127.0.0.1:{}/v1".format
        teacher = {"name": "teacher", "kind": "openai", "base_url": url(self._ports["teacher"]), "api_key": "none"}
        settings: Json = {
            "proxy": {"port": self._ports["proxy"]},
            "store": {"url": f"sqlite:///{self._directory / 'lightning.db'}"},
            "upstreams": [
                {"name": "policy", "base_url": url(self._ports["vllm"])},
                teacher | {"models": ["teacher"]},
            ],
            "policy": {"model": self._model, "directory": str(self._directory / "policy")},
            "vllm": {"port": self._ports["vllm"]},
            # Imitation is a step of its own.
            "trainer": {"seed": self._seed, "max_steps": self._plan.steps + (self._plan.imitate > 0)},
        }
        files = [self._plan.example / "config.yaml"] + [HERE / "published.yaml"] * (self._plan.model is not None)
        for file in files:
            for section, values in yaml.safe_load(file.read_text()).items():
                settings.setdefault(section, {}).update(values)
        return settings

    @cached_property
    def _model(self) -> str:
        """SmolLM2-135M-Instruct with a chat template that knows tools, unless another one was named."""
        if self._plan.model is not None:
            return self._plan.model
        directory = self._directory / "SmolLM2-135M-Instruct"
        shutil.copytree(prepare_model(cache_directory()), directory)
        shutil.copy(HERE / "tools.jinja", directory / "chat_template.jinja")
        return str(directory)

    @cached_property
    def _trainer(self) -> Json:
        return yaml.safe_load(self._config.read_text())["trainer"]

    @cached_property
    def _env(self) -> dict[str, str]:
        longer = {"MAX_TOKENS": "1024"} if self._plan.model is not None else {}
        return {"PYTHONPATH": str(self._plan.example), "MODEL": "policy", **longer}

    @cached_property
    def _agent(self) -> list[str]:
        """How `run` and `eval` start it: from one process that has its framework imported already."""
        return ["--preload", ",".join(self._plan.preload), "--", str(self._plan.python), str(HERE / "play.py")]

    @property
    def _config(self) -> Path:
        return self._directory / "config.yaml"

    @property
    def _logs(self) -> Path:
        return self._directory / "logs"

    def _tasks(self, name: str) -> Path:
        return self._directory / f"{name}.jsonl"

    def _cli(self, command: str) -> list[str]:
        return [*CLI, "--config", str(self._config), command]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._minutes[name] = round(self._minutes.get(name, 0.0) + (time.monotonic() - started) / 60, 2)


async def _run(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """A command, to its end, which is told to end where this is cancelled; LightningError if it fails."""
    process = await asyncio.create_subprocess_exec(*_shown(argv), env={**os.environ, **env})
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if code != 0:
        raise LightningError(f"that failed, with exit code {code}")


def _shown(argv: Sequence[str]) -> Sequence[str]:
    """Show a command as somebody would type it."""
    words = ["lightning-proxy", *argv[3:]] if tuple(argv[:3]) == CLI else argv
    print(f"\n$ {shlex.join(_short(word) for word in words)}", flush=True)
    return argv


def _short(word: str) -> str:
    """A path as it is seen from here."""
    path = Path(word)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else word


def _say(what: str) -> None:
    print(what, flush=True)


def _curve(steps: Sequence[Json]) -> list[Json]:
    """The steps of RL, with the rewards of the rollouts that they looked at."""
    trained = [step["metrics"] for step in steps if step["metrics"].get("method") != "sft"]
    kept = ("reward_mean", "rollouts", "groups_equal", "entropy", "staleness_mean", "step_s")
    return [{"step": i, **{key: metrics.get(key) for key in kept}} for i, metrics in enumerate(trained, 1)]
