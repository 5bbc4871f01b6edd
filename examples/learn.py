"""Let an example's agent learn, and measure it: `python examples/learn.py calculator --seeds 0,1,2`.

Every step is a command of lightning-proxy, shown as it is run: the model is served, the agent's rollouts with a teacher
are recorded, imitated (`train --method sft`), and improved upon by LightningRL (`train`), while the agent works. The
held-out tasks are evaluated before, between and after. With --model, a published model begins with RL.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from learned import save, show

from lightning_proxy.commands.demo_model import cache_directory, prepare_model
from lightning_proxy.commands.processes import free_port

Json = dict[str, Any]
HERE = Path(__file__).parent
ROOT = HERE.parent
CLI = (sys.executable, "-m", "lightning_proxy.cli")
CONCURRENCY = 32
TEACHER_CONCURRENCY = 8
START_S = 900


@dataclass(frozen=True)
class Plan:
    """What is done with each seed. `imitate`: rollouts of the teacher that are recorded; 0: RL begins with the model.

    `steps`: of RL, at most. `samples`: rollouts of each held-out task in an evaluation.
    """

    example: Path
    preload: list[str]
    model: str | None
    imitate: int
    steps: int
    train: int
    held_out: int
    samples: int


@dataclass
class Lesson:
    """One seed's run, in a directory of its own."""

    plan: Plan
    seed: int
    directory: Path
    ports: Json = field(default_factory=lambda: {name: free_port() for name in ("proxy", "vllm", "teacher")})
    minutes: dict[str, float] = field(default_factory=dict)

    def run(self) -> Json:
        """The lesson's result, as it goes into results.json."""
        self._prepare()
        found: Json = {"example": self.plan.example.name, "seed": self.seed, "model": Path(self.model).name}
        with self._serving():
            rewards = {"base": self._evaluate("base")}
            if self.plan.imitate:
                self._imitate()
                rewards["sft"] = self._evaluate("sft")
            self._reinforce()
            rewards["rl"] = self._evaluate("rl")
            steps = self._get("/policy/steps?limit=1000")["data"]
        return found | {"held_out": rewards, "steps": _curve(steps), "minutes": self.minutes}

    @cached_property
    def model(self) -> str:
        """SmolLM2-135M-Instruct with a chat template that knows tools, unless another one was named."""
        if self.plan.model is not None:
            return self.plan.model
        directory = self.directory / "SmolLM2-135M-Instruct"
        shutil.copytree(prepare_model(cache_directory()), directory)
        shutil.copy(HERE / "tools.jinja", directory / "chat_template.jinja")
        return str(directory)

    @property
    def config(self) -> Path:
        return self.directory / "config.yaml"

    def _prepare(self) -> None:
        if self.directory.exists():
            if not self.config.is_file():
                raise SystemExit(f"{self.directory} is there and no earlier lesson's: choose another --dir")
            shutil.rmtree(self.directory)
        (self.directory / "logs").mkdir(parents=True)
        self.config.write_text(yaml.safe_dump(self._settings(), sort_keys=False))
        self._write_tasks()

    def _write_tasks(self) -> None:
        sys.path.insert(0, str(self.plan.example))
        import tasks

        train, held_out = tasks.split(self.seed, self.plan.train, self.plan.held_out)
        enough = islice(cycle(train), 2 * self.plan.steps * self._trainer["tasks_per_step"])
        for name, lines in (("train", enough), ("taught", train[: self.plan.imitate]), ("held_out", held_out)):
            self._tasks(name).write_text("".join(json.dumps(task) + "\n" for task in lines))

    def _settings(self) -> Json:
        """The example's config.yaml, and what belongs to this run: model, ports, files."""
        url = "http://127.0.0.1:{}/v1".format
        teacher = {"name": "teacher", "kind": "openai", "base_url": url(self.ports["teacher"]), "api_key": "none"}
        settings: Json = {
            "proxy": {"port": self.ports["proxy"]},
            "store": {"url": f"sqlite:///{self.directory / 'lightning.db'}"},
            "upstreams": [
                {"name": "policy", "base_url": url(self.ports["vllm"])},
                teacher | {"models": ["teacher"]},
            ],
            "policy": {"model": self.model, "directory": str(self.directory / "policy")},
            "vllm": {"port": self.ports["vllm"]},
            "trainer": {"seed": self.seed},
        }
        files = [self.plan.example / "config.yaml"] + [HERE / "published.yaml"] * (self.plan.model is not None)
        for file in files:
            for section, values in yaml.safe_load(file.read_text()).items():
                settings.setdefault(section, {}).update(values)
        return settings

    @contextmanager
    def _serving(self) -> Iterator[None]:
        vllm, proxy = (f"http://127.0.0.1:{self.ports[name]}" for name in ("vllm", "proxy"))
        with ExitStack() as servers:
            with self._timed("start"):
                servers.enter_context(self._server("vllm", self._cli("vllm"), f"{vllm}/health"))
                servers.enter_context(self._server("proxy", self._cli("serve"), f"{proxy}/readyz"))
            yield

    def _imitate(self) -> None:
        """Record the teacher's rollouts and learn from the good ones."""
        serve = [sys.executable, str(HERE / "teach.py"), str(self.ports["teacher"]), str(self._tasks("taught"))]
        with self._timed("sft"):
            with self._server("teacher", serve, f"http://127.0.0.1:{self.ports['teacher']}/v1/models"):
                said = ["--tasks", str(self._tasks("taught")), "--concurrency", str(TEACHER_CONCURRENCY)]
                _run([*self._cli("run"), *said, *self._agent], {**self._env, "MODEL": "teacher"})
            # All agents learn to say what they should; which of them RL improves upon is trainer.agents.
            everyone = {"LIGHTNING_TRAINER__AGENTS": "null"}
            _run([*self._cli("train"), "--method", "sft"], {**self._env, **everyone}, self._log("sft"))

    def _reinforce(self) -> None:
        """The trainer takes its steps while the agent works on the training tasks; until either is done."""
        with self._timed("rl"):
            before = len(self._get("/policy/steps?limit=1000")["data"])
            trained = [*self._cli("train"), "--max-steps", str(before + self.plan.steps)]
            worked = [*self._cli("run"), "--tasks", str(self._tasks("train")), "--ahead", "0"]
            worked += ["--group-size", str(self._trainer["group_size"]), "--concurrency", str(CONCURRENCY)]
            with (
                _started(trained, self._env, self._log("trainer")) as trainer,
                _started([*worked, *self._agent], self._env) as agents,
            ):
                while trainer.poll() is None and agents.poll() is None:
                    time.sleep(0.5)
            if trainer.returncode != 0:
                raise SystemExit(f"the trainer failed: see {self._log('trainer')}")

    def _evaluate(self, name: str) -> Json:
        """Mean reward of the held-out tasks with the live version, and its 95 % interval."""
        out = self.directory / f"{name}.json"
        asked = ["--tasks", str(self._tasks("held_out")), "--samples", str(self.plan.samples), "--out", str(out)]
        with self._timed("evaluations"):
            _run([*self._cli("eval"), *asked, "--concurrency", str(CONCURRENCY), *self._agent], self._env)
        row = json.loads(out.read_text())["rows"][0]
        return {key: row[key] for key in ("policy_versions", "tasks", "rollouts", "failed", "mean_reward", "interval")}

    @cached_property
    def _trainer(self) -> Json:
        return yaml.safe_load(self.config.read_text())["trainer"]

    @cached_property
    def _env(self) -> dict[str, str]:
        longer = {"MAX_TOKENS": "1024"} if self.plan.model is not None else {}
        return {**os.environ, "PYTHONPATH": str(self.plan.example), **longer}

    @cached_property
    def _agent(self) -> list[str]:
        """How `run` and `eval` start it: from one process that has its framework imported already."""
        modules = ",".join(self.plan.preload)
        return ["--preload", modules, "--", str(agent_python(self.plan.example)), str(HERE / "play.py")]

    def _tasks(self, name: str) -> Path:
        return self.directory / f"{name}.jsonl"

    def _log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def _cli(self, command: str) -> list[str]:
        return [*CLI, "--config", str(self.config), command]

    def _get(self, path: str) -> Json:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['proxy']}{path}", timeout=60) as answer:
            return json.load(answer)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.minutes[name] = round(self.minutes.get(name, 0.0) + (time.monotonic() - started) / 60, 2)

    @contextmanager
    def _server(self, name: str, argv: Sequence[str], url: str) -> Iterator[None]:
        """Run a server until it answers at `url`, and to the end of the block."""
        with _started(argv, self._env, self._log(name)) as process:
            deadline = time.monotonic() + START_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not start: see {self._log(name)}")
                time.sleep(0.5)
            yield


