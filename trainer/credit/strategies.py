"""Assigns credit: turns the rewards of a group's rollouts into a return and an advantage for each call. Pure.

A strategy is one function. It takes a group (rollouts that are compared with each other) and returns one list per
rollout, with one `Credited` per call. An advantage of 0.0 teaches nothing, and so does a group of zeros. Where
`trainer.agents` names agents, the calls of an agent are compared with calls of the same agent only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from statistics import fmean, pvariance, stdev
from types import MappingProxyType
from typing import NamedTuple

from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ...core.records import ModelCall
from ...core.returns import Rules
from ..functions import faults, load
from ..types import RolloutRewards, Sibling, Sifted
from .agents import TrainedAgents

# The parts of a request that the model is shown, for calls without token ids.
SHOWN = ("system", "instructions", "messages", "prompt", "input", "tools")
CREDIT = "trainer.credit"
JUDGE = "judge"  # the name of a judge's rewards
STD_EPSILON = 1e-4
# Baselines that compare all rollouts of a step, not only those of one task.
ACROSS_TASKS = frozenset({"reinforce_pp"})

Values = list[list[float]]


class Credited(NamedTuple):
    """What a call is credited with: the return that its strategy compares, and the advantage made of it."""

    returned: float
    advantage: float


Credit = list[list[Credited]]
Strategy = Callable[[Sequence[Sibling], TrainerConfig], Credit]


def group_credit(group: Sequence[Sibling], config: TrainerConfig) -> list[list[Credited | None]]:
    """Return the credit of each call, and None for calls that are left out, and of agents that are not trained.

    By default: `uniform`, all agents as one: the rollout's return, compared with its siblings' by `grpo`.
    An agent that `trainer.agents` names is compared with itself only. Rollouts in which it decided nothing say nothing
    about it, and one baseline for agents of unlike returns makes training unstable (Dr. MAS, arXiv 2602.08847).
    """
    agents = TrainedAgents(config.agents)
    found: list[list[Credited | None]] = [[None] * len(sibling.calls) for sibling in group]
    for role in sorted({role for s in group for call in s.calls if (role := agents.role(call.agent))}):
        own = [[j for j, call in enumerate(s.calls) if agents.role(call.agent) == role] for s in group]
        for i, values in enumerate(_of_agent(group, own, config, alone=bool(agents.named))):
            for j, value in zip(own[i], values, strict=True):
                found[i][j] = _sifted(value, j, group[i].sifted)
    return found


def _sifted(one: Credited, place: int, sifted: Sifted) -> Credited | None:
    if place in sifted.negative:
        return one._replace(advantage=-abs(one.advantage))
    return None if place in sifted.left_out else one


def _of_agent(group: Sequence[Sibling], own: Sequence[Sequence[int]], config: TrainerConfig, *, alone: bool) -> Credit:
    """The credit of an agent's calls, which are at positions `own` of each sibling.

    With `alone`, only siblings in which the agent decided something are compared.
    """
    there = [i for i, s in enumerate(group) if not alone or any(s.calls[j].is_decision for j in own[i])]
    shown = [own[i] if config.agent_credit == "own" else range(len(group[i].calls)) for i in there]
    credited = _by_strategy([group[i].only(places) for i, places in zip(there, shown, strict=True)], config)
    found = [[Credited(0.0, 0.0)] * len(places) for places in own]
    for i, places, values in zip(there, shown, credited, strict=True):
        found[i] = [values[places.index(j)] for j in own[i]]
    return found


def _by_strategy(group: Sequence[Sibling], config: TrainerConfig) -> Credit:
    """Apply `trainer.credit`: one strategy for all calls, or one for each agent's (`*`: for agents not named)."""
    if isinstance(config.credit, str):
        return _strategy(config.credit)(group, config)
    found = {name: _strategy(name)(group, config) for name in {*config.credit.values(), "uniform"}}
    return [
        [found[strategy_of(call.agent, config.credit)][i][j] for j, call in enumerate(sibling.calls)]
        for i, sibling in enumerate(group)
    ]


def strategy_of(agent: str | None, credit: str | Mapping[str, str]) -> str:
    """Return the strategy that `trainer.credit` has for an agent's calls."""
    if isinstance(credit, str):
        return credit
    return credit.get(agent or "*", credit.get("*", "uniform"))


def _strategy(name: str) -> Strategy:
    """A strategy by name. Other values are a user's own."""
    return STRATEGIES.get(name) or partial(by_own_function, name)


