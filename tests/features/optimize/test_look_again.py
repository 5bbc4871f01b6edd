"""Versions that one look cannot tell apart are looked at again while budget is left."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_proxy.commands.run.tasks import Task
from lightning_proxy.features.optimize.search import BudgetSpent, Reflection, Score, Search, Split

TASKS = [Task(f"t{i}", "{}") for i in range(6)]
HALF = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


class Drawn(Search):
    """Versions that are right with these rates; the first look is given."""

    def __init__(self, rates: dict[int, float], first: dict[int, list[float]], budget: int, seed: int = 0) -> None:
        nothing = cast(Any, None)
        super().__init__(nothing, nothing, nothing, prompt="p", run="r", budget=budget, failed_reward=0.0,
                         split=Split([], TASKS, []), seed=0, tell=lambda _: None, on_result=nothing)  # fmt: skip
        self._rates, self._rng, self.looks = rates, random.Random(seed), Counter[int]()
        for version, rewards in first.items():
            self._draw(version, rewards)

    def _draw(self, version: int, rewards: list[float]) -> None:
        for task, reward in zip(TASKS, rewards, strict=True):
            self._add(version, task.task_id, f"r{self.taken}", reward, False)
            self.taken += 1

    async def scores(self, version: int, tasks: Any, look: int = 0, *, held_out: bool = False) -> list[Score]:
        if len(self._known[version, "t0"]) <= look:
            if self.budget - self.taken < len(tasks):
                raise BudgetSpent
            self.looks[version] += 1
            self._draw(version, [float(self._rng.random() < self._rates[version]) for _ in tasks])
        return [self._known[version, task.task_id][look] for task in tasks]


async def best_after_looking_again(job: Drawn) -> int:
    """The best of versions 1 and 2."""
    for version in (1, 2):
        await job.validate(version, str(version))
    await job.look_again()
    return job.best.version


@pytest.mark.parametrize("near", [HALF, [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]], ids=["tie", "near miss"])
async def test_a_better_version_is_found_that_chance_has_made_equal(near: list[float]) -> None:
    found = 0
    for seed in range(50):
        job = Drawn({1: 0.2, 2: 0.85}, {1: HALF, 2: near}, 48, seed)
        found += await best_after_looking_again(job) == 2
        assert job.taken <= 48
    assert found >= 48


async def test_no_budget_is_spent_on_what_is_clear_or_always_the_same() -> None:
    clear = Drawn({1: 0.0, 2: 1.0}, {1: [0.0] * 6, 2: [1.0] * 6}, 200)
    assert await best_after_looking_again(clear) == 2 and not clear.looks
    same = Drawn({1: 1.0, 2: 1.0}, {1: [1.0] * 6, 2: [1.0] * 6}, 200)
    assert await best_after_looking_again(same) == 1
    assert same.looks == {1: 1, 2: 1}


async def test_the_reflecting_model_is_asked_at_most_so_often(tmp_path: Path) -> None:
    class Asked(Reflection):
        async def _complete(self, text: str) -> tuple[str, None]:
            return "said", None

    for _ in range(2):  # also when the answers are in the file
        model = Asked("m", None, tmp_path / "said.jsonl", most=3)
        assert [await model.ask("q") for _ in range(3)] == ["said"] * 3
        with pytest.raises(BudgetSpent):
            await model.ask("q")
