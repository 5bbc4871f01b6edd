"""The credit of a group as numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_proxy.trainer.credit.strategies import group_credit
from lightning_proxy.trainer.types import Sibling
from support.sections import TrainerConfig


def group_advantages(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float | None]]:
    return [[one and one.advantage for one in own] for own in group_credit(group, config)]


def group_returns(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float | None]]:
    return [[one and one.returned for one in own] for own in group_credit(group, config)]
