"""Where the checkout's files are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
EXAMPLES = ROOT / "examples"
TOPS = ("core", "store", "serving", "proxy", "trainer", "commands", "features", "client")
