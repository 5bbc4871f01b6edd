"""Keeps the files of the best version, and of versions that are being evaluated."""

from __future__ import annotations

from ...store.store import Store
from ...trainer.types import BesideSteps
from .evaluations import Evaluations


class BestVersion(BesideSteps):
    """Knows the best version, whoever evaluated it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.evaluations = Evaluations(store)

    async def keep(self) -> set[int]:
        best = await self.evaluations.best()
        return await self.evaluations.under_way() | (set() if best is None else {best.version})
