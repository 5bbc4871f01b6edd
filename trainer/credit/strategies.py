"""Assigns credit: turns the rewards of a group's rollouts into a return and an advantage for each call.

A strategy is one function. It takes a group (rollouts that are compared with each other) and returns one list per
rollout, with the advantage of each call. An advantage of 0.0 teaches nothing. Where `trainer.agents` names
agents, the calls of an agent are compared with calls of the same agent only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from statistics import fmean, pvariance, stdev
from types import MappingProxyType
from typing import NamedTuple

from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ...core.records import ModelCall
from ...core.returns import Rules
from ..functions import faults, load
from ..types import RolloutRewards, Sibling
from .agents import TrainedAgents

# The parts of a request that the model is shown, for calls without token ids.
SHOWN = ("system", "instructions", "messages", "prompt", "input", "tools")
CREDIT = "trainer.credit"
JUDGE = "judge"  # the name of a judge's rewards
STD_EPSILON = 1e-4

Values = list[list[float]]


class Credited(NamedTuple):
    """What a call is credited with: the return that its strategy compares, and the advantage computed from it."""

    returned: float
    advantage: float


Strategy = Callable[[Sequence[Sibling], TrainerConfig], Values]


def group_credit(group: Sequence[Sibling], config: TrainerConfig) -> list[list[Credited | None]]:
    """Return the credit of each call; None for calls that are left out or made by agents that are not trained.

    By default, all agents count as one, and `grpo` compares the rollout's return with its siblings' (`uniform`).
    An agent that `trainer.agents` names is compared with itself only, in rollouts in which it made a decision: one
    baseline for agents with different returns makes training unstable (Dr. MAS, arXiv 2602.08847).
    """
    agents = TrainedAgents(config.agents)
    roles = [[agents.role(call.agent) for call in sibling.calls] for sibling in group]
    found: list[list[Credited | None]] = [
        [None if role is None or j in sibling.sifted.left_out else Credited(0.0, 0.0) for j, role in enumerate(own)]
        for sibling, own in zip(group, roles, strict=True)
    ]
    for agent in sorted({role for own in roles for role in own if role}):
        parts: list[tuple[int, list[int]]] = []  # siblings that are compared, with the calls that the strategy sees
        for i, (sibling, own) in enumerate(zip(group, roles, strict=True)):
            decided = any(call.is_decision and role == agent for call, role in zip(sibling.calls, own, strict=True))
            if decided or not agents.named:
                parts.append((i, [j for j, role in enumerate(own) if role == agent or config.agent_credit == "team"]))
        credited = _by_strategy([group[i].only(places) for i, places in parts], config)
        for (i, places), values in zip(parts, credited, strict=True):
            for j, value in zip(places, values, strict=True):
                if roles[i][j] == agent and found[i][j] is not None:
                    pushed = value._replace(advantage=-abs(value.advantage))
                    found[i][j] = pushed if j in group[i].sifted.negative else value
    return found


def _by_strategy(group: Sequence[Sibling], config: TrainerConfig) -> list[list[Credited]]:
    """Apply `trainer.credit`: one strategy for all calls, or one per agent (`*`: agents not named).

    For a function of a user or a feature, which may compare anything, the rollout's return is reported.
    """
    advantages: dict[str, Values] = {}
    for name in {*config.credits.values(), "uniform"}:
        advantages[name] = STRATEGIES[name](group, config) if name in STRATEGIES else own_credit(name, group, config)
    found: list[list[Credited]] = []
    for i, sibling in enumerate(group):
        by_call = discounted_returns(sibling.calls, sibling.rewards, config.discount)
        names = [strategy_of(call.agent, config.credit) for call in sibling.calls]
        returns = [by_call[j] if name in OF_CALLS else sibling.rewards.total for j, name in enumerate(names)]
        found.append([Credited(returns[j], advantages[name][i][j]) for j, name in enumerate(names)])
    return found


def strategy_of(agent: str | None, credit: str | Mapping[str, str]) -> str:
    """Return the strategy that `trainer.credit` has for an agent's calls."""
    if isinstance(credit, str):
        return credit
    return credit.get(agent or "*", credit.get("*", "uniform"))


def uniform(group: Sequence[Sibling], config: TrainerConfig) -> Values:
    """Give every call the advantage of its rollout's return (Agent Lightning, arXiv 2508.03680, section 3.3).

    A(call) = A(rollout): all calls share equally in the result. With `dr_grpo`, returns 1 and 0 give 0.5 and -0.5.
    """
    return _of_rollouts(group, compared(config.baseline, [sibling.rewards.total for sibling in group]))


def discounted(group: Sequence[Sibling], config: TrainerConfig) -> Values:
    """Compare R_k, the discounted sum of the rewards from call k on, with the siblings' R_k.

    Example: two rollouts have calls with rewards 1, 0 and 0, 0; their returns are 1, 0 and 0, 0. With `dr_grpo` the
    first calls get 0.5 and -0.5, the second ones 0. A call gets no credit for earlier rewards.

    The k-th decision of an agent is compared with the siblings' k-th decisions of that agent. Such a baseline depends
    on time and not on any action, so it does not change the expected gradient, and the variance is lower than with one
    baseline for the entire rollout (Greensmith, Bartlett & Baxter 2004; Peters & Schaal 2008, section 3.1). A rollout
    that outlasts its siblings keeps the baseline of the last step that it shared.
    """
    returns = [discounted_returns(sibling.calls, sibling.rewards, config.discount) for sibling in group]
    found = [[0.0] * len(sibling.calls) for sibling in group]
    for agent in {call.agent for sibling in group for call in sibling.calls}:
        decisions = [[j for j, c in enumerate(s.calls) if c.is_decision and c.agent == agent] for s in group]
        baselines: dict[int, Baseline] = {}
        for step in range(max(map(len, decisions))):
            there = {i: own[step] for i, own in enumerate(decisions) if step < len(own)}
            if len(there) > 1:
                of_step = group_baselines(config.baseline, [returns[i][j] for i, j in there.items()])
                baselines = dict(zip(there, of_step or (), strict=False))
            for i, j in there.items():
                found[i][j] = baselines[i].advantage(returns[i][j]) if i in baselines else 0.0
    return found


