"""The further metrics of a step: name, unit and meaning, by group."""

from __future__ import annotations

GROUPS = {
    "samples": (
        ("calls_rejected", "count", "calls whose answer was not used, and another attempt's was (`contexts.rejected`)"),
        ("calls_summaries", "count", "calls whose answer replaced history in a later prompt (`contexts.summaries`)"),
    ),
}
COUNTS = tuple(name for name, _, _ in GROUPS["samples"])
