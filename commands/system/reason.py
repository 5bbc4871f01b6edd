"""Finds one line in the log of a program: why it died, or the newest one."""

from __future__ import annotations

import re
from pathlib import Path

LONGEST = 400
NEWEST_BYTES = 4096
# An exception's last line, behind the prefix of vLLM's processes too; what our own commands end with; a killed worker.
_TELLING = re.compile(r"(?:^|\] )((?:[\w.]*(?:Error|Exception)\b|Worker \S+ \S+ died .*: -|lightning-proxy: ).*)", re.M)
_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:[A-Z]+ \S+ \S+ \[\S+\])?")  # vLLM's: process, level, time, place in its code
_TRAINER = re.compile(r"\S+ [\d:,]+ (INFO|WARNING|ERROR) \S+: (.*)")  # date, time, level, module, message
_ELSEWHERE = ("root cause", "Executor failed")  # vLLM's exceptions that only follow from an earlier one


def reason(log: Path, begin: int = 0) -> str:
    """Return the last line that tells why, from byte `begin` on; without one, the last line that is not empty."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    told = [line for line in _TELLING.findall(text) if not any(word in line for word in _ELSEWHERE)]
    lines = told or [line for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    return lines[-1].strip().removeprefix("lightning-proxy: ").rstrip(".")[:LONGEST]


def last_line(log: Path) -> str:
    """Return the newest line that is not empty, without the prefix of vLLM's processes; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - NEWEST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:  # it is being started
        return ""
    lines = (_PREFIX.sub("", line).strip() for line in reversed(text.splitlines()))
    return next(filter(None, lines), "")[:LONGEST]


def newest_of_trainer(log: Path) -> tuple[str, bool]:
    """Return the newest message in a trainer's log without its time, and whether it is a warning or an error."""
    line = last_line(log)
    found = _TRAINER.fullmatch(line)
    return (found[2], found[1] != "INFO") if found else (line, False)
