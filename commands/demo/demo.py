"""`demo`: the main loop on a small real model, run with the commands that users have."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Literal

from rich.console import Console

from ...core.config.file import load_config
from ...core.config.section import Section
from ...core.errors import ConfigError, LightningError
from ...proxy.dialects.transcript import body, chat_turns
from ..api_client import ApiClient
from ..export.policy import where
from ..files import save_json
from ..formats import share, table
from ..run.report import ProgressView
from ..signals import run_until_signal
from ..system.processes import make_directory
from ..trial import Json, Trial, Work, draw
from .model import cache_directory, require_packages

CONCURRENCY = 64
# `import openai` loads most of itself in the first call: 0.6 s of CPU in every run, 0.03 s with these preloaded.
PRELOADED = "openai,openai.resources,httpcore,h11,certifi,urllib.request"
PERFECT_STEPS = 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "addition"
CONFIG = "config.yaml"
OPTIONS = "demo.json"  # marks a demo's directory
Api = Literal["chat", "messages", "responses"]
AGENTS: dict[Api, str] = {"chat": "demo_agent.py", "messages": "messages_agent.py", "responses": "responses_agent.py"}
GROUP_SIZE, TASKS_PER_STEP = 8, 8
STEP_ROLLOUTS = GROUP_SIZE * TASKS_PER_STEP
POLL_S = 2.0
LEARNING_RATE = 4e-4  # twice what `auto` is, which learns faster at first, and loses nothing as it falls to 0
LOOK_EVERY, WORTH_A_LOOK, GOOD = 4, 0.95, 0.95  # steps; mean training reward; share of exact held-out answers


class DemoOptions(Section):
    """The options of `demo`. `api`: the API that the agent uses."""

    steps: int = 90
    directory: Path = Path("lightning-demo")
    model: Path | None = None
    api: Api = "chat"


def demo(options: DemoOptions, *, resume: bool = False) -> None:
    """Prepare model, tasks and configuration, run the loop, then show and save the result.

    `resume`: continue in a directory where a demo was stopped or killed, with that demo's options.
    """
    console = Console()
    require_packages()
    options = resumed(options.directory) if resume else begin(options)
    directory, config = options.directory, options.directory / CONFIG
    trial = Demo(options, ProgressView(console))
    if not config.is_file():
        subprocess.run([sys.executable, EXAMPLE / "tasks.py", directory / "tasks"], check=True)
        console.print("[dim]preparing the model[/]")
        # In a process of its own, so that the memory of torch and transformers is free before the loop starts.
        model = options.model or cache_directory()
        if not (model / "config.json").is_file():
            made = subprocess.run([sys.executable, "-m", "lightning_proxy.commands.demo.model", model], check=False)
            if made.returncode != 0:
                raise LightningError(f"the demo's model could not be created in {model}; see the error above")
        trial.prepare(settings(model, options.steps), 0, 2 * options.steps * TASKS_PER_STEP)
    try:
        with trial.view:
            result = {"variant": "demo", "seed": 0} | run_until_signal(trial.run())
    except LightningError:
        print(f"to continue: lightning-proxy demo --resume --dir {directory}")
        raise
    finally:
        with suppress(LightningError):  # an earlier error is the one to show
            if (place := asyncio.run(where(load_config(config), f"--config {config} "))) is not None:
                print(place)
    save_json(result, directory / "result.json")
    draw([result], directory / "reward.png")
    show(result, console)
    console.print(f"curve: {directory / 'reward.png'}, data: {directory / 'result.json'}", soft_wrap=True)


class Demo(Trial):
    """The trial, with a progress bar. The agent works on repeated tasks until training ends."""

    passes = 100  # more than are needed

    def __init__(self, options: DemoOptions, view: ProgressView) -> None:
        directory = options.directory
        program = [sys.executable, str(EXAMPLE / AGENTS[options.api])]
        tasks, held_out = directory / "tasks" / "train.jsonl", directory / "tasks" / "held_out.jsonl"
        work = Work(
            agent=program, tasks=tasks, held_out=held_out, samples=8, concurrency=CONCURRENCY, preload=PRELOADED
        )  # fmt: skip
        super().__init__(work, directory, view.say)
        self.view, self._steps = view, options.steps

    async def ended(self, api: ApiClient) -> None:
        """Show steps, answers and the curve until the demo is over.

        It is over when the held-out answers were good twice in a row, when the newest completed rollouts (as many as
        PERFECT_STEPS steps take) were all dropped, most often for equal rewards, or when training has collapsed.
        """
        bar, several = self.view.bar("training steps", self._steps), PERFECT_STEPS * STEP_ROLLOUTS
        good, next_look = 0, 0
        curve: list[float] = []
        is_over = False
        while not is_over:
            with suppress(LightningError):  # a busy machine; the next look will do
                policy = await api.policy()
                newest = (await api.rollouts(mode="train", limit=several + STEP_ROLLOUTS))["data"]
                completed = [one for one in newest if one["status"] == "completed"][:several]
                rewarded = [one for one in completed[:STEP_ROLLOUTS] if one["reward"] is not None]
                mean = fmean(one["reward"] for one in rewarded) if rewarded else None
                bar.show(policy["steps"], mean, sum(one["status"] == "failed" for one in newest))
                nothing_left = len(completed) == several and all(one["dropped"] for one in completed)
                is_over = nothing_left or policy["collapse"] is not None
                if mean is not None and policy["steps"] >= next_look:
                    next_look = policy["steps"] + LOOK_EVERY
                    curve.append(mean)
                    self.say(f"step {policy['steps']:2}  {sparkline(curve)}  {await in_words(api, rewarded[0])}")
                    if mean >= WORTH_A_LOOK:
                        passed = (await self.evaluate(f"step-{policy['steps']}"))["passed"]
                        self.say(f"{share(passed)} of the held-out answers are exact")
                        good = good + 1 if passed >= GOOD else 0
                        is_over = is_over or good == 2
            await asyncio.sleep(POLL_S)


def begin(options: DemoOptions) -> DemoOptions:
    """Create the demo's directory, or empty that of an earlier demo, and write the options that `resumed` reads.

    Raise ConfigError if the directory holds anything but an earlier demo.
    """
    directory = make_directory(options.directory, "--dir")
    if any(directory.iterdir()):
        shutil.rmtree(resumed(directory).directory)
        directory.mkdir()
    absolute = {"directory": directory, "model": options.model and options.model.absolute()}
    options = options.model_copy(update=absolute)
    (directory / OPTIONS).write_text(options.model_dump_json())
    return options


def resumed(directory: Path) -> DemoOptions:
    """Return the options that the demo in `directory` began with. Raise ConfigError if it has none or was moved."""
    with suppress(OSError, ValueError):
        kept = DemoOptions.model_validate_json((directory / OPTIONS).read_bytes())
        if kept.directory == directory.absolute():
            return kept
    raise ConfigError(f"{directory} is not the directory of a demo, or was moved: choose another --dir")


def settings(model: Path, steps: int) -> Json:
    """Return the system's configuration, except for what each trial sets itself."""
    return {
        "policy": {"model": str(model), "publish": "merged"},
        "vllm": {"max_model_len": 512, "kv_cache_gib": 1.0},
        "trainer": {
            "group_size": GROUP_SIZE,
            "tasks_per_step": TASKS_PER_STEP,
            "lora_rank": 16,
            "max_steps": steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler": "linear",
        },
    }


