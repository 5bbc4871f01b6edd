"""Shows the evaluations of policy versions, and the best one, beside these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from prometheus_client import Gauge

from ...proxy.api.beside import Beside, Fields
from ...proxy.gateway.metrics import Metrics
from .evaluations import Best, Evaluations, HeldOut


class EvaluationBeside(Beside):
    """The evaluations of policy versions, and the best version."""

    _best: Gauge | None = None

    async def of_policy(self) -> Fields:
        best, last = await self._found()
        return {
            "best": None if best is None else asdict(best) | {"story": best.story},
            "evaluation": None if last is None else asdict(last),
        }

    async def of_versions(self) -> Callable[[int], Fields]:
        evaluations = Evaluations(self.store)
        best, seen = await evaluations.best(), await evaluations.with_rewards([*(await evaluations.all()).values()])
        found = {one.version: one for one in seen}

        def fields(version: int) -> Fields:
            one = found.get(version)
            is_best = best is not None and best.version == version
            return {"best": is_best, "evaluation": None if one is None else asdict(one)}

        return fields

    async def measure(self, metrics: Metrics) -> None:
        if self._best is None:
            self._best = metrics.gauge("best_version", "The best policy version; -1 while none is known")
            self._held_out = metrics.gauge("evaluation", "The last evaluation on held-out tasks", "metric")
        best, last = await self._found()
        self._best.set(-1 if best is None else best.version)
        for name in (
            ("version", "step", "reward", "low", "high") if last is not None and last.reward is not None else ()
        ):
            self._held_out.labels(name).set(getattr(last, name))

    async def _found(self) -> tuple[Best | None, HeldOut | None]:
        """The best version, and the evaluation beside training that began last."""
        evaluations = Evaluations(self.store)
        best, last = await evaluations.best(), await evaluations.last()
        return best, None if last is None else (await evaluations.with_rewards([last]))[0]
