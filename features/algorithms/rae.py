"""RAE: compares a rollout with a running mean of earlier ones, one mean per agent or seat (`trainer.credit: rae`).

    A_ip = R_ip - b_ip,   b_ip = sum over earlier rollouts j of d^n_j · R_jp, divided by the sum of d^n_j

R_ip is the return of agent p's calls in rollout i: the rollout's own reward, or else the sum of those calls'
rewards, plus the calls' automatic rewards. d is 0.95, and n_j counts the rollouts of p between j and i. RAE is for
games, where no two rollouts are siblings. The group is a step (`trainer.compare: step`), or a rollout and up to 32
earlier ones (`trainer.lone_rollouts: running`). A rollout's own return is not in its baseline, so the gradient is
unbiased. SPIRAL's mean starts at 0 and never resets; here it restarts with each group, where an agent's first rollout
teaches nothing. Source: SPIRAL, arXiv 2506.24119, section on role-conditioned advantage estimation; train_spiral.py.

By hand: a seat's returns are 1, -1, 1. A is 0, then -1 - 1 = -2, then 1 - (0.95 · 1 - 1) / (0.95 + 1) = 1.0256.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.config.trainer import TrainerConfig
from ...trainer.types import Sibling

DECAY = 0.95


def rae(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Return an advantage for each call of each rollout: that of the call's agent in the rollout."""
    found = [[0.0] * len(sibling.calls) for sibling in group]
    in_order = sorted((i for i, s in enumerate(group) if s.calls), key=lambda i: group[i].calls[0].started_at)
    for agent in {call.agent for sibling in group for call in sibling.calls}:
        total = weight = 0.0
        for i in in_order:
            own = [j for j, call in enumerate(group[i].calls) if call.agent == agent]
            if not any(group[i].calls[j].is_decision for j in own):
                continue
            returned = group[i].only(own).rewards.total
            for j in own:
                found[i][j] = returned - total / weight if weight else 0.0
            total, weight = DECAY * total + returned, DECAY * weight + 1.0
    return found
