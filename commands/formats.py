"""Formats numbers, times, texts and tables for people at a terminal, and JSON for programs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.json_text import dumps_readable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text


def print_json(value: Any) -> None:
    """Print any value as JSON on one line, using only characters that the terminal supports."""
    print(dumps_readable(value, sys.stdout.encoding or "utf-8"), flush=True)


def print_view(*views: RenderableType, soft_wrap: bool = False) -> None:
    from rich.console import Console

    Console(highlight=False).print(*views, sep="\n", soft_wrap=soft_wrap)


def progress_bar() -> Progress:
    """Return a progress bar on stderr. It is shown only on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, disable=not console.is_terminal)


def table(*left: str, right: Sequence[str] = (), rows: Iterable[Sequence[Any]] = (), **options: Any) -> Table:
    """Return a table without rules: text columns, then right-aligned number columns."""
    from rich.table import Table

    made = Table(**{"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), **options})
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*(cell if hasattr(cell, "append") else plain("-" if cell is None else cell) for cell in row))
    return made


def facts(rows: Iterable[tuple[str, Text | str]]) -> Table:
    """Return a two-column table of names and values; a value may take several lines."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))  # fits 80 columns
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, plain(value) if isinstance(value, str) else value)
    return made


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with a few significant digits, and None as `-`."""
    return "-" if value is None else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def size(bytes_: float) -> str:
    """Return a number of bytes in the unit that fits: 512 B, 3.1 MiB, 2.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if bytes_ < 1024:
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1024
    return f"{bytes_:,.1f} GiB"


def duration(seconds: float) -> str:
    """Return a time span in the unit that fits: 0.4s, 12s, 3m, 5h, 2d."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def how_it_ended(code: int | None) -> str:
    """Say how a process ended, by its exit code. A negative code is the signal that killed it."""
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name if -code in {*signal.Signals} else -code}"


def plain(value: object, style: str = "") -> Text:
    """Return a text that shows markup as it is, with unprintable characters except newlines and tabs escaped."""
    from rich.text import Text

    shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in str(value))
    return Text(shown, style=style)


def cut(text: str, limit: int) -> str:
    """Shorten a text of more than `limit` characters to its beginning and end, and say how much is left out."""
    if len(text) <= limit:
        return text
    head, tail = limit * 3 // 4, limit // 4
    return f"{text[:head]} … [{len(text) - head - tail:,} characters left out; a pipe gets them] … {text[-tail:]}"


def address(host: str, port: int) -> str:
    """Return `host:port` as a URL needs it. A wildcard address is replaced by the loopback address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
