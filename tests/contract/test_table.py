"""README.md's table of promises names tests that exist, and for each promise at least one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (FOLDER / "README.md").read_text())


@cache
def functions_of(name: str) -> set[str]:
    file = FOLDER / name if "/" not in name else FOLDER.parent / name
    if not file.exists():
        return set()
    nodes = ast.parse(file.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_test_that_the_table_names_is_there() -> None:
    gone = {file for file, _ in NAMED if file.startswith("features/") and not (FOLDER.parent / file).parent.exists()}
    assert [f"{file}::{test}" for file, test in NAMED if file not in gone and test not in functions_of(file)] == []
    lines = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| ")]
    bare = [line for line in lines if "::test_" not in line and not line.startswith("| promise ")]
    assert bare == [], "a promise without a test"
