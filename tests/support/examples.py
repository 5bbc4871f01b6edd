"""The modules of an example, which are told apart by their directory alone."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.loading import load_module

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/teacher.py"))


def learned() -> Any:
    """examples/learned.py."""
    return load_module(EXAMPLES / "learned.py")


@cache
def modules(example: str) -> SimpleNamespace:
    """All of an example but `agent`, which needs its framework; others have modules of the same names."""
    names = [path.stem for path in (EXAMPLES / example).glob("*.py") if path.stem != "agent"]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(EXAMPLES / example))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(EXAMPLES / example))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
