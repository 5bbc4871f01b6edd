"""Advantages are those of an independent computation, for each strategy and baseline; and of sums done by hand."""

import math
import random
from typing import Any

import pytest

from reference.credit import advantages
from reference.door import PLAIN
from reference.door import advantages as computed

Json = dict[str, Any]
BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "maxrl")
DEFAULTS: Json = {
    "credit": "uniform", "baseline": "grpo", "discount": 1.0, "anchor_weight": 1.0, "reward_weights": {"reward": 1.0},
    "agents": None, "agent_credit": "team",
}  # fmt: skip
SETTINGS: dict[str, Json] = {
    "uniform": {},
    "discounted": {"credit": "discounted", "discount": 0.9},
    "discounted to its own call": {"credit": "discounted", "discount": 0.0},
    "anchor": {"credit": "anchor", "discount": 0.9, "anchor_weight": 0.7},
    "gdpo": {"credit": "gdpo", "reward_weights": {"reward": 1.0, "style": 0.5}},
    "rae": {"credit": "rae"},
    "two names": {"reward_weights": {"reward": 1.0, "style": -0.5}},
    **{
        f"agents, {credit}, {own}": {"credit": credit, "discount": 0.8, "agents": ["a", "*"], "agent_credit": own}
        for credit in ("uniform", "discounted", "anchor")
        for own in ("team", "own")
    },
    "a strategy for each agent": {"credit": {"a": "discounted", "*": "anchor"}, "discount": 0.8},
    "some agents, each by its strategy": {"credit": {"a": "anchor"}, "discount": 0.8, "agents": ["a", "b"]},
    "one agent": {"credit": "discounted", "discount": 0.8, "agents": ["a"]},
}
FATES = ("rejected", "negative", "left out")


def random_group(seed: int) -> list[Json]:
    """Three to six rollouts of one to five calls by up to three agents; a third have rewards of calls alone."""
    chance = random.Random(seed)

    def rewards(often: float) -> Json:
        return {name: float(chance.randint(0, 3)) for name in ("reward", "style") if chance.random() < often}

    def rollout(number: int) -> Json:
        by_calls = chance.random() < 0.3
        calls = [
            {
                "prompt": [chance.randrange(3)], "agent": chance.choice([None, "a", "b"]), "at": number + place / 10,
                "rewards": rewards(0.6 if by_calls else 0.3), "answered": chance.random() < 0.85,
                "fate": chance.choice(FATES) if chance.random() < 0.2 else None,
            }
            for place in range(chance.randint(1, 5))
        ]  # fmt: skip
        return {"rewards": {} if by_calls else rewards(0.9), "calls": calls}

    return [rollout(number) for number in range(chance.randint(3, 6))]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_are_those_of_the_formulas(name: str, baseline: str) -> None:
    settings = SETTINGS[name] | {"baseline": baseline}
    for seed in range(20):
        group = random_group(seed)
        expected, found = advantages(group, DEFAULTS | settings), computed(settings, group)
        for ours, theirs in zip(expected, found, strict=True):
            assert [one is None for one in ours] == [one is None for one in theirs]
            assert [one or 0.0 for one in theirs] == pytest.approx([one or 0.0 for one in ours], abs=1e-9), seed


def rollout(own: float | None, *calls: float | None, prompts: tuple[int, ...] = (), at: float = 0.0) -> Json:
    """A rollout of calls with these rewards; each prompt is another, unless `prompts` says which are the same."""
    return {
        "rewards": {} if own is None else {"reward": own},
        "calls": [
            {
                "prompt": [prompts[i]] if prompts else [i, math.ceil(at)], "agent": None, "answered": True,
                "rewards": {} if r is None else {"reward": r}, "at": at + i,
            }
            for i, r in enumerate(calls)
        ],
    }  # fmt: skip


N, DR = None, {"baseline": "dr_grpo"}
THREE = [rollout(2.0, N), rollout(-1.0, N, N), rollout(0.5, N)]  # mean 0.5, sample variance 2.25
LONG = [rollout(4.0, 1.0, 0.0, 2.0), rollout(0.0, 0.0, 1.0)]  # γ = 0.5: 4, 6 / 2 = 3 and on; see below
STATES = [rollout(N, 0.0, 1.0, prompts=(1, 2)), rollout(N, 1.0, 0.0, prompts=(1, 1)), rollout(N, 2.0, prompts=(3,))]
SEATS = [rollout(1.0, N, at=0), rollout(-1.0, N, at=10), rollout(1.0, N, at=20)]


@pytest.mark.parametrize(
    ("settings", "group", "expected"),
    [
        ({}, THREE, [[1.5 / 1.5001], [-1.5 / 1.5001] * 2, [0.0]]),
        (DR, THREE, [[1.5], [-1.5] * 2, [0.0]]),
        ({"baseline": "rloo"}, THREE, [[2 - -0.25], [-1 - 1.25] * 2, [0.0]]),
        ({"baseline": "maxrl"}, [rollout(1.0, N), *(rollout(0.0, N) for _ in range(3))], [[3.0], *[[-1.0]] * 3]),
        # Returns of calls: 1 + 3 / 2 + …: the last one 2 + 4 = 6, then 0 + 3 = 3, then 1 + 1.5 = 2.5; and 1, 0.5.
        # The third step has no sibling and keeps the second's mean, 2.
        (DR | {"credit": "discounted", "discount": 0.5}, LONG, [[2.5 - 1.5, 3 - 2, 6 - 2], [0.5 - 1.5, 1 - 2]]),
        # Sums 1, 1, 2; returns of calls 0.5, 1; 1, 0; 2. Prompt 1 has 0.5, 1, 0: their mean is 0.5.
        (
            DR | {"credit": "anchor", "discount": 0.5, "anchor_weight": 2.0},
            STATES,
            [[-1 / 3 + 0, -1 / 3], [-1 / 3 + 1, -1 / 3 - 1], [2 / 3]],
        ),
        ({"credit": "rae"}, SEATS, [[0.0], [-2.0], [1 - (0.95 * 1 - 1) / 1.95]]),
        ({}, [rollout(0.1 + 0.2, N), rollout(0.3, N)], [[0.0], [0.0]]),  # equal but for rounding
    ],
)
def test_sums_by_hand(settings: Json, group: list[Json], expected: list[list[float]]) -> None:
    for ours, theirs in zip(expected, computed(settings, group), strict=True):
        assert theirs == pytest.approx(ours, abs=1e-6)


def test_the_defaults_that_the_tests_name_are_the_products() -> None:
    group = random_group(1)
    assert computed({}, group) == computed(DEFAULTS, group)
    assert not PLAIN.keys() & DEFAULTS.keys()
