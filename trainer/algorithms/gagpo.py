"""GAGPO: values of prompts without a critic, and GAE over a rollout's calls (`trainer.credit: gagpo`).

    A_t = δ_t + γλ · A_t+1,   δ_t = r_t + γ · V(s_t+1) - V(s_t)

for each answered call of each of N siblings. V(s) is the mean discounted return R of all their calls of that agent with
the very prompt s, and 0 after the last call; γ is `trainer.discount`, and λ is 0.95. Then all A of the group are
compared by `trainer.baseline`: `grpo`, the default, makes it (A - mean) / (std + 1e-4).
With e_t = R_t - V(s_t), δ_t is e_t - γ · e_t+1. Where only one call had a prompt, its e is 0: if prompts hold the whole
history of a rollout, only first calls learn.

Source: arXiv 2605.13217. Its equations were not at hand: V, δ and A are made after its abstract and others' summaries;
λ is GAE's usual one; "group-wise advantage normalization" is read as GRPO's. Its importance ratio of an entire action
is `importance_level: sequence`.

By hand, γ = 1: prompts a, b with a reward of 1 at the end; a, b with 0; a, c with 0. V(a) = 1/3, V(b) = 1/2, V(c) = 0.
δ is 1/6, 1/2; 1/6, -1/2; -1/3, 0, and A is 1/6 + 0.95/2 = 0.642, 0.5; 1/6 - 0.95/2 = -0.308, -0.5; -0.333, 0. Their
mean is 0 and their standard deviation 0.473, so `grpo` makes it 1.357, 1.057; -0.652, -1.057; -0.705, 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from ...proxy.config.trainer import TrainerConfig
from ..credit.baselines import compared
from ..credit.strategies import discounted_returns, state_of
from ..types import Sibling

LAMBDA = 0.95


def gagpo(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Return an advantage for each call of each sibling; 0 for calls without an answer."""
    returns = [discounted_returns(sibling.calls, sibling.rewards, config.discount) for sibling in group]
    prompts = [{j: (c.agent, state_of(c)) for j, c in enumerate(s.calls) if c.is_decision} for s in group]
    seen = defaultdict(list)
    for of, own in zip(returns, prompts, strict=True):
        for j, prompt in own.items():
            seen[prompt].append(of[j])
    values = {prompt: fmean(of) for prompt, of in seen.items()}
    found = [[0.0] * len(sibling.calls) for sibling in group]
    for advantages, of, own in zip(found, returns, prompts, strict=True):
        error = ahead = 0.0
        for j in reversed(own):
            after, error = error, of[j] - values[own[j]]
            advantages[j] = ahead = error + config.discount * (LAMBDA * ahead - after)
    places = [(i, j) for i, own in enumerate(prompts) for j in own]
    for (i, j), value in zip(places, compared(config.baseline, [found[i][j] for i, j in places]), strict=True):
        found[i][j] = value
    return found
