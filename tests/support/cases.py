"""Small inputs from public reports that must come out right, in `tests/cases/`; its README says how to read them."""

from __future__ import annotations

import json
from typing import Any

from support.paths import TESTS

Case = dict[str, Any]


def cases_with(*keys: str) -> list[Case]:
    """Return the cases that have all of these keys, by name."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((TESTS / "cases").glob("*.json"))]
    return [case for case in found if all(key in case for key in keys)]
