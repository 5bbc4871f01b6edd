"""A release's version is the same wherever it is said."""

from __future__ import annotations

import re
import subprocess
import tomllib

import lightning_proxy
from support.command_line import lightning
from support.paths import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_program_and_the_package_say_the_version() -> None:
    assert lightning("--version").stdout == f"lightning-proxy {VERSION}\n"
    assert lightning_proxy.__version__ == VERSION


def test_the_changelog_begins_with_the_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    newest = headings[headings[0] == "Unreleased"]
    assert re.fullmatch(rf"{re.escape(VERSION)} - (unreleased|\d{{4}}-\d\d-\d\d)", newest), newest


def test_a_tag_of_this_commit_is_the_version() -> None:
    asked = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    tags = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert set(tags) <= {f"v{VERSION}"}, "pyproject.toml names another version than the tag"
