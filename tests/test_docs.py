"""What the documents say is what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from lightning_proxy.cli import app
from support.examples import learned
from support.paths import ROOT


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    missing = [name for name in commands if f"lightning-proxy {name}" not in readme and f"`{name}`" not in readme]
    assert missing == []


def test_the_snippets_for_frameworks_are_parts_of_the_programs_that_are_run() -> None:
    document = (ROOT / "docs" / "frameworks.md").read_text()
    for program in ROOT.glob("frameworks/**/with_*.*"):
        if "node_modules" in program.parts or program.suffix == ".pyc":
            continue
        _, _, after = program.read_text().partition(" docs: begin\n")
        snippet = re.split(r"\n+(?:#|//) docs: end", after)[0]
        language = {".py": "python", ".mjs": "js"}[program.suffix]
        assert f"(../{program.relative_to(ROOT)})" in document
        assert f"```{language}\n{snippet}\n```" in document, program.name


def test_the_snippets_for_frameworks_use_no_name_that_they_do_not_show() -> None:
    document = (ROOT / "docs" / "frameworks.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    assert len(snippets) > 10
    for snippet in snippets:
        ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--select", "F821", "-"]
        found = subprocess.run(ruff, check=False, input=snippet, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("results", sorted(ROOT.glob("examples/*/results.json")), ids=lambda path: path.parent.name)
def test_what_examples_learned_is_shown_as_it_was_measured(results: Path) -> None:
    document, found = (ROOT / "docs" / "results.md").read_text(), json.loads(results.read_text())
    assert learned().markdown(found) in document
    assert f"(../examples/{results.parent.name}/reward.png)" in document
    assert (results.parent / "reward.png").is_file()
    assert len(found) >= 3
    for one in found:
        assert one["held_out"]["rl"]["mean_reward"] > one["held_out"]["sft"]["mean_reward"]


def test_agents_md_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) < 60


def test_the_proxy_does_not_import_torch() -> None:
    later = ("torch", "litellm", "trl", "opentelemetry")
    script = f"import sys, lightning_proxy.proxy.app; sys.exit(any(m in sys.modules for m in {later}))"
    subprocess.run([sys.executable, "-c", script], check=True)