def agent_python(example: Path) -> Path:
    """The interpreter of the agent's own environment, with what agent.py says in its first lines that it needs."""
    python = ROOT / ".venv-agents" / example.name / "bin" / "python"
    uv = shutil.which("uv") or str(Path(sys.prefix) / ".uv/bin/uv")
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, python.parents[1]], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "-r", example / "agent.py"], check=True)
    return python


def _run(argv: Sequence[str], env: dict[str, str], log: Path | None = None) -> None:
    with _started(argv, env, log) as process:
        if process.wait() != 0:
            raise SystemExit(f"that failed{f': see {log}' if log else ''}")


@contextmanager
def _started(argv: Sequence[str], env: dict[str, str], log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A program, told to end at the end of the block."""
    shown = ["lightning-proxy", *argv[3:]] if tuple(argv[:3]) == CLI else argv
    print(f"\n$ {shlex.join(_short(word) for word in shown)}", flush=True)
    output = log.open("ab") if log else None
    process = subprocess.Popen(argv, env=env, stdout=output, stderr=output and subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
        if output is not None:
            output.close()


def _short(word: str) -> str:
    """A path as it is seen from here."""
    path = Path(word)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else word


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _curve(steps: Sequence[Json]) -> list[Json]:
    """The steps of RL in order, with the rewards of the rollouts that they looked at."""
    trained = [step for step in steps if step["metrics"].get("method") != "sft"]
    kept = ("reward_mean", "rollouts", "groups_equal", "entropy", "staleness_mean", "step_s")
    return [
        {"step": i, **{key: step["metrics"].get(key) for key in kept}}
        for i, step in enumerate(sorted(trained, key=lambda step: step["step"]), 1)
    ]


def main(
    example: Annotated[str, typer.Argument(help="calculator, text_to_sql or rag")],
    seeds: Annotated[str, typer.Option(help="one run each")] = "0",
    model: Annotated[str | None, typer.Option(help="a published model, e.g. Qwen/Qwen3-1.7B (a GPU)")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="of RL [default: the example's; with --model 100]")] = None,
    imitate: Annotated[
        int | None, typer.Option(min=0, help="rollouts of the teacher [default: the example's; with --model 0]")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="rollouts per held-out task and evaluation")] = 4,
    directory: Annotated[Path | None, typer.Option("--dir", help="[default: lightning-examples/EXAMPLE]")] = None,
) -> None:
    """Let an example's agent learn, and measure it on held-out tasks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: what was started is stopped
    found = HERE / example
    if not (found / "agent.py").is_file():
        raise SystemExit(f"no example {example!r} in {HERE}")
    default = yaml.safe_load((found / "example.yaml").read_text()) | ({"imitate": 0, "steps": 100} if model else {})
    imitate, steps = default["imitate"] if imitate is None else imitate, steps or default["steps"]
    plan = Plan(found, default["preload"], model, imitate, steps, train=200, held_out=32, samples=samples)
    directory = (directory or Path("lightning-examples") / example).absolute()
    results = []
    for seed in map(int, seeds.split(",")):
        results.append(Lesson(plan, seed, directory / f"seed-{seed}").run())
        save(results, directory)
        show(results)
    print(f"\n{directory}/results.json, reward.png")


if __name__ == "__main__":
    typer.run(main)
