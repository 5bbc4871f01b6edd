"""GDPO: compares rewards of each name separately before adding them (`trainer.credit: gdpo`).

    A_i = sum over names k of  w_k · (r_ik - mean_k) / (std_k + 1e-4)

mean_k and std_k are over the siblings with a reward k; w_k is from `trainer.reward_weights`. The quotient is that of
`trainer.baseline: grpo`, the default. Automatic rewards (`trainer.air`) count as one more name, with weight 1. The
paper then divides by the standard deviation of A over the step. That is one factor for all tokens, which Adam cancels,
so it is left out. Source: arXiv 2601.05242; TRL's `multi_objective_aggregation: normalize_then_sum`.

By hand: right is 1, 1, 0, 0 and style 0, 4, 0, 4, with the weights 1 and 0.5. Their distances from the means are ±0.5
and ±2, their standard deviations 0.577 and 2.309, so both quotients are ±0.866, whatever the range. A is
0.866 - 0.433, 0.866 + 0.433, -0.866 - 0.433, -0.866 + 0.433.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...core.config.trainer import TrainerConfig
from ...trainer.credit.strategies import compared
from ...trainer.types import Sibling


def gdpo(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Return each sibling's advantage, repeated for each of its calls."""
    found = [0.0] * len(group)

    def add(returns: Mapping[int, float], weight: float) -> None:
        for i, advantage in zip(returns, compared(config.baseline, [*returns.values()]), strict=True):
            found[i] += weight * advantage

    for name, weight in config.training_weights.items():
        named = {i: sibling.rewards.named.get(name) for i, sibling in enumerate(group)}
        add({i: of.returned for i, of in named.items() if of and of.returned is not None}, weight)
    add({i: math.fsum(sibling.rewards.air.values()) for i, sibling in enumerate(group)}, 1.0)
    return [[value] * len(sibling.calls) for value, sibling in zip(found, group, strict=True)]
