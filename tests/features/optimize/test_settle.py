"""Versions that one look cannot tell apart are looked at again while budget is left."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_proxy.commands.run.tasks import Task
from lightning_proxy.features.optimize.search import BudgetSpent, PromptScores, Reflection, Score, Search

TASKS = [Task(f"t{i}", "{}") for i in range(6)]


class Drawn(PromptScores):
    """Scores of versions that are right with these rates; the first look is given."""

    def __init__(self, rates: dict[int, float], first: dict[int, list[float]], budget: int, seed: int = 0) -> None:
        super().__init__(cast(Any, None), cast(Any, None), cast(Any, None), prompt="p", run="r", budget=budget,
                         failed_reward=0.0)  # fmt: skip
        self._rates, self._rng, self.looks = rates, random.Random(seed), Counter[int]()
        for version, rewards in first.items():
            self._draw(version, rewards)

    def _draw(self, version: int, rewards: list[float]) -> None:
        for task, reward in zip(TASKS, rewards, strict=True):
            self._add(version, task.task_id, f"r{self.taken}", reward, False)
            self.taken += 1

    async def look(self, version: int, tasks: Any, look: int, *, held_out: bool = False) -> list[Score]:
        if len(self._known[version, "t0"]) <= look:
            if self.left < len(tasks):
                raise BudgetSpent
            self.looks[version] += 1
            self._draw(version, [float(self._rng.random() < self._rates[version]) for _ in tasks])
        return [self._known[version, task.task_id][look] for task in tasks]


async def searched(scores: PromptScores, versions: list[int]) -> Search:
    job = Search("p", "", scores, cast(Any, None), [], TASKS, 0, lambda _: None)
    for version in versions:
        await job.validate(version, str(version))
    await job.settle()
    return job


HALF = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("near", [HALF, [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]], ids=["tie", "near miss"])
async def test_a_better_version_is_found_that_chance_has_made_equal(near: list[float]) -> None:
    found = 0
    for seed in range(50):
        scores = Drawn({1: 0.2, 2: 0.85}, {1: HALF, 2: near}, 48, seed)
        job = await searched(scores, [1, 2])
        found += job.best.version == 2
        assert scores.taken <= 48
    assert found >= 48


async def test_no_budget_is_spent_on_what_is_clear_or_always_the_same() -> None:
    clear = Drawn({1: 0.0, 2: 1.0}, {1: [0.0] * 6, 2: [1.0] * 6}, 200)
    assert (await searched(clear, [1, 2])).best.version == 2 and not clear.looks
    same = Drawn({1: 1.0, 2: 1.0}, {1: [1.0] * 6, 2: [1.0] * 6}, 200)
    assert (await searched(same, [1, 2])).best.version == 1
    assert same.looks == {1: 1, 2: 1}


async def test_what_other_runs_saw_counts() -> None:
    scores = Drawn({1: 0.2, 2: 0.85}, {1: HALF, 2: HALF}, 12)
    for task in TASKS:
        scores._elsewhere[1, task.task_id], scores._elsewhere[2, task.task_id] = [0.0] * 4, [1.0] * 4
    job = await searched(scores, [1, 2])
    assert (job.best.version, scores.taken) == (2, 12)


async def test_the_reflecting_model_is_asked_at_most_so_often(tmp_path: Path) -> None:
    class Answers(Reflection):
        async def _complete(self, text: str) -> tuple[str, None]:
            return "said", None

    for _ in range(2):  # also when the answers are in the file
        model = Answers("m", None, tmp_path / "said.jsonl", most=3)
        assert [await model.ask("q") for _ in range(3)] == ["said"] * 3
        with pytest.raises(BudgetSpent):
            await model.ask("q")
