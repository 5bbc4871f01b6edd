"""An independent computation of advantages, after the papers' formulas. Groups are as in `door.py`.

Nothing here comes from the product. A rollout's reward of a name is its own, or else the sum of its calls'.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pvariance, stdev
from typing import Any

Json = dict[str, Any]


def compare(baseline: str, returns: Sequence[float]) -> list[float]:
    """Return the advantage of each return among all: zeros where they are equal, or there is one."""
    if len(returns) < 2 or max(returns) - min(returns) < 1e-9:
        return [0.0] * len(returns)
    mean = fmean(returns)
    match baseline:
        case "grpo":
            return [(r - mean) / (stdev(returns) + 1e-4) for r in returns]
        case "dr_grpo":
            return [r - mean for r in returns]
        case "rloo":
            return [r - (sum(returns) - r) / (len(returns) - 1) for r in returns]
        case "reinforce_pp":
            return [(r - mean) / math.sqrt(pvariance(returns) + 1e-8) for r in returns]
        case "maxrl":
            return [(r - mean) / mean if mean > 0 else 0.0 for r in returns]
    raise ValueError(baseline)


def weighed(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    counted = [weights[name] * value for name, value in rewards.items() if name in weights]
    return sum(counted) if counted else None


def returns_from_each_call(rollout: Json, c: Json) -> list[float]:
    """R_t = r_t + γ · R_t+1 over the answered calls; the rollout's own reward comes with the last one."""
    ahead, factor, found = weighed(rollout["rewards"], c["reward_weights"]) or 0.0, 1.0, []
    for call in reversed(rollout["calls"]):
        own = weighed(call["rewards"], c["reward_weights"]) or 0.0
        ahead = own + (factor * ahead if call["answered"] else ahead)
        factor = c["discount"] if call["answered"] else factor
        found.append(ahead)
    return found[::-1]


def return_of(rollout: Json, weights: Mapping[str, float]) -> float | None:
    own = weighed(rollout["rewards"], weights)
    if own is not None:
        return own
    of_calls = [value for call in rollout["calls"] if (value := weighed(call["rewards"], weights)) is not None]
    return sum(of_calls) if of_calls else None


def advantages(group: Sequence[Json], c: Json) -> list[list[float | None]]:
    """Return each call's advantage. `c`: the settings of the section `trainer`.

    None for agents that are not trained, and for calls that are left out.
    """
    fates = [[call.get("fate") for call in rollout["calls"]] for rollout in group]
    group = [r | {"calls": [_decided(call) for call in r["calls"]]} for r in group]
    return [
        [_fated(a, fate) for a, fate in zip(values, own, strict=True)]
        for values, own in zip(_by_agent(group, c), fates, strict=True)
    ]


def _decided(call: Json) -> Json:
    return call | {"answered": call["answered"] and call.get("fate") != "rejected"}


def _fated(advantage: float | None, fate: str | None) -> float | None:
    if advantage is None or fate in ("rejected", "left out"):
        return None
    return -abs(advantage) if fate == "negative" else advantage


def _by_agent(group: Sequence[Json], c: Json) -> list[list[float | None]]:
    if c.get("agents") is None:
        return [*map(list, _of_strategy(group, c))]
    found: list[list[float | None]] = [[None] * len(rollout["calls"]) for rollout in group]
    for role in c["agents"]:
        places = [[j for j, call in enumerate(r["calls"]) if _role(call["agent"], c["agents"]) == role] for r in group]
        there = [i for i, own in enumerate(places) if any(group[i]["calls"][j]["answered"] for j in own)]
        for i, own in enumerate(places):
            for j in own:
                found[i][j] = 0.0
        shown = [_only(group[i], places[i]) if c["agent_credit"] == "own" else group[i] for i in there]
        for i, values in zip(there, _of_strategy(shown, c), strict=True):
            for place, j in enumerate(places[i]):
                found[i][j] = values[place if c["agent_credit"] == "own" else j]
    return found


def _role(agent: str | None, trained: Sequence[str]) -> str | None:
    return agent if agent in trained else "*" if "*" in trained else None


def _only(rollout: Json, places: Sequence[int]) -> Json:
    return rollout | {"calls": [rollout["calls"][j] for j in places]}


def _of_strategy(group: Sequence[Json], c: Json) -> list[list[float]]:
    if isinstance(c["credit"], dict):
        names = [
            [c["credit"].get(call["agent"], c["credit"].get("*", "uniform")) for call in r["calls"]] for r in group
        ]
        found = {name: _of_strategy(group, c | {"credit": name}) for own in names for name in own}
        return [[found[name][i][j] for j, name in enumerate(own)] for i, own in enumerate(names)]
    strategy = {"uniform": uniform, "discounted": discounted, "anchor": anchor, "gdpo": gdpo, "rae": rae}[c["credit"]]
    return strategy(group, c)


