"""Commands that the page and messages print are ones that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lightning_proxy.cli import app
from support.paths import ROOT, TOPS

PAGE = ROOT / "features" / "page" / "files"
SOURCES = [
    *(path for path in sorted(PAGE.glob("*.*")) if path.suffix in (".mjs", ".html")),
    *(path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))),
]
PRINTED = re.compile(r"(?:<code>|`)lightning-proxy ([a-z][^<`]*)(?:</code>|`)")
# What stands for a value: of JavaScript, of Python's two kinds of formats, and dots for what may follow.
VALUE = re.compile(r"\$?\{[^}]*\}|%[sd]|\b(?:N|VALUE)\b")


def printed(path: Path) -> Iterator[str]:
    text = re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # a string in several lines
    for command in PRINTED.findall(text):
        yield VALUE.sub("1", command).replace("…", "").strip()


COMMANDS = [(str(path.relative_to(ROOT)), command) for path in SOURCES for command in printed(path)]


def parse(arguments: list[str]) -> None:
    """Parse a command as the command line does, its name alone too. Raise an error if it does not take it."""
    command: Any = typer.main.get_command(app)
    context, name = None, "lightning-proxy"
    while hasattr(command, "commands") and arguments:
        context = command.make_context(name, [*arguments], parent=context)
        name, command, arguments = command.resolve_command(context, arguments)
    if not arguments:
        return
    context = command.make_context(name, [*arguments], parent=context)
    # `run` and `eval` hand on what follows `--`, and take an unknown option for its beginning.
    program = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    assert [*context.params.get("command", ())] == program, f"no option of {name}: {arguments}"


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_what_is_printed_is_parsed(path: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    parse(shlex.split(command))


def test_commands_are_found_and_an_option_that_does_not_exist_is_refused() -> None:
    assert len(COMMANDS) >= 10
    with pytest.raises(Exception, match="No such option: --version"):
        parse(["eval", "--tasks", "FILE", "--version", "1,2", "--", "COMMAND"])
