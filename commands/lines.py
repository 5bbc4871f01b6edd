"""The log of a running server, as text or JSON: lines for calls, and counts if some calls got no line."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ..core.json_text import dumps_readable
from ..core.records import CallEnd, CallStart
from ..core.values import SAID, message_of_error, named_error
from .formats import count, duration, plain

LogFormat = Literal["text", "json"]

log = logging.getLogger("lightning_proxy.serving")
FLUSH_S = 1.0
MOST = 10  # calls that get a line of their own at once, of each status


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        shown = text if record.exc_info or "\n" in text else plain(text).plain
        return f"{time.strftime(time_format(sys.stderr.isatty()), time.localtime(record.created))} {shown}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        entry = {"time": at, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return dumps_readable(entry | getattr(record, "fields", {}), sys.stderr.encoding or "utf-8")


def time_format(on_terminal: bool) -> str:
    """Return the time format of log lines, which has no date on a terminal."""
    return "%H:%M:%S" if on_terminal else "%Y-%m-%d %H:%M:%S"


class _Once(logging.Filter):
    """Lets only one worker print the lines that every worker logs. If that worker dies, another takes over."""

    def __init__(self, shared: Path) -> None:
        super().__init__()
        self._file = (shared / "first").open("w")

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "once", False):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # again and again, by the first
            except BlockingIOError:
                return False
        return True


def set_up(format: LogFormat, shared: Path | None = None) -> None:
    """Log warnings, and information from three loggers, to stderr. `shared` is a directory that all workers share."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if format == "json" else _Text())
    if shared is not None:
        handler.addFilter(_Once(shared))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in (log.name, "lightning_proxy.audit", "lightning_proxy.proxy.gateway.relay"):
        logging.getLogger(name).setLevel(logging.INFO)


def say(message: str, **fields: Any) -> None:
    log.info("%s", message, extra={"fields": fields})


class CallLines:
    """Logs, once a second, the first few ended calls of each status, and counts of all if some calls got no line.

    Without `each`, only failed calls get a line. `redacted` removes secrets from an upstream's error text.
    """

    def __init__(self, redacted: Callable[[str], str] = str, *, each: bool = True) -> None:
        self._redacted, self._each = redacted, each
        self._waiting: list[tuple[CallStart, CallEnd]] = []
        self._counts: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def call_ended(self, start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
        self._counts[end.status] += 1
        if self._counts[end.status] <= MOST and (self._each or end.status == "error"):
            self._waiting.append((start, end))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        waiting, counts, self._waiting, self._counts, self._timer = self._waiting, self._counts, [], Counter(), None
        for start, end in waiting:
            fields = {"event": "call", "call_id": end.call_id, "rollout_id": end.rollout_id, "status": end.status}
            if start.rollout.key_id:
                fields["key_id"] = start.rollout.key_id
            say(call_line(start, end, self._redacted), **fields)
        if counts.total() > len(waiting):
            by_status = ", ".join(f"{count(n)} {status}" for status, n in counts.items())
            say(f"{count(counts.total())} call{'s' * (counts.total() != 1)}: {by_status}", event="calls", **counts)


def call_line(start: CallStart, end: CallEnd, redacted: Callable[[str], str] = str) -> str:
    facts = [f"{end.status:<9} {start.endpoint}", f"rollout {end.rollout_id}"]
    if start.rollout.task_id:
        facts.append(f"task {start.rollout.task_id}")
    if start.rollout.key_id:
        facts.append(f"key {start.rollout.key_id}")
    of_policy = start.policy_version is not None and not end.fallback
    facts.append(f"version {start.policy_version}" if of_policy else start.model or "")
    if tokens := sum(len(choice.token_ids) for choice in end.choices):
        facts.append(f"{len(end.prompt_token_ids)}+{tokens} tokens")
    facts.append(duration(end.latency_ms / 1000))
    if end.status == "error":
        facts.append(f"HTTP {end.http_status}: {redacted(_reason(end))[:200]}")
    if end.status == "ok" and end.untrainable_reason:
        facts.append(f"not trainable: {end.untrainable_reason}")
    return "  ".join(filter(None, facts))


def _reason(end: CallEnd) -> str:
    """The upstream's reason if it refused the call and gave one, or else the call's error."""
    said = end.response if (end.http_status or 0) >= 400 else None
    if isinstance(said, dict):
        return message_of_error(named_error(said) or said).removeprefix(SAID)
    return said if isinstance(said, str) else end.error or ""
