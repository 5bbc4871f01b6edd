"""Let an example's agent learn, and measure it: `make learn EXAMPLE=calculator ARGS="--seeds 0,1,2"`.

A model is served; the agent's rollouts with a teacher are recorded and imitated (`train --method sft`), then improved
upon by LightningRL (`train`) while the agent works. Held-out tasks are evaluated before, between and after. With
--model, a published model begins with RL.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from learned import save, show
from lesson import HERE, ExampleLesson, Plan

from lightning_proxy.commands.signals import run_until_signal
from lightning_proxy.core.errors import ConfigError, LightningError

ENVIRONMENTS = HERE.parent / ".venv-agents"
NAMES = sorted(path.parent.name for path in HERE.glob("*/example.yaml"))


def agent_python(example: Path) -> Path:
    """The interpreter of the agent's own environment, with what agent.py says in its first lines that it needs.

    Where it says nothing, it is this one.
    """
    if not (example / "agent.py").read_text().startswith("# /// script"):
        return Path(sys.executable)
    python = ENVIRONMENTS / example.name / "bin" / "python"
    uv = shutil.which("uv") or str(Path(sys.prefix) / ".uv/bin/uv")
    commands = [[uv, "pip", "install", "--quiet", "--python", python, "-r", example / "agent.py"]]
    if not python.exists():
        venv = [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, python.parents[1]]
        commands.insert(0, venv)
    try:
        for command in commands:
            subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LightningError(f"the agent's packages could not be installed: {error}") from None
    return python


def seeds_of(text: str) -> list[int]:
    """`0,1,2`; ConfigError for anything else."""
    seeds = text.split(",")
    if not all(seed.isascii() and seed.isdigit() for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: numbers between commas, each once, got {text!r}")
    return [int(seed) for seed in seeds]


def learn(plan: Plan, seeds: list[int], directory: Path) -> None:
    """A lesson for each seed; results of other seeds that are in the directory already are kept."""
    file = directory / "results.json"
    found: dict[int, dict[str, Any]] = (
        {one["seed"]: one for one in json.loads(file.read_text())} if file.exists() else {}
    )
    for seed in seeds:
        found[seed] = run_until_signal(ExampleLesson(plan, seed, directory / f"seed-{seed}").run())
        results = [found[number] for number in sorted(found)]
        save(results, directory)
        show(results)
    print(f"\nresults.json, reward.png: {directory}")


def main(
    example: Annotated[str, typer.Argument(help=", ".join(NAMES))],
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
    try:
        if example not in NAMES:
            raise ConfigError(f"no example {example!r}: there are {', '.join(NAMES)}")
        numbers, found = seeds_of(seeds), HERE / example
        own = yaml.safe_load((found / "example.yaml").read_text())
        default = {"tasks": 200} | own | ({"imitate": 0, "steps": 100} if model else {})
        plan = Plan(
            example=found,
            python=agent_python(found),
            preload=default["preload"],
            model=model,
            imitate=default["imitate"] if imitate is None else imitate,
            steps=steps or default["steps"],
            train=default["tasks"],
            held_out=32,
            samples=samples,
        )
        name = f"{example}-{Path(model).name}" if model else example
        learn(plan, numbers, (directory or Path("lightning-examples") / name).absolute())
    except LightningError as error:
        print(f"learn: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    typer.run(main)
