"""What every method of search gets and gives: tasks, scores and reflections in, the best prompt out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..run.tasks import Task
from .reflection import Reflection
from .scores import Candidate, Scores, mean


@dataclass(slots=True)
class Search:
    """A search under way. `lessons`: tasks to learn from; `validation`: those that candidates are compared on.

    `tell` hears of each candidate that is better than all before.
    """

    prompt: str
    text: str
    scores: Scores
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