def show(result: Json, console: Console) -> None:
    """Print the table, the curve, the time taken and the best version."""
    heads = ("policy version", "rollouts", "exact answers", "mean reward")
    shown = table("", right=heads, title="held-out tasks, through the live proxy")
    for name, version in (("before", 0), ("after", result["version"])):
        row = result["held_out"][name]
        shown.add_row(name, str(version), str(row["rollouts"]), share(row["passed"]), f"{row['mean_reward']:.3f}")
    console.print(shown)
    curve = [step["reward_mean"] for step in result["steps"] if step["reward_mean"] is not None]
    if len(curve) > 1:
        console.print(terminal_curve(curve, min(console.width, 100)), markup=False, highlight=False)
    minutes = result["minutes"]
    training = f"{minutes['training']:.1f} min of training, {sum(minutes.values()):.1f} min in all"
    console.print(f"{result['steps_taken']} steps; since this start {training}")
    if result["best"] is not None:
        console.print(f"the best is {result['best']}")


async def in_words(api: ApiClient, rollout: Json) -> str:
    """Return what a rollout's agent asked first, and the answer."""
    turn = next(iter(chat_turns((await api.rollout(rollout["rollout_id"]))["calls"])))
    asked, answered = (" ".join(map(body, messages)).strip() for messages in (turn.shown[-1:], turn.answer))
    return f"{asked!r} → {answered!r}"


def sparkline(values: Sequence[float]) -> str:
    """Return a line of bars, one for each reward. Rewards are between 0 and 1."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * value))] for value in values)


def terminal_curve(values: Sequence[float], width: int) -> str:
    """Draw the reward curve in characters, without colours."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, 15)
    figure.title("mean training reward, by steps")
    figure.draw(figure.signal(list(range(1, len(values) + 1)), list(values)).lines())
    return str(plotext.uncolorize(str(figure.build())))