def uniform(group: Sequence[Sibling], config: TrainerConfig) -> Credit:
    """Give every call the advantage of its rollout's return (Agent Lightning, arXiv 2508.03680, section 3.3)."""
    returns = [sibling.rewards.total for sibling in group]
    return _credited(_of_rollouts(group, returns), _of_rollouts(group, compared(config.baseline, returns)))


def discounted(group: Sequence[Sibling], config: TrainerConfig) -> Credit:
    """Compare the rewards from each call on with those of the siblings at the same step.

    The k-th decision of an agent is compared with the siblings' k-th decisions of that agent. Such a baseline depends
    on time and not on any action, so it leaves the gradient's expectation as it is, and its variance is lower than with
    one baseline for the entire rollout (Greensmith, Bartlett & Baxter 2004; Peters & Schaal 2008, section 3.1). A
    rollout that outlasts its siblings keeps the baseline of the last step that it shared.
    """
    returns = [discounted_returns(sibling.calls, sibling.rewards, config.discount) for sibling in group]
    found = [[0.0] * len(sibling.calls) for sibling in group]
    for agent in {call.agent for sibling in group for call in sibling.calls}:
        steps = [[i for i, c in enumerate(s.calls) if c.is_decision and c.agent == agent] for s in group]
        of_steps = [[values[i] for i in own] for values, own in zip(returns, steps, strict=True)]
        for advantages, own, values in zip(found, steps, _step_advantages(config.baseline, of_steps), strict=True):
            for i, value in zip(own, values, strict=True):
                advantages[i] = value
    return _credited(returns, found)


def anchor(group: Sequence[Sibling], config: TrainerConfig) -> Credit:
    """Compute A(rollout) + anchor_weight x A(step): GiGPO (arXiv 2505.10978), equations 3 to 8.

    A(rollout) compares the sums of all rewards, those of the calls and the rollout's own. A(step) compares the
    discounted returns of an agent's calls that had the same state (prompt), anywhere in the group. It is 0 for a state
    that only one call had.
    """
    returns = [discounted_returns(sibling.calls, sibling.rewards, config.discount) for sibling in group]
    same: dict[Hashable, list[tuple[int, int]]] = {}
    for i, sibling in enumerate(group):
        for j, call in enumerate(sibling.calls):
            if call.is_decision:
                same.setdefault((call.agent, state_of(call)), []).append((i, j))
    found = _of_rollouts(group, compared(config.baseline, [sibling.rewards.sum for sibling in group]))
    for places in same.values():
        values = compared(config.baseline, [returns[i][j] for i, j in places])
        for (i, j), value in zip(places, values, strict=True):
            found[i][j] += config.anchor_weight * value
    return _credited(returns, found)


def by_own_function(name: str, group: Sequence[Sibling], config: TrainerConfig) -> Credit:
    """Give the advantages of a user's own function. The return that it compares is not known: the rollout's stands."""
    return _credited(_of_rollouts(group, [s.rewards.total for s in group]), own_credit(name, group, config))


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    # A judge's scores are rewards of calls, and are treated like any other.
    {"uniform": uniform, "discounted": discounted, "anchor": anchor, "judge": discounted}
)


def discounted_returns(calls: Sequence[ModelCall], rewards: RolloutRewards, discount: float) -> list[float]:
    """Compute R_t = r_t + discount x R_{t+1} for each call. The last call's reward includes the rollout's own.

    Calls that have no answer, were sent again, or are left out as rejected are not discounted.
    """
    ahead, factor = rewards.final or 0.0, 1.0
    returns: list[float] = []
    for call in reversed(calls):
        ahead = rewards.of_call(call.call_id) + (factor * ahead if call.is_decision else ahead)
        factor = discount if call.is_decision else factor
        returns.append(ahead)
    return returns[::-1]


def state_of(call: ModelCall) -> Hashable:
    """Return the model's input: the prompt's token ids, or else the request's messages and tools."""
    shown = {key: call.request[key] for key in SHOWN if key in call.request}
    return call.prompt_token_ids or json.dumps(shown, sort_keys=True)


def _of_rollouts(group: Sequence[Sibling], values: Sequence[float]) -> Values:
    """Give every call of a rollout the value of that rollout."""
    return [[value] * len(sibling.calls) for sibling, value in zip(group, values, strict=True)]