def anchor(group: Sequence[Sibling], config: TrainerConfig) -> Values:
    """Compute A(rollout) + anchor_weight x A(step): GiGPO (arXiv 2505.10978), equations 3 to 8.

    A(rollout) compares the sums of all rewards, the calls' and the rollout's own. A(step) compares the
    discounted returns of an agent's calls that had the same state (prompt), anywhere in the group. It is 0 for a state
    that only one call had. Example, with `dr_grpo`, weight 1 and discount 1: two rollouts have final rewards 1 and 0
    and only the first prompt in common. Their first calls get 1 and -1, their other calls 0.5 and -0.5.
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
    return found


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    # A judge's scores are rewards of calls, and are treated like any other.
    {"uniform": uniform, "discounted": discounted, "anchor": anchor, "judge": discounted}
)
OF_CALLS = STRATEGIES.keys() - {"uniform"}  # they compare the returns of calls, not of rollouts


def discounted_returns(calls: Sequence[ModelCall], rewards: RolloutRewards, discount: float) -> list[float]:
    """Compute R_t = r_t + discount x R_{t+1} for each call. The last call's reward includes the rollout's own.

    Nothing is discounted at calls that have no answer, were sent again, or are left out as rejected.
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


def own_credit(name: str, group: Sequence[Sibling], config: TrainerConfig) -> list[list[float]]:
    """Return the advantages from a user's or feature's function. Raises ConfigError if one is missing or not finite."""
    function = load(CREDIT, name)
    with faults(CREDIT, name):
        found = function(group, config)
    if not isinstance(found, Sequence) or len(found) != len(group):
        raise ConfigError(
            f"{CREDIT} {name}: one list for each of the {len(group)} rollouts is needed, got {found!r:.100}"
        )
    for values, calls in zip(found, (len(sibling.calls) for sibling in group), strict=True):
        if not isinstance(values, Sequence) or len(values) != calls:
            raise ConfigError(f"{CREDIT} {name}: a rollout of {calls} calls needs {calls} numbers, got {values!r:.100}")
        for value in values:
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ConfigError(f"{CREDIT} {name}: {value!r:.100} is not a finite number")
    return [[*map(float, values)] for values in found]


def training_rules(config: TrainerConfig) -> Rules:
    """Return how rewards count in training. A judge's scores count here, but not in the return that users see."""
    return Rules.of(config)._replace(weights=config.training_weights)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a return is compared with: advantage = (return - shift) / scale."""

    shift: float
    scale: float = 1.0

    def advantage(self, call_return: float) -> float:
        return (call_return - self.shift) / self.scale


def grpo(returns: Sequence[float]) -> list[Baseline]:
    """Compute (r - mean) / (std + 1e-4) with the sample standard deviation (TRL; DeepSeekMath, arXiv 2402.03300)."""
    return [Baseline(fmean(returns), stdev(returns) + STD_EPSILON)] * len(returns)


def dr_grpo(returns: Sequence[float]) -> list[Baseline]:
    """Compute r - mean. GRPO's division favours very easy and very hard tasks (Dr. GRPO, arXiv 2503.20783)."""
    return [Baseline(fmean(returns))] * len(returns)


def rloo(returns: Sequence[float]) -> list[Baseline]:
    """Compute r - the mean of the other siblings (REINFORCE leave-one-out, arXiv 2402.14740)."""
    total = math.fsum(returns)
    return [Baseline((total - r) / (len(returns) - 1)) for r in returns]


def reinforce_pp(returns: Sequence[float]) -> list[Baseline]:
    """Compute (r - mean) / sqrt(variance + 1e-8) (REINFORCE++, arXiv 2501.03262, with `trainer.compare: step`).

    The paper takes the variance over tokens; here every rollout counts once, as in the loss.
    """
    return [Baseline(fmean(returns), math.sqrt(pvariance(returns) + 1e-8))] * len(returns)


BASELINES: Mapping[str, Callable[[Sequence[float]], list[Baseline]]] = MappingProxyType(
    {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce_pp": reinforce_pp}
)


def group_baselines(name: str, returns: Sequence[float]) -> list[Baseline] | None:
    """Return one baseline per return; None if there are fewer than two returns, or if all are equal."""
    if len(returns) < 2 or math.isclose(max(returns), min(returns), rel_tol=1e-9, abs_tol=1e-9):
        return None
    found: list[Baseline] = (BASELINES.get(name) or load("trainer.baseline", name))(returns)
    return found


def compared(name: str, returns: Sequence[float]) -> list[float]:
    """Return the advantage of each of these returns; zeros if there is nothing to compare."""
    baselines = group_baselines(name, returns)
    if baselines is None:
        return [0.0] * len(returns)
    return [own.advantage(value) for own, value in zip(baselines, returns, strict=True)]
