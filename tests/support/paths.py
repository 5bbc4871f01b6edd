"""Where the checkout's files are, and which features it has: tests of a deleted feature are skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
EXAMPLES = ROOT / "examples"
TOPS = ("core", "store", "serving", "proxy", "trainer", "commands", "features", "client")

# Commands, and what they are named after, that a feature brings.
COMMANDS = {
    "costs": "costs", "dashboard": "page", "environments": "environments", "experiment": "experiment",
    "optimize": "optimize", "prompts": "prompts", "rescore": "judge", "rewards": "judge", "rollouts rate": "judge",
}  # fmt: skip


def has(feature: str) -> bool:
    return (ROOT / "features" / feature).is_dir()


def is_there(command: str) -> bool:
    """Whether no feature that was deleted had this command."""
    return all(has(feature) for words, feature in COMMANDS.items() if f"{command} ".startswith(f"{words} "))


def load_module(file: Path) -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
