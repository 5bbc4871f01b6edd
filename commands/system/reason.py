"""Finds in the log of a program that died why it did, as one line."""

from __future__ import annotations

import re
from pathlib import Path

LONGEST = 400
# An exception's last line, behind the prefix of vLLM's processes too; what our own commands end with; a killed worker.
_TELLING = re.compile(r"(?:^|\] )((?:[\w.]*(?:Error|Exception)\b|Worker proc \S+ died|lightning-proxy: ).*)", re.M)
_ELSEWHERE = ("root cause", "Executor failed")  # vLLM's exceptions that only follow from an earlier one


def reason(log: Path, begin: int = 0) -> str:
    """Return the last line that tells why, from byte `begin` on; without one, the last line that is not empty."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    told = [line for line in _TELLING.findall(text) if not any(word in line for word in _ELSEWHERE)]
    lines = told or [line for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    return lines[-1].strip().removeprefix("lightning-proxy: ").rstrip(".")[:LONGEST]
