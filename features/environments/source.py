"""Turns `--environment KIND:NAME` into what `run` takes: a tasks file, a command, and modules to import once.

Each kind has a Python environment of its own, `.venv-environments/KIND`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import yaml

from ...commands.files import written
from ...core import guard
from ...core.config.file import read_yaml
from ...core.errors import ConfigError, LightningError
from .inside.alone import ROLLOUT
from .inside.play import Wrong, require_known

KINDS = ("reasoning_gym", "textarena", "verifiers")
ROOT = Path(__file__).parents[2]
GRACE_S = "1"
CLIENT = "tenacity>=9,<10"
OF_PACKAGES = ("bin", "include", "lib")  # all else in the folder stays
PYTHON = f"""#!/bin/sh
exec "${{0%/*}}/bin/python" -I -S {shlex.quote(str(ROOT / "features/environments/inside/alone.py"))} "$@"
"""
PROGRAM = "from lightning_proxy.features.environments.inside.play import main\n\nmain()\n"


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


def _write(file: Path, text: str, mode: int = 0o600) -> None:
    """Write it at once: another command may read it now, or write the same."""
    file.parent.mkdir(exist_ok=True)
    with written(file) as part:
        part.write_text(text)
        part.chmod(mode)


class KindsEnvironment:
    """The environment of one kind. ConfigError if there is no such kind."""

    def __init__(self, kind: str) -> None:
        try:
            require_known(kind, KINDS, "kind of environments")
        except Wrong as error:
            raise ConfigError(f"{error}; there are {', '.join(KINDS)}") from None
        module = import_module(f".inside.{kind}", __package__)
        self.kind, self.packages = kind, tuple(module.PACKAGES)
        self.requires = (*module.REQUIRES, CLIENT)
        self.directory = Path(".venv-environments") / kind
        here = self.directory.absolute()  # a program may begin in a folder of its own
        self.program = [str(here / "python"), str(here / "play.py"), kind]

    @property
    def is_there(self) -> bool:
        """Whether it was made by this installation of ours, and for what it needs now."""
        stamp = self.directory / "installed.txt"
        return stamp.is_file() and {*self.requires, str(ROOT)} <= set(stamp.read_text().split("\n"))

    def require(self) -> None:
        """Raise ConfigError if it is not there. Write our files anew: another version of ours may have written them."""
        if not self.is_there:
            do = f"lightning-proxy environments {self.kind} --install"
            raise ConfigError(f"{self.kind} is not installed in {self.directory} of this folder; run `{do}`")
        self._write()

    def make(self, further: Sequence[str]) -> None:
        """Make it anew, with `further` packages or those of before. LightningError has pip's last words.

        Tasks, and data that a user fetched, are kept.
        """
        stamp = self.directory / "installed.txt"
        if stamp.is_file():
            _, _, before = stamp.read_text().partition("\n\n")
            further = further or before.splitlines()
        wanted = [*self.requires, *further]
        typer.echo(f"installing into {self.directory}, with their dependencies: {', '.join(wanted)}")
        for name in OF_PACKAGES:
            shutil.rmtree(self.directory / name, ignore_errors=True)
        stamp.unlink(missing_ok=True)
        _run([sys.executable, "-m", "venv", str(self.directory)])
        python = str(self.directory / "bin" / "python")
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])
        self.finish(further)

    def finish(self, further: Sequence[str] = ()) -> None:
        """Write what is ours, once the packages are there."""
        (packages,) = self.directory.glob("lib/python*/site-packages")
        (packages / "lightning_proxy").symlink_to(ROOT)
        self._write()
        (self.directory / "installed.txt").write_text("\n".join([str(ROOT), *self.requires, "", *further]))

    def _write(self) -> None:
        for path, text in zip(self.program, (PYTHON, PROGRAM), strict=False):
            _write(Path(path), text, 0o755)

    def ask(self, *what: str, given: str = "") -> list[str]:
        """Return the lines that the kind's program prints, with `given` as its input. ConfigError: what is wrong."""
        self.require()
        watched, lifeline = os.pipe()  # under a guard, which ends it with us
        command = [sys.executable, "-I", "-S", guard.__file__, str(watched), GRACE_S, *self.program, *what]
        env = {name: value for name, value in os.environ.items() if name != ROLLOUT}
        done = subprocess.run(
            command, check=False, capture_output=True, input=given.encode(), env=env, pass_fds=(watched,)
        )
        os.close(watched)
        os.close(lifeline)
        said = done.stderr.decode(errors="replace").strip()
        if done.returncode:
            raise ConfigError(f"{self.kind}: {said.splitlines()[-1] if said else f'exit code {done.returncode}'}")
        if said:
            typer.echo(said, err=True)
        return done.stdout.decode().splitlines()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise LightningError(f"{' '.join(command[:4])}: {said[-1]}")
