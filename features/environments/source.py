"""Turns `--environment KIND:NAME` into tasks and a program, and installs each kind in `.venv-environments/KIND`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml

from ...commands.files import written
from ...core.config.file import read_yaml
from ...core.errors import ConfigError, LightningError
from ...core.guard import start_guarded
from .inside.alone import ROLLOUT
from .inside.play import Wrong, require_known

KINDS = ("reasoning_gym", "textarena", "verifiers")
ROOT = Path(__file__).parents[2]
GRACE_S = 1.0
CLIENT = "tenacity>=9,<10"
PYTHON = f"""#!/bin/sh
exec "${{0%/*}}/bin/python" -I -S {shlex.quote(str(ROOT / "features/environments/inside/alone.py"))} "$@"
"""
PROGRAM = "from lightning_proxy.features.environments.inside.play import main\n\nmain()\n"


class EnvironmentTasks(NamedTuple):
    tasks: Path
    command: list[str]
    preload: list[str]


def source_of(environment: str, arguments: str | None, defaults: dict[str, Any]) -> EnvironmentTasks:
    """Make an environment's tasks, with `defaults` for missing arguments. Raises ConfigError if this fails."""
    kind, colon, name = environment.partition(":")
    if not (colon and name):
        raise ConfigError(f"--environment must be KIND:NAME, as in reasoning_gym:gcd; got {environment!r}")
    installed = KindsEnvironment(kind)
    given = json.dumps(defaults | _given(arguments), sort_keys=True)
    if sys.stderr.isatty():
        typer.echo(f"making the tasks of {environment}", err=True)
    lines = installed.ask("tasks", name, given=given)
    if not lines:
        raise ConfigError(f"{environment} has no tasks for the arguments {given}")
    file = installed.directory / "tasks" / f"{name}-{hashlib.sha256(given.encode()).hexdigest()[:8]}.jsonl"
    _write(file, "".join(f"{line}\n" for line in lines))
    return EnvironmentTasks(file, installed.program, [*installed.packages])


def experiment_of(file: Path, environment: str, arguments: str | None, alias: str) -> Path:
    """Copy an experiment file, add the environment's program and tasks of both splits, and return the copy's path."""
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
        raise ConfigError(f"--environment-args must be a JSON object, got {arguments}")
    return given


def _write(file: Path, text: str) -> None:
    """Write the file atomically: another command may be reading or writing the same file."""
    file.parent.mkdir(exist_ok=True)
    with written(file) as part:
        part.write_text(text)


class KindsEnvironment:
    """The Python environment of one kind. Raises ConfigError if there is no such kind."""

    def __init__(self, kind: str) -> None:
        try:
            require_known(kind, KINDS, "kind of environment")
        except Wrong as error:
            raise ConfigError(f"{error}; known kinds: {', '.join(KINDS)}") from None
        module = import_module(f".inside.{kind}", __package__)
        self.kind, self.packages = kind, tuple(module.PACKAGES)
        self.requires = (*module.REQUIRES, CLIENT)
        self.directory = Path(".venv-environments") / kind
        here = self.directory.absolute()  # a program may begin in a folder of its own
        self.program = [str(here / "python"), str(here / "play.py"), kind]
        self._stamp, self._needs = self.directory / "installed.txt", "\n".join([*self.requires, PYTHON, PROGRAM])

    @property
    def is_there(self) -> bool:
        """Whether it is installed, with the current requirements, for this installation of lightning-proxy."""
        return self._stamp.is_file() and self._stamp.read_text() == self._needs

    def install(self, further: Sequence[str]) -> None:
        """Create or update the environment, with the packages `further`. Raises LightningError if venv or pip fails."""
        wanted = [*self.requires, *further]
        typer.echo(f"installing into {self.directory}, with dependencies: {', '.join(wanted)}")
        self._stamp.unlink(missing_ok=True)
        shutil.rmtree(self.directory / "bin", ignore_errors=True)  # of a Python that may be gone
        _run([sys.executable, "-m", "venv", str(self.directory)])
        python = str(self.directory / "bin" / "python")
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])
        self.finish()

    def finish(self) -> None:
        """Write this project's files, once the packages are installed."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        ours = self.directory / "lib" / version / "site-packages/lightning_proxy"
        ours.unlink(missing_ok=True)
        ours.symlink_to(ROOT)
        for path, text in zip(map(Path, self.program), (PYTHON, PROGRAM), strict=False):
            path.write_text(text)
            path.chmod(0o755)
        self._stamp.write_text(self._needs)

    def ask(self, *what: str, given: str = "") -> list[str]:
        """Return the lines that the kind's program prints for the input `given`. Raises ConfigError if this fails."""
        if not self.is_there:
            do = f"lightning-proxy environments {self.kind} --install"
            raise ConfigError(f"{self.kind} is not installed in {self.directory}, or is out of date; run `{do}`")
        code, printed, said = asyncio.run(self._asked(what, given.encode()))
        if code:
            raise ConfigError(f"{self.kind}: {said.splitlines()[-1] if said else f'ended with exit code {code}'}")
        if said:
            typer.echo(said, err=True)
        return printed.splitlines()

    async def _asked(self, what: Sequence[str], given: bytes) -> tuple[int, str, str]:
        """The program's exit code, output and errors. The program ends when this process does."""
        env = {name: value for name, value in os.environ.items() if name != ROLLOUT}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process, lifeline = await start_guarded(*self.program, *what, grace_s=GRACE_S, env=env, **pipes)
        try:
            printed, said = await process.communicate(given)
        finally:
            os.close(lifeline)
        return process.returncode, printed.decode(), said.decode(errors="replace").strip()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LightningError(f"{' '.join(command[:4])} failed: {said[-1]}")
