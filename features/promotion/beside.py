"""Shows the tests of policy versions beside these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from ...proxy.api.beside import Beside, Fields
from .config import PromotionConfig
from .promotions import Promotions


class PromotionBeside(Beside):
    """The tests of policy versions."""

    async def of_policy(self) -> Fields:
        tests = Promotions(self.store.database)
        under_way, waiting = await tests.under_way(), await tests.waiting()
        return {
            "promotion": self.config.section(PromotionConfig).mode,
            "test": None if under_way is None else asdict(under_way),
            "waiting": None if waiting is None else waiting.version,
        }

    async def of_versions(self) -> Callable[[int], Fields]:
        tests = await Promotions(self.store.database).last()
        return lambda version: {"promotion": tests.get(version)}
