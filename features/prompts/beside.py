"""Keeps versions of prompts that rollouts are opened with, and shows what was put into a rollout's calls."""

from __future__ import annotations

from collections.abc import Sequence

from ...proxy.api.beside import Beside, Fields
from ...proxy.api.bodies import RolloutsBody
from ...proxy.api.views import record_view
from .fields import RolloutsWithPrompts
from .table import PromptTable


class PromptsBeside(Beside):
    """The prompts of rollouts."""

    async def check(self, body: RolloutsBody) -> None:
        assert isinstance(body, RolloutsWithPrompts)
        await PromptTable(self.store.database).check(body.prompts)

    async def opened(self, rollout_ids: Sequence[str], body: RolloutsBody) -> None:
        assert isinstance(body, RolloutsWithPrompts)
        await PromptTable(self.store.database).pin(rollout_ids, body.prompts)

    async def of_rollout(self, rollout_id: str) -> Fields:
        placed = await PromptTable(self.store.database).placed_in(rollout_id)
        return {"prompts": [*map(record_view, placed)]}
