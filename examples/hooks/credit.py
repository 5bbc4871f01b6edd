"""Credit for the call that mattered: the first one of a rollout that used a tool, or else the last one.

trainer: {credit: "examples/hooks/credit.py:first_tool_call"}
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from lightning_proxy.core.config.trainer import TrainerConfig
from lightning_proxy.trainer.types import Sibling


def first_tool_call(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Compare the siblings' rewards as GRPO does; give the advantage to one call of each."""
    rewards = [sibling.rewards.total for sibling in group]
    mean, spread = fmean(rewards), stdev(rewards) or 1.0
    found = []
    for sibling, reward in zip(group, rewards, strict=True):
        chosen = next((i for i, call in enumerate(sibling.calls) if call.tool_calls), len(sibling.calls) - 1)
        found.append([(reward - mean) / spread if i == chosen else 0.0 for i in range(len(sibling.calls))])
    return found
