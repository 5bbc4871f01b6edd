"""Adds the best version to `status` and `policy list`, and the newest evaluation to `status`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...commands.formats import plain

if TYPE_CHECKING:
    from rich.text import Text


def status_rows(status: dict[str, Any]) -> Iterator[tuple[str, Text | str]]:
    policy = status["policy"]
    if best := policy["best"]:
        yield "best", best["story"]
    if found := policy["evaluation"]:
        yield "evaluation", _evaluation(found)


def below_versions(policy: dict[str, Any], versions: list[dict[str, Any]]) -> Iterator[Text]:
    if best := policy["best"]:
        yield plain(f"\nthe best is {best['story']}")


def _evaluation(found: dict[str, Any]) -> Text:
    version = f"version {found['version']}"
    if found["ended_at"] is None:
        return plain(f"{version} is under way")
    if found["error"]:
        return plain(f"{version} failed: {found['error']}", "yellow")
    between = "" if found["low"] is None else f" ({found['low']:.3f} to {found['high']:.3f})"
    text = f"{version}: {found['reward']:.3f}{between}"
    if found["difference_low"] is not None:
        between = f"{found['difference_low']:+.3f} to {found['difference_high']:+.3f}"
        text += f", {found['difference']:+.3f} from the first one ({between})"
    return plain(text)
