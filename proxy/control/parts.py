"""Holds the parts of the proxy that the routes use; `app.py` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..access.auth import Keys
from ..access.limits import Turns
from ..config.root import Config
from ..conversation.exact import ExactTokens
from ..gateway.asgi import Bodies
from ..gateway.relay import Relay
from ..policy.mode import ModeInUse
from ..policy.model_check import ModelCheck
from ..policy.pins import Pins
from ..policy.routing import PolicyRouter
from ..policy.swap import Swap
from ..policy.watch import Watch
from ..recording.metrics import Metrics
from ..recording.recorder import Recorder
from ..recording.redact import Redactor
from ..store.store import Store
from ..upstreams.health import Health, Reach
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
