"""GEPA (arXiv 2507.19457), by its authors' package: reflective mutation, and a Pareto front over tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ...commands.run.tasks import Task
from ...core.errors import ConfigError
from .lessons import feedback, inputs, outputs
from .scores import BudgetSpent, Score
from .search import Search

T = TypeVar("T")
MOST_IDLE = 20  # iterations in a row that try nothing new


async def search(job: Search, minibatch: int) -> None:
    """Try prompts until the budget is spent; all versions tried are in `job.tried`. ConfigError without the package.

    The package runs in a thread, always from its beginning. With the run's seed, its store and its file of reflections,
    it repeats the steps of an earlier start at no cost, and continues from there.
    """
    try:
        import gepa
    except ImportError:
        raise ConfigError("--method gepa needs the package gepa: pip install 'lightning-proxy[optimize]'") from None
    adapter = _Adapter(job, asyncio.get_running_loop())
    try:
        await asyncio.to_thread(
            gepa.optimize,
            seed_candidate={job.prompt: job.text},
            trainset=list(job.lessons),
            valset=list(job.validation),
            adapter=adapter,
            reflection_lm=adapter.reflect,
            reflection_minibatch_size=minibatch,
            skip_perfect_score=False,
            stop_callbacks=adapter.is_done,
            logger=_Quiet(),
            seed=job.seed,
        )
    except _Ended:
        if adapter.fault is not None and not isinstance(adapter.fault, BudgetSpent):
            raise adapter.fault from None
    finally:
        adapter.is_over = True


class _Ended(BaseException):
    """Ends the package, which ignores any other exception."""


class _Adapter:
    """Evaluates candidates for the package, whose thread it is called in."""

    propose_new_texts = None

    def __init__(self, job: Search, loop: asyncio.AbstractEventLoop) -> None:
        self._job, self._loop = job, loop
        self._idle, self._requested = 0, -1
        self.is_over = False
        self.fault: Exception | None = None

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        from gepa.core.adapter import EvaluationBatch

        scores = self._wait(_scores(self._job, batch, candidate[self._job.prompt]))
        traces = [self._wait(self._job.scores.lesson(score)) for score in scores] if capture_traces else None
        rewards = [score.reward for score in scores]
        return EvaluationBatch(outputs=scores, scores=rewards, trajectories=traces)

    def make_reflective_dataset(
        self, candidate: dict[str, str], evaluated: Any, components: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        lessons = [
            {"Inputs": inputs(one), "Generated Outputs": outputs(one), "Feedback": feedback(one)}
            for one in evaluated.trajectories
        ]
        return dict.fromkeys(components, lessons)

    def reflect(self, prompt: Any) -> str:
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(one["content"]) for one in prompt)
        return self._wait(self._job.reflection.ask(text))

    def is_done(self, _: Any) -> bool:
        self._idle = self._idle + 1 if self._job.scores.requested == self._requested else 0
        self._requested = self._job.scores.requested
        return self._idle > MOST_IDLE

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self.is_over:
            work.close()
            raise _Ended
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except Exception as error:
            self.is_over, self.fault = True, error
            raise _Ended from error


async def _scores(job: Search, batch: Sequence[Task], text: str) -> list[Score]:
    version = await job.scores.version_of(text, comment="gepa")
    if list(batch) == list(job.validation):
        await job.validate(version, text)
    return await job.scores.of(version, batch)


class _Quiet:
    def log(self, message: str) -> None:
        """Say nothing: the command shows how it goes."""
