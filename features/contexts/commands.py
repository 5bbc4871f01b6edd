"""Adds to `status` where the contexts of calls come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...commands.formats import count


def status_rows(status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the edges by kind, if there is more to them than conversations."""
    contexts = Counter(status["contexts"])
    if contexts.keys() - {"new", "continues"}:
        yield "contexts", ", ".join(f"{count(n)} {name}" for name, n in contexts.most_common())
