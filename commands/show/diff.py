"""Compares two rollouts: their numbers side by side, then what their conversations do not share."""

from __future__ import annotations

from difflib import unified_diff
from io import StringIO
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..formats import number, plain
from .rollout_view import rollout_detail

WIDE = 10_000
STYLES = {"+": "green", "-": "red", "@": "cyan"}
CONTEXT = 2


def rollout_diff(a: dict[str, Any], b: dict[str, Any]) -> RenderableType:
    """Return a table of both rollouts' numbers, and the lines of their conversations that differ."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    for name in ("A", "B"):
        table.add_column(name, overflow="fold")
    for (fact, first), (_, second) in zip(_facts(a), _facts(b), strict=True):
        style = "" if first == second else "yellow"
        table.add_row(fact, plain(first, style), plain(second, style))
    changes = list(unified_diff(_lines(a), _lines(b), "A", "B", lineterm="", n=CONTEXT))[2:]
    lines = [plain(line, STYLES.get(line[0], "")) for line in changes]
    return Group(table, Text(""), *(lines or [Text("the conversations are the same", "dim")]))


def _facts(rollout: dict[str, Any]) -> list[tuple[str, str]]:
    versions = sorted({version for call in rollout["calls"] for version in call["policy_versions"]})
    named = {reward["name"]: f"{reward['name']} {number(reward['reward'])}" for reward in rollout["rewards"]}
    return [
        ("rollout", rollout["rollout_id"]),
        ("task", rollout["task_id"] or "-"),
        ("mode", rollout["mode"]),
        ("status", " · ".join(filter(None, (rollout["status"], rollout["reason"])))),
        ("reward", number(rollout["reward"])),
        ("rewards", ", ".join(named.values()) or "-"),
        ("version", ", ".join(map(str, versions)) or "-"),
        ("calls", str(len(rollout["calls"]))),
        ("tokens", str(rollout["tokens"])),
    ]


def _lines(rollout: dict[str, Any]) -> list[str]:
    """The conversation as `rollouts show` writes it, without the numbers of its calls, which always differ."""
    bare = rollout | {"calls": [call | {"latency_ms": None} for call in rollout["calls"]]}
    console = Console(width=WIDE, file=StringIO(), record=True, highlight=False, color_system=None)
    console.print(rollout_detail(bare, full=True), soft_wrap=False)
    written = [line.rstrip() for line in console.export_text(styles=False).split("\n")]
    start = next((i for i, line in enumerate(written) if line.startswith("──")), len(written))
    return written[start:]
