"""One run of an example with one seed: imitation and RL, with held-out tasks evaluated before, between and after."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.commands.system.processes import ChildSpec, Supervisor, free_port
from lightning_proxy.commands.trial import merged
from lightning_proxy.core.config.file import config_of
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.features.experiment.experiment import Experiment, Lesson, LessonPlan

Json = dict[str, Any]
HERE = Path(__file__).parent
CONCURRENCY = 32
TEACHER_CONCURRENCY = 8
# All agents learn to say what they should; which of them RL improves upon is trainer.agents.
OF_ALL_AGENTS = {"LIGHTNING_TRAINER__AGENTS": "null", "LIGHTNING_TRAINER__AGENT_CREDIT": "team"}


@dataclass(frozen=True)
class Plan:
    """What is done with each seed.

    `python`: the interpreter of the agent's environment. `preload`: what `run --preload` imports once. `model`: None is
    SmolLM2-135M-Instruct. `imitate`: rollouts of the teacher that are recorded; 0: RL begins with the model itself.
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


class ExampleLesson(Lesson):
    """One seed's run, in a directory of its own."""

    def __init__(self, example: Plan, seed: int, directory: Path) -> None:
        self._example, self._seed, self._teacher_port = example, seed, free_port()
        self._model = example.model or str(directory / "SmolLM2-135M-Instruct")
        settings = self.settings()
        trainer = config_of(settings).trainer
        self._groups = 2 * example.steps * trainer.tasks_per_step
        experiment = Experiment(
            agent=[str(example.python), str(HERE / "play.py")],
            preload=",".join(example.preload),
            tasks=directory / "tasks.jsonl",
            held_out=directory / "held_out.jsonl",
            rollouts=self._groups * trainer.group_size,
            variants={example.example.name: {}},
            samples=example.samples,
            concurrency=CONCURRENCY,
        )
        plan = LessonPlan(example.example.name, seed, directory, settings, config_of(settings), {})
        longer = {"MAX_TOKENS": "1024"} if example.model is not None else {}
        env = {"PYTHONPATH": str(example.example), "MODEL": "policy", **longer}
        super().__init__(experiment, plan, env, partial(print, flush=True))

    def settings(self) -> Json:
        """The example's config.yaml, and what belongs to this run: the model, the teacher, how many steps."""
        teacher = {
            "name": "teacher", "kind": "openai", "base_url": f"http://127.0.0.1:{self._teacher_port}/v1",
            "api_key": "none", "models": ["teacher"],
        }  # fmt: skip
        # Imitation is a step of its own.
        steps = self._example.steps + (self._example.imitate > 0)
        settings: Json = {
            "upstreams": [{"name": "policy", "base_url": "http://127.0.0.1:8100/v1"}, teacher],
            "policy": {"model": self._model},
            "trainer": {"seed": self._seed, "max_steps": steps},
        }
        own = self._example.example
        files = [own / "config.yaml"]
        if self._example.model is not None:
            files += [HERE / "published.yaml", *own.glob("published.yaml")]
        for file in files:
            settings = merged(settings, yaml.safe_load(file.read_text()))
        return settings

    def begin(self) -> None:
        """Empty the directory, if it is an earlier lesson's, and write what the run begins with."""
        if self.directory.exists() and not (self.directory / "config.yaml").is_file():
            raise ConfigError(f"{self.directory} is there and no earlier lesson's: choose another --dir")
        super().begin()

    def prepare(self, settings: Json, seed: int, groups: int) -> None:
        """Write this seed's tasks, again where the steps need more, and a model whose chat template knows tools."""
        sys.path.insert(0, str(self._example.example))
        import tasks

        train, held_out = tasks.split(seed, self._example.train, self._example.held_out)
        taught = train[: self._example.imitate]
        for name, lines in (
            ("tasks", islice(cycle(train), max(groups, len(train)))), ("taught", taught), ("held_out", held_out),
        ):  # fmt: skip
            (self.directory / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in lines))
        if self._example.model is None:
            shutil.copytree(prepare_model(cache_directory()), self._model)
            shutil.copy(HERE / "tools.jinja", Path(self._model) / "chat_template.jinja")
        super().prepare(settings, seed, groups)

    async def stages(self, config: Config) -> Json:
        """Return the result, as it goes into results.json."""
        held_out = {"base": await self._evaluated("base")}
        if self._example.imitate:
            with self.timed("sft"):
                await self._imitate()
            held_out["sft"] = await self._evaluated("sft")
        async with ApiClient.of(config, patience_s=60) as api:
            with self.timed("rl"):
                await self.train(api)
            steps = (await self.found(api))["steps"][self._example.imitate > 0 :]
        if not steps:
            self.say(f"RL took no step. The trainer said:\n{(self.logs / 'trainer.log').read_text().strip()}")
        held_out["rl"] = await self._evaluated("rl")
        return {
            "example": self._example.example.name,
            "model": Path(self._model).name,
            "seed": self._seed,
            "imitate": self._example.imitate,
            "steps_asked": self._example.steps,
            "held_out": held_out,
            "steps": [step | {"step": i} for i, step in enumerate(steps, 1)],
            "minutes": self.minutes,
        }

    async def _evaluated(self, name: str) -> Json:
        with self.timed("evaluations"):
            row = await self.evaluate(name)
        self.say(f"seed {self._seed}, {name}: {row['mean_reward']:.2f} on held-out tasks")
        return row

    async def _imitate(self) -> None:
        """Record the teacher's rollouts, and learn from the good ones."""
        taught = self.directory / "taught.jsonl"
        serve = [sys.executable, str(HERE / "teach.py"), str(self._teacher_port), str(taught)]
        url = f"http://127.0.0.1:{self._teacher_port}/v1/models"
        record = ["--tasks", str(taught), "--group-size", "1", *self.agent(TEACHER_CONCURRENCY)]
        async with Supervisor(self.logs) as own:
            await own.wait_healthy(await own.start(ChildSpec("teacher", serve, self.launch.env(), url, 60)))
            await self.done("taught", "run", *record, env={"MODEL": "teacher"})
            await self.done("imitate", "train", "--method", "sft", env=OF_ALL_AGENTS)
