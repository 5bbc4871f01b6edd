"""Holds the parts of the proxy that the routes use; `app.py` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.config.root import Config
from ...core.redact import Redactor
from ...serving.health import Health, Reach
from ...serving.mode import ModeInUse
from ...serving.swap import Pins, Swap
from ...store.store import Store
from ..access.auth import Keys
from ..access.limits import Turns
from ..gateway.asgi import Bodies
from ..gateway.exact import ExactTokens
from ..gateway.metrics import Metrics
from ..gateway.recorder import Recorder
from ..gateway.relay import Relay
from ..gateway.routing import ModelCheck, PolicyRouter, Watch
from .beside import Beside


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the proxy that the routes use."""

    config: Config
    mode: ModeInUse
    store: Store
    recorder: Recorder
    swap: Swap | None
    watch: Watch | None
    router: PolicyRouter
    pins: Pins
    keys: Keys
    metrics: Metrics
    redactor: Redactor
    relay: Relay
    bodies: Bodies
    reads: Turns
    exact: ExactTokens | None
    model_check: ModelCheck
    health: Health
    reach: Reach
    beside: Sequence[Beside]  # what side rooms keep beside rollouts and versions
    also_forget: tuple[Callable[[str], None], ...]  # memories of side rooms

    def forget(self, rollout_id: str, why: str) -> None:
        """Drop all memory of a rollout that was deleted."""
        self.recorder.forget(rollout_id)
        self.pins.forget(rollout_id)
        if self.exact is not None:
            self.exact.forget(rollout_id)
        for forget in self.also_forget:
            forget(rollout_id)
        self.metrics.deleted.labels(why).inc()
