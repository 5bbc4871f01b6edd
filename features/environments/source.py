"""Turns `--environment KIND:NAME` into what `run` takes: a tasks file, a command, and modules to import once."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import typer
import yaml

from ...core.config.file import read_yaml
from ...core.errors import ConfigError
from .install import KindsEnvironment


@dataclass(frozen=True, slots=True)
class EnvironmentTasks:
    """Tasks, and the program that plays one."""

    tasks: Path
    command: list[str]
    preload: list[str]


def source_of(environment: str, arguments: str | None, defaults: dict[str, Any]) -> EnvironmentTasks:
    """Make the tasks. `defaults` are laid under the arguments. ConfigError says what is wrong with them."""
    kind, colon, name = environment.partition(":")
    if not (colon and name):
        raise ConfigError(f"--environment is KIND:NAME, as in reasoning_gym:gcd; got {environment!r}")
    of = KindsEnvironment(kind)
    asked = json.dumps(defaults | _given(arguments), sort_keys=True)
    if sys.stderr.isatty():
        typer.echo(f"making the tasks of {environment}", err=True)
    lines = of.ask("tasks", name, given=asked)
    if not lines:
        raise ConfigError(f"{environment} has no tasks with {asked}")
    file = of.directory / "tasks" / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.jsonl"
    _write(file, "".join(f"{line}\n" for line in lines))
    return EnvironmentTasks(file, of.program, [*of.packages])


def experiment_of(file: Path, environment: str, arguments: str | None, alias: str) -> Path:
    """Return a copy of an experiment's file with the environment's tasks of both splits, and its program."""
    given = read_yaml(file)
    if both := sorted({"tasks", "held_out", "agent", "preload"} & given.keys()):
        raise ConfigError(f"{file}: with --environment, leave out {', '.join(both)}")
    if "split" in _given(arguments):
        raise ConfigError("--environment-args: an experiment takes both splits; leave out split")
    train, held_out = (
        source_of(environment, arguments, {"split": split, "model": alias}) for split in ("train", "held_out")
    )
    given |= {"tasks": str(train.tasks), "held_out": str(held_out.tasks)}
    given |= {"agent": train.command, "preload": ",".join(train.preload)}
    copy = train.tasks.with_name(f"{train.tasks.stem}-{file.stem}.yaml")
    _write(copy, yaml.safe_dump(given, sort_keys=False))
    return copy


def _given(arguments: str | None) -> dict[str, Any]:
    try:
        given = json.loads(arguments or "{}")
    except ValueError as error:
        raise ConfigError(f"--environment-args is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--environment-args is a JSON object, got {arguments}")
    return given


def _write(file: Path, text: str) -> None:
    """Write it at once: another command may read it now, or write the same."""
    file.parent.mkdir(exist_ok=True)
    with NamedTemporaryFile("w", dir=file.parent, delete=False) as beside:
        beside.write(text)
    Path(beside.name).replace(file)
