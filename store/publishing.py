"""How new weights are published: decided once, kept for every process that works on the store."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..core.config.server import StoreConfig
from ..core.records import PublishMode
from .database import Database, read
from .opening import first_value

DECIDED = "SELECT mode, decided_by, at FROM publishing WHERE n = 1"
NEWEST_CHECKPOINT = """
SELECT checkpoint FROM steps WHERE checkpoint IS NOT NULL
    AND EXISTS (SELECT 1 FROM policy_versions WHERE publish IS NOT NULL) ORDER BY step DESC LIMIT 1
"""
DECIDE = """
INSERT INTO publishing (n, mode, decided_by, at) VALUES (1, :mode, :by, :at)
ON CONFLICT (n) DO UPDATE SET mode = excluded.mode, decided_by = excluded.decided_by, at = excluded.at
WHERE :asked AND publishing.mode <> excluded.mode
"""


@dataclass(frozen=True, slots=True)
class Decided:
    """The mode of publishing, and the process that decided it at this Unix time: the trainer or a proxy."""

    mode: PublishMode
    decided_by: str
    at: float


class Publishing:
    """The table of one row that says how new weights are published."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def decided(self) -> Decided | None:
        """Return the decided mode; None before there is one."""
        row = await self._db.one(DECIDED)
        return None if row is None else read(Decided, row)

    async def decide(self, mode: PublishMode, by: str, *, configured: bool) -> None:
        """Keep this mode if there is none yet, or if it is `configured`; otherwise the decided mode stays."""
        await self._db.commit([(DECIDE, [{"mode": mode, "by": by, "asked": configured, "at": time.time()}])])


def kept_mode(config: StoreConfig) -> PublishMode | None:
    """Return the mode that the store has, at once and without making one; None where nothing is decided."""
    mode: PublishMode | None = first_value(config, DECIDED)
    return mode


def newest_checkpoint(config: StoreConfig) -> str | None:
    """Return the directory of the newest checkpoint, read likewise; None where nothing was published."""
    checkpoint: str | None = first_value(config, NEWEST_CHECKPOINT)
    return checkpoint