def _credited(returns: Values, advantages: Values) -> Credit:
    return [[Credited(*both) for both in zip(*of, strict=True)] for of in zip(returns, advantages, strict=True)]


def _step_advantages(name: str, returns: Sequence[Sequence[float]]) -> Values:
    """The advantage of each sibling's return at each step, compared with its siblings at the same step."""
    baselines: dict[int, Baseline] = {}
    found: Values = [[] for _ in returns]
    for step in range(max(map(len, returns), default=0)):
        there = [i for i, own in enumerate(returns) if step < len(own)]
        if len(there) > 1:
            by_sibling = group_baselines(name, [returns[i][step] for i in there])
            baselines = dict(zip(there, by_sibling, strict=True)) if by_sibling else {}
        for i in there:
            found[i].append(baselines[i].advantage(returns[i][step]) if i in baselines else 0.0)
    return found


def own_credit(name: str, group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Return the function's advantages: one per call, one list per sibling. Raise ConfigError otherwise."""
    function = load(CREDIT, name)
    with faults(CREDIT, name):
        found = function(group, config)
    if not isinstance(found, Sequence) or len(found) != len(group):
        raise ConfigError(
            f"{CREDIT} {name}: one list for each of the {len(group)} rollouts is needed, got {found!r:.100}"
        )
    return [_checked(name, values, sibling) for values, sibling in zip(found, group, strict=True)]


def _checked(name: str, values: object, sibling: Sibling) -> list[float]:
    calls = len(sibling.calls)
    if not isinstance(values, Sequence) or len(values) != calls:
        raise ConfigError(f"{CREDIT} {name}: a rollout of {calls} calls needs as many numbers, got {values!r:.100}")
    for value in values:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(f"{CREDIT} {name}: {value!r:.100} is no finite number")
    return [float(value) for value in values]


def training_rules(config: TrainerConfig) -> Rules:
    """Return how rewards count in training. A judge's scores count beside the return that is shown."""
    return Rules.of(config)._replace(weights=config.training_weights)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline for the returns of one rollout's calls: advantage = (return - shift) / scale."""

    shift: float
    scale: float = 1.0

    def advantage(self, call_return: float) -> float:
        return (call_return - self.shift) / self.scale


def grpo(returns: Sequence[float]) -> list[Baseline]:
    """Compute (r - mean) / (std + 1e-4) with the sample standard deviation, as TRL (DeepSeekMath, arXiv 2402.03300)."""
    return [Baseline(fmean(returns), stdev(returns) + STD_EPSILON)] * len(returns)


def dr_grpo(returns: Sequence[float]) -> list[Baseline]:
    """Compute r - mean. GRPO's division favours very easy and very hard tasks (Dr. GRPO, arXiv 2503.20783)."""
    return [Baseline(fmean(returns))] * len(returns)


def rloo(returns: Sequence[float]) -> list[Baseline]:
    """Compute r - the mean of the other siblings (REINFORCE leave-one-out, arXiv 2402.14740)."""
    total = math.fsum(returns)
    return [Baseline((total - r) / (len(returns) - 1)) for r in returns]


def reinforce_pp(returns: Sequence[float]) -> list[Baseline]:
    """Compute (r - mean) / sqrt(variance + 1e-8) over the entire step, across tasks (REINFORCE++, arXiv 2501.03262).

    The paper takes the variance over tokens; here every rollout counts once, as in the loss.
    """
    return [Baseline(fmean(returns), math.sqrt(pvariance(returns) + 1e-8))] * len(returns)


BASELINES: Mapping[str, Callable[[Sequence[float]], list[Baseline]]] = MappingProxyType(
    {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce_pp": reinforce_pp}
)


def group_baselines(name: str, returns: Sequence[float]) -> list[Baseline] | None:
    """Return one baseline per sibling; None if the group has fewer than two siblings or only equal returns."""
    if len(returns) < 2 or math.isclose(max(returns), min(returns), rel_tol=1e-9, abs_tol=1e-9):
        return None
    found: list[Baseline] = (BASELINES.get(name) or load("trainer.baseline", name))(returns)
    return found


def compared(name: str, returns: Sequence[float]) -> list[float]:
    """Return the advantage of each return among all; zeros where there is nothing to compare."""
    baselines = group_baselines(name, returns)
    if baselines is None:
        return [0.0] * len(returns)
    return [own.advantage(value) for own, value in zip(baselines, returns, strict=True)]