def uniform(group: Sequence[Json], c: Json) -> list[list[float]]:
    """LightningRL, arXiv 2508.03680: each call has the advantage of its rollout's return."""
    found = compare(c["baseline"], [return_of(r, c["reward_weights"]) or 0.0 for r in group])
    return [[value] * len(r["calls"]) for value, r in zip(found, group, strict=True)]


def discounted(group: Sequence[Json], c: Json) -> list[list[float]]:
    """Compare an agent's k-th answered call with the siblings' k-th; past the last shared one its baseline stays."""
    returns = [returns_from_each_call(r, c) for r in group]
    found = [[0.0] * len(r["calls"]) for r in group]
    for agent in {call["agent"] for r in group for call in r["calls"]}:
        steps = [[j for j, call in enumerate(r["calls"]) if call["answered"] and call["agent"] == agent] for r in group]
        shared: list[float] = []
        for k in range(max(map(len, steps))):
            there = [i for i, own in enumerate(steps) if len(own) > k]
            values = [returns[i][steps[i][k]] for i in there]
            if len(there) > 1:
                shared, last = values, {i: n for n, i in enumerate(there)}
            for n, i in enumerate(there):
                if len(there) > 1:
                    found[i][steps[i][k]] = compare(c["baseline"], values)[n]
                elif i in (last if shared else {}):
                    found[i][steps[i][k]] = _beside(c["baseline"], shared, last[i], values[n])
    return found


def _beside(baseline: str, returns: Sequence[float], place: int, value: float) -> float:
    """What `value` would be worth by the baseline that the return at `place` was compared with."""
    if max(returns) - min(returns) < 1e-9:
        return 0.0
    others = [r for i, r in enumerate(returns) if i != place]
    mean = fmean(others) if baseline == "rloo" else fmean(returns)
    scale = {"grpo": stdev(returns) + 1e-4, "reinforce_pp": math.sqrt(pvariance(returns) + 1e-8)}.get(baseline, 1.0)
    if baseline == "maxrl":
        scale = mean if mean > 0 else math.inf
    return (value - mean) / scale


def anchor(group: Sequence[Json], c: Json) -> list[list[float]]:
    """GiGPO, arXiv 2505.10978: the rollout's advantage, and that among calls with the very same prompt."""
    sums = [
        (weighed(r["rewards"], c["reward_weights"]) or 0.0)
        + sum(weighed(call["rewards"], c["reward_weights"]) or 0.0 for call in r["calls"])
        for r in group
    ]
    found = [[a] * len(r["calls"]) for a, r in zip(compare(c["baseline"], sums), group, strict=True)]
    same = defaultdict(list)
    for i, rollout in enumerate(group):
        for j, (call, value) in enumerate(zip(rollout["calls"], returns_from_each_call(rollout, c), strict=True)):
            if call["answered"]:
                same[call["agent"], tuple(call["prompt"])].append((i, j, value))
    for places in same.values():
        for (i, j, _), a in zip(places, compare(c["baseline"], [value for *_, value in places]), strict=True):
            found[i][j] += c["anchor_weight"] * a
    return found


def gdpo(group: Sequence[Json], c: Json) -> list[list[float]]:
    """GDPO, arXiv 2601.05242: each name's rewards are compared by themselves, then added by their weights."""
    total = [0.0] * len(group)
    for name, weight in c["reward_weights"].items():
        named = {i: r for i, rollout in enumerate(group) if (r := return_of(rollout, {name: 1.0})) is not None}
        for i, a in zip(named, compare(c["baseline"], [*named.values()]), strict=True):
            total[i] += weight * a
    return [[a] * len(r["calls"]) for a, r in zip(total, group, strict=True)]


def rae(group: Sequence[Json], c: Json) -> list[list[float]]:
    """SPIRAL, arXiv 2506.24119: a running mean (0.95) of an agent's earlier rollouts, in the order of their starts."""
    found = [[0.0] * len(r["calls"]) for r in group]
    for agent in {call["agent"] for r in group for call in r["calls"]}:
        earlier: list[float] = []
        for i in sorted(range(len(group)), key=lambda i: group[i]["calls"][0]["at"]):
            own = [j for j, call in enumerate(group[i]["calls"]) if call["agent"] == agent]
            if not any(group[i]["calls"][j]["answered"] for j in own):
                continue
            value = return_of(_only(group[i], own), c["reward_weights"]) or 0.0
            weights = [0.95**age for age in reversed(range(len(earlier)))]
            if earlier:
                mean = sum(w * r for w, r in zip(weights, earlier, strict=True)) / sum(weights)
                for j in own:
                    found[i][j] = value - mean
            earlier.append(value)
    return found
