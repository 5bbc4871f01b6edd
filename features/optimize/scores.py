"""Measures a prompt's rewards on tasks: from the store where it was tried in this run, else by running the agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ...commands.api_client import ApiClient
from ...commands.run.run import RolloutResult, RunOptions, run_tasks
from ...commands.run.runner import Runner
from ...commands.run.tasks import Task
from ...core.errors import LightningError


class BudgetSpent(Exception):
    """The rollouts that the search may take are used up."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one rollout of a task."""

    task_id: str
    rollout_id: str
    reward: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version of the prompt that was tried. `mean`: over the tasks that candidates are compared on."""

    version: int
    text: str
    mean: float


class PromptScores:
    """Tries versions of a prompt. Rollouts are kept in the store under the run's name, so that a run can be resumed.

    A version that was tried on a task in this run is not tried on it again, but by another look. What the store has
    of other runs counts where versions are compared.
    """

    def __init__(
        self, api: ApiClient, runner: Runner, options: RunOptions, *, prompt: str, run: str, budget: int,
        failed_reward: float, on_result: Callable[[RolloutResult], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`budget`: rollouts that `of` may take, those of an earlier start included."""
        self._api, self._runner, self._options = api, runner, options
        self._prompt, self._run, self._budget = prompt, run, budget
        self._failed_reward, self._on_result = failed_reward, on_result
        self._known: dict[tuple[int, str], list[Score]] = {}  # one for each look
        self._elsewhere: dict[tuple[int, str], list[float]] = {}  # what other runs saw
        self._requested: set[tuple[int, str]] = set()
        self.taken = 0  # rollouts of the search

    async def open(self) -> None:
        """Read what earlier starts of the run have tried; end the rollouts that they left running."""
        route = f"/prompts/{self._prompt}/rollouts"
        tried = await self._api.request("GET", route, params={"run": self._run})
        own = {one["rollout_id"] for one in tried["data"]}
        for one in (await self._api.request("GET", route))["data"]:
            if one["rollout_id"] not in own and one["reward"] is not None:
                self._elsewhere.setdefault((one["version"], one["task_id"]), []).append(one["reward"])
        for one in tried["data"]:
            if one["status"] == "running":
                await self._api.end_rollout(one["rollout_id"], "discarded", "the optimisation was stopped")
            elif one["status"] != "discarded":
                self.taken += not one["held_out"]
                failed = one["status"] == "failed"
                if failed or one["reward"] is not None:  # another one takes the place of one without a reward
                    self._add(one["version"], one["task_id"], one["rollout_id"], one["reward"], failed)

    @property
    def left(self) -> int:
        """Return how many rollouts the search may still take."""
        return max(self._budget - self.taken, 0)

    @property
    def requested(self) -> int:
        """Return how many scores were requested since the start, each counted once."""
        return len(self._requested)

    async def version_of(self, text: str, parent: int | None = None, comment: str | None = None) -> int:
        """Return the version with this text; it is added if there is none."""
        body = {"name": self._prompt, "text": text, "parent": parent, "comment": comment}
        answer = await self._api.request("POST", "/prompts", body)
        return int(answer["version"])

    async def of(self, version: int, tasks: Sequence[Task], *, held_out: bool = False) -> list[Score]:
        """Return the version's rewards on the tasks, in their order. Raise BudgetSpent before it runs any.

        `held_out`: it is no part of the search, and not of its budget.
        """
        self._requested |= {(version, task.task_id) for task in tasks}
        return await self.look(version, tasks, 0, held_out=held_out)

    async def look(self, version: int, tasks: Sequence[Task], look: int, *, held_out: bool = False) -> list[Score]:
        """Return the version's rewards on the tasks at its `look`th look, the first being 0."""
        missing = [task for task in tasks if len(self._known.get((version, task.task_id), ())) <= look]
        if missing and not held_out and len(missing) > self.left:
            raise BudgetSpent
        choice = {"prompts": {self._prompt: version}, "metadata": {"optimize": self._run, "held_out": held_out}}
        results = await run_tasks(
            self._api, missing, self._runner, replace(self._options, choice=choice), self._on_result
        )
        self.taken += 0 if held_out else len(results)
        for result in results:
            self._add(version, result.task_id, result.rollout_id, result.reward, result.failed)
        return [self._known[version, task.task_id][look] for task in tasks]

    def seen(self, version: int, task: Task, looks: int) -> list[float]:
        """Return the rewards of the first looks, and those of other runs."""
        known = self._known.get((version, task.task_id), [])[:looks]
        return [score.reward for score in known] + self._elsewhere.get((version, task.task_id), [])

    async def lesson(self, score: Score) -> Mapping[str, Any]:
        """Return the full record of a rollout."""
        return await self._api.rollout(score.rollout_id)

    def _add(self, version: int, task_id: str, rollout_id: str, reward: float | None, failed: bool) -> None:
        if reward is None and not failed:
            raise LightningError(f"rollout {rollout_id} has no reward: the agent posts one to /reward before it ends")
        value = self._failed_reward if reward is None else reward
        self._known.setdefault((version, task_id), []).append(Score(task_id, rollout_id, value))


def mean(scores: Sequence[Score]) -> float:
    return fmean(score.reward for score in scores)
