"""The interface of every method of search: tasks, scores and reflections in, the best prompt out.

One look at each validation task is little: of true rates 0.20 and 0.85, both may be right on 3 of 6 tasks. So `settle`
looks again at the best versions as long as they cannot be told apart and budget is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pvariance

from ...commands.run.tasks import Task
from .reflection import Reflection
from .scores import BudgetSpent, Candidate, PromptScores, mean

NEAR = 2.0  # standard errors, within which one mean is not better than another
AT_MOST = 4  # versions that are looked at again


@dataclass(slots=True)
class Search:
    """A search under way. `lessons`: tasks to learn from; `validation`: those that candidates are compared on.

    `tell` is called with each candidate that is better than all before.
    """

    prompt: str
    text: str
    scores: PromptScores
    reflection: Reflection
    lessons: Sequence[Task]
    validation: Sequence[Task]
    seed: int
    tell: Callable[[Candidate], None]
    tried: dict[int, Candidate] = field(default_factory=dict)

    @property
    def best(self) -> Candidate:
        """Return the best candidate so far; of equals, the first."""
        return max(self.tried.values(), key=lambda one: (one.mean, -one.version))

    async def validate(self, version: int, text: str) -> Candidate:
        """Return the version with its mean reward over the validation tasks. Raise BudgetSpent."""
        if version not in self.tried:
            tried = Candidate(version, text, mean(await self.scores.of(version, self.validation)))
            is_best = not self.tried or tried.mean > self.best.mean
            self.tried[version] = tried
            if is_best:
                self.tell(tried)
        return self.tried[version]

    async def settle(self) -> None:
        """Look again at versions that cannot be told from the best one, the least seen first, until budget is spent."""
        looks = dict.fromkeys(self.tried, 1)
        for one in looks:
            self._weigh(one, 1)
        try:
            while (version := self._unsure(looks)) is not None:
                await self.scores.look(version, self.validation, looks[version])
                looks[version] += 1
                self._weigh(version, looks[version])
        except BudgetSpent:
            return

    def _seen(self, version: int, looks: int) -> list[list[float]]:
        """The rewards of a version, for each validation task."""
        return [self.scores.seen(version, task, looks) for task in self.validation]

    def _weigh(self, version: int, looks: int) -> None:
        best = self.best
        self.tried[version] = replace(self.tried[version], mean=fmean(map(fmean, self._seen(version, looks))))
        if self.best.version != best.version:
            self.tell(self.best)

    def _unsure(self, looks: dict[int, int]) -> int | None:
        """The version to look at next; None if the best one is clear, or if looking again shows the same."""
        seen = {version: self._seen(version, n) for version, n in looks.items()}
        rewards = {version: [one for task in of for one in task] for version, of in seen.items()}
        again = [task for of in seen.values() for task in of if len(task) > 1]
        spread = fmean(map(pvariance, again)) if again else pvariance([one for of in rewards.values() for one in of])

        def near(one: Candidate) -> bool:
            error = (spread / len(rewards[one.version]) + spread / len(rewards[self.best.version])) ** 0.5
            return self.best.mean - one.mean <= NEAR * error

        ranked = sorted(self.tried.values(), key=lambda one: (-one.mean, one.version))
        close = [one for one in ranked if near(one)][:AT_MOST]
        chosen = min(close, key=lambda one: len(rewards[one.version]))
        settled = len(close) == 1 or (spread == 0 and len(rewards[chosen.version]) > len(self.validation))
        return None if settled else chosen.version
