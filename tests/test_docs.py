"""What the documents say is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lightning_proxy.cli import app
from support.paths import ROOT, load_module

DOCS = sorted((ROOT / "docs").glob("*.md"))
FIRST = {"README.md": 150, "AGENTS.md": 59, "llms.txt": 150}  # what is read first, and the most lines of it
PAGES = [*(ROOT / name for name in (*FIRST, "CHANGELOG.md")), *DOCS, *sorted(ROOT.glob("examples/*/README.md"))]
# Fences and code spans show brackets that are no links.
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def prose(page: Path) -> str:
    return CODE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    without_fences = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_fences, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def every_command(command: Any, path: str = "lightning-proxy") -> list[str]:
    inner = getattr(command, "commands", {})
    return [found for name in inner for found in every_command(inner[name], f"{path} {name}")] if inner else [path]


def test_the_documents_name_every_command() -> None:
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *DOCS])
    commands = every_command(typer.main.get_command(app))
    assert len(commands) > 20
    assert [command for command in commands if not re.search(rf"{command}\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_the_generated_pages_are_current() -> None:
    generate = load_module(ROOT / "docs" / "generate.py")
    page = generate.SETTINGS.read_text()
    again = "`python docs/generate.py` makes them again"
    assert generate.settings(generate.meanings(page)) == page, again
    assert generate.metrics() == generate.METRICS.read_text(), again
    assert "TODO" not in page, "say what each new setting does"


def test_the_index_links_every_page() -> None:
    linked = set(LINK.findall(prose(ROOT / "docs" / "README.md")))
    assert {page.name for page in DOCS} - {"README.md"} - linked == set()


def test_the_way_of_a_step_is_short_and_leads_through_files_that_exist() -> None:
    document = (ROOT / "docs" / "architecture.md").read_text()
    section = document.partition("## The way of a step\n")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. `([^`]+)`:", section, re.MULTILINE)
    assert 5 < len(files) <= 20
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_pages_are_short() -> None:
    # Made from the code; the map with its walks; all that who runs it needs.
    long = {"settings.md", "step-metrics.md", "architecture.md", "running.md"}
    assert [name for name, most in FIRST.items() if len((ROOT / name).read_text().splitlines()) > most] == []
    assert [page.name for page in DOCS if len(page.read_text().split()) > 1800 and page.name not in long] == []


def test_every_program_for_a_framework_is_linked() -> None:
    document = (ROOT / "docs" / "agents.md").read_text()
    programs = [path for path in ROOT.glob("frameworks/**/with_*.*") if "node_modules" not in path.parts]
    assert len(programs) > 10
    for program in programs:
        assert program.suffix == ".pyc" or f"(../{program.relative_to(ROOT)})" in document


def test_the_proxy_does_not_import_torch() -> None:
    later = ("torch", "litellm", "trl", "opentelemetry")
    script = f"import sys, lightning_proxy.proxy.app; sys.exit(any(m in sys.modules for m in {later}))"
    subprocess.run([sys.executable, "-c", script], check=True)
