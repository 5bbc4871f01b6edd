"""GAGPO for credit.py, as a function of a user's own: values of states without a critic.

    A_t = (δ_t + γλ · A_t+1) / std,   δ_t = r_t + γ · V(s_t+1) - V(s_t)

V(s) is the mean discounted return of the group's calls with the very prompt s, and std is that of all of the group's
A_t. Made after the abstract of arXiv 2605.13217; its importance ratio of an entire answer is `importance_level:
sequence`, which is the same here, where an answer is one token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from lightning_proxy.proxy.config.trainer import TrainerConfig
from lightning_proxy.trainer.credit.strategies import discounted_returns, state_of
from lightning_proxy.trainer.types import Sibling

LAMBDA = 0.95


def gagpo(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Return the advantage of each call of each sibling."""
    returns = [discounted_returns(sibling.calls, sibling.rewards, config.discount) for sibling in group]
    seen = defaultdict(list)
    for sibling, own in zip(group, returns, strict=True):
        for call, value in zip(sibling.calls, own, strict=True):
            seen[state_of(call)].append(value)
    found = []
    for sibling, own in zip(group, returns, strict=True):
        values = [*(fmean(seen[state_of(call)]) for call in sibling.calls), 0.0]
        rewards = [now - config.discount * later for now, later in zip(own, [*own[1:], 0.0], strict=True)]
        advantages = [0.0]
        for i in reversed(range(len(own))):
            delta = rewards[i] + config.discount * values[i + 1] - values[i]
            advantages.insert(0, delta + config.discount * LAMBDA * advantages[0])
        found.append(advantages[:-1])
    spread = pstdev(value for own in found for value in own) + 1e-4
    return [[value / spread for value in own] for own in found]
