"""Shows the trainer's evaluations (`evaluation`) and the best version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from prometheus_client import Gauge
from pydantic import BaseModel

from ...proxy.api.policy import Policy, VersionSeen
from ...proxy.gateway.metrics import Metrics
from ...proxy.hooks import Fields, ProxyPlugin
from ...store.store import Store
from .evaluations import LAST, Best, Evaluations, HeldOut


class PolicyEvaluation(BaseModel):
    """`best`: the best version that can be served. `evaluation`: the latest. Both are null for restricted keys."""

    best: Best | None
    evaluation: HeldOut | None


class VersionEvaluation(BaseModel):
    """`evaluation`: the version's own, null if none. `best`: whether it is the best version that can be served."""

    evaluation: HeldOut | None
    best: bool


class EvaluationPlugin(ProxyPlugin):
    """Shows evaluations and the best version to callers that may see all rollouts."""

    fields = ((Policy, PolicyEvaluation), (VersionSeen, VersionEvaluation))
    _best: Gauge | None = None

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        best, last = await _found(store) if key_id is None else (None, None)
        return {"best": best and asdict(best), "evaluation": last and asdict(last)}

    async def version_fields(self, store: Store, key_id: str | None) -> Callable[[int], Fields]:
        if key_id is not None:
            return lambda _: {"best": False, "evaluation": None}
        best, found = await Evaluations(store).best(), await Evaluations(store).read()
        return lambda version: {"best": best is not None and best.version == version, "evaluation": found.get(version)}

    async def measure(self, store: Store, metrics: Metrics) -> None:
        if self._best is None:
            self._best = metrics.gauge("best_version", "The best policy version; -1 while none is known")
            self._held_out = metrics.gauge("evaluation", "The last evaluation on held-out tasks", "metric")
        best, last = await _found(store)
        self._best.set(-1 if best is None else best.version)
        if last is not None and last.reward is not None:
            for name in ("version", "step", "reward", "low", "high"):
                if (value := getattr(last, name)) is not None:
                    self._held_out.labels(name).set(value)


async def _found(store: Store) -> tuple[Best | None, HeldOut | None]:
    """The best version, and the latest evaluation."""
    last = await Evaluations(store).read(LAST)
    return await Evaluations(store).best(), next(iter(last.values()), None)


plugin = EvaluationPlugin
