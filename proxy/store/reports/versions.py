"""The policy versions beside each other: which came from which, and what each earned on which task."""

from __future__ import annotations

from ..database import Database

PARENTS = """
SELECT policy_versions.version, steps.base FROM policy_versions JOIN steps ON steps.step = policy_versions.step
"""


class VersionReport:
    """Reads what is known of versions beyond their own records."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def parents(self) -> dict[int, int]:
        """Return, by version, the version that its training step started from; the base model has none."""
        return {row["version"]: row["base"] for row in await self._db.all(PARENTS)}
