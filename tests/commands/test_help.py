"""Helps, versions, completion, and `init`: what a user meets first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import typer.main
import yaml

import lightning_proxy
from lightning_proxy.cli import app
from lightning_proxy.commands.groups import GROUPS
from lightning_proxy.proxy.config.file import load_config
from support.command_line import lightning


def commands(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*before, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))


COMMANDS = [(), *commands(typer.main.get_command(app))]  # type: ignore[arg-type]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_reads_well_at_80_columns(command: tuple[str, ...]) -> None:
    short, long = lightning(*command, "-h"), lightning(*command, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    lines = short.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(mark in short.stdout for mark in ("│", "╭", "range>"))  # no boxes


def test_the_help_lists_every_command_in_a_group() -> None:
    shown = lightning("--help").stdout
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", *(f"{group}:" for group in GROUPS)]  # no command without a group


@pytest.mark.parametrize("group", [(), *sorted({command[:-1] for command in COMMANDS if command[1:]})], ids=" ".join)
def test_no_line_about_a_command_is_cut(group: tuple[str, ...]) -> None:
    assert "..." not in lightning(*group, "--help").stdout.partition("Options:")[2]


@pytest.mark.parametrize("arguments", [["--version"], ["rollouts", "-h"]])
def test_the_package_is_the_command(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_proxy", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"COLUMNS": "80"})
    assert (done.returncode, done.stdout) == (0, lightning(*arguments).stdout), done.stderr


def test_the_package_says_its_version() -> None:
    assert lightning_proxy.__version__ == version("lightning-proxy")


def test_a_shell_completes_commands(tmp_path: Path) -> None:
    asked = {
        "_LIGHTNING_PROXY_COMPLETE": "complete_bash",
        "COMP_WORDS": "lightning-proxy rollouts d",
        "COMP_CWORD": "2",
    }
    command = [sys.executable, "-m", "lightning_proxy"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | asked)
    assert {*done.stdout.split()} == {"diff", "delete"}, done.stderr


def test_init_writes_a_configuration_that_says_what_was_asked_for(tmp_path: Path) -> None:
    options = ("--model", "org/name: x", "--port", "9000", "--group-size", "4")
    done = lightning("init", *options, cwd=tmp_path)
    assert done.stderr == "wrote config.yaml; next: lightning-proxy up\n"
    config = load_config(tmp_path / "config.yaml")
    assert (config.policy.model, config.proxy.port, config.trainer.group_size) == ("org/name: x", 9000, 4)
    assert "# agents use http://127.0.0.1:9000/v1" in (tmp_path / "config.yaml").read_text()
    again = lightning("init", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (
        1, "lightning-proxy: config.yaml already exists; --force overwrites it\n"
    )  # fmt: skip


def test_init_for_a_server_that_runs_needs_no_model(tmp_path: Path) -> None:
    done = lightning("init", "mine.yaml", "--upstream", "https://api.openai.com/v1", "--kind", "openai", cwd=tmp_path)
    assert done.stderr == "wrote mine.yaml; next: lightning-proxy --config mine.yaml serve\n"
    written = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert written["upstreams"] == [{"name": "policy", "kind": "openai", "base_url": "https://api.openai.com/v1"}]
    assert "policy" not in written


def test_init_writes_nothing_that_is_wrong(tmp_path: Path) -> None:
    done = lightning("init", "--upstream", "ftp://h", cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith("lightning-proxy: config.yaml: upstreams.0: base_url")) == (2, True)
    assert list(tmp_path.iterdir()) == []
