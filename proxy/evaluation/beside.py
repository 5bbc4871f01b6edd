"""Shows the evaluations of policy versions, and the best one, beside these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from prometheus_client import Gauge

from ..control.beside import Beside, Fields
from ..recording.metrics import Metrics
from .evaluations import Evaluations


class EvaluationBeside(Beside):
    """The evaluations of policy versions, and the best version."""

    _best: Gauge | None = None

    async def of_policy(self) -> Fields:
        evaluations = Evaluations(self.store.database)
        best, last = await evaluations.best(), await evaluations.last()
        return {
            "best": None if best is None else asdict(best) | {"story": best.story},
            "evaluation": None if last is None else asdict(last),
        }

    async def of_versions(self) -> Callable[[int], Fields]:
        evaluations = Evaluations(self.store.database)
        found, best = await evaluations.all(), await evaluations.best()

        def fields(version: int) -> Fields:
            one = found.get(version)
            is_best = best is not None and best.version == version
            return {"best": is_best, "evaluation": None if one is None else asdict(one)}

        return fields

    async def measure(self, metrics: Metrics) -> None:
        if self._best is None:
            self._best = metrics.gauge("best_version", "The best policy version; -1 while none is known")
            self._held_out = metrics.gauge("evaluation", "The last evaluation on held-out tasks", "metric")
        evaluations = Evaluations(self.store.database)
        best, last = await evaluations.best(), await evaluations.last()
        self._best.set(-1 if best is None else best.version)
        for name in (
            ("version", "step", "reward", "low", "high") if last is not None and last.reward is not None else ()
        ):
            self._held_out.labels(name).set(getattr(last, name))
