"""Keeps the first answer of each policy version, and whether and when its server last answered the same."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..core.json_text import dumps, loads
from .database import Database

PROBE_FIRST = """
INSERT INTO probes (version, model, answer, at) VALUES (:version, :model, :answer, :at)
ON CONFLICT (version) DO UPDATE SET model = excluded.model, answer = excluded.answer, at = excluded.at, problem = NULL
WHERE probes.model <> excluded.model
"""
PROBE_PROBLEM = "UPDATE probes SET problem = :problem, at = :at WHERE version = :version"


@dataclass(frozen=True, slots=True)
class Probed:
    """The first answer of a version: the name that it was served under, and `proxy/gateway/probe.py`'s positions.

    `at`: when its newest answer was compared (Unix time).
    """

    model: str
    answer: list[Any]
    problem: str | None
    at: float


class Probes:
    """The table of first answers, one a version."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def of(self, version: int) -> Probed | None:
        """Return the version's first answer; None if it was never probed."""
        row = await self._db.one("SELECT * FROM probes WHERE version = :version", {"version": version})
        return None if row is None else Probed(row["model"], loads(row["answer"]), row["problem"], row["at"])

    async def problem(self, version: int) -> str | None:
        """Return why its server does not seem to serve this version; None if it does, or that is not known."""
        probed = await self.of(version)
        return None if probed is None else probed.problem

    async def first(self, version: int, model: str, answer: list[Any]) -> None:
        """Keep the version's first answer under this name. One that is known stays."""
        row = {"version": version, "model": model, "answer": dumps(answer), "at": time.time()}
        await self._db.commit([(PROBE_FIRST, [row])])

    async def found(self, version: int, problem: str | None) -> None:
        """Keep the time and the result of the newest comparison."""
        await self._db.commit([(PROBE_PROBLEM, [{"version": version, "problem": problem, "at": time.time()}])])
