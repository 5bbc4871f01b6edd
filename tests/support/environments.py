"""Environments of agent programs, apart from the product's own: each program says in its first lines what it needs.

A program in Python does so as PEP 723 says; those in JavaScript have a `package.json` beside them. What is there
already is kept, so asking again takes a second.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from support.clients import NODE

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-agents"
SECONDS = 300  # for the packages of one program


class CannotInstall(Exception):
    """The installer's last words."""


def command_for(program: Path) -> tuple[str, ...]:
    """What starts a program, everything that it needs installed."""
    if program.suffix == ".mjs":
        _install_packages(program.parent)
        return str(NODE), str(program)
    return str(_python_for(program)), "-W", "ignore", str(program)


def needs(program: Path) -> dict[str, str]:
    """The pinned version of each package that a program names."""
    if program.suffix == ".mjs":
        pins: dict[str, str] = json.loads((program.parent / "package.json").read_text())["dependencies"]
        return pins
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", program.read_text(), re.MULTILINE)
    assert block, f"{program.name} names no dependencies"
    named = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))["dependencies"]
    return dict(re.sub(r"\[.*?\]", "", pin).split("==") for pin in named)


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
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise CannotInstall(error.stderr.strip()[-2000:]) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(str(error)) from None
