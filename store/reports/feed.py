"""The log of what happens in the store, in the order of commits. Triggers write it (0008; of groups, 0020)."""

from __future__ import annotations

from ..database import Database, Sql

BOUNDS = "SELECT (SELECT MIN(n) FROM feed) AS oldest, (SELECT MAX(n) FROM feed) AS newest"
NEWEST = Sql("SELECT MAX(n) AS newest FROM feed", postgres="SELECT feed_newest() AS newest")


class Feed:
    """The newest 10,000 events."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def newest(self) -> int:
        """Return the number of the last event; 0 if there is none."""
        row = await self.database.quick(NEWEST)
        return (row and row["newest"]) or 0

    async def knows(self, cursor: int) -> bool:
        """Return whether all events after `cursor` are still here."""
        row = await self.database.one(BOUNDS)
        oldest, newest = (row["oldest"], row["newest"]) if row and row["newest"] else (1, 0)
        return bool(oldest - 1 <= cursor <= newest)
