"""The proxy's parts, opened and closed in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from .. import memory
from ..access.auth import Keys
from ..config.root import Config
from ..conversation.exact import ExactTokens, RecentTurns
from ..conversation.unnamed import UnnamedRollouts
from ..gateway.relay import Relay
from ..otel.telemetry import open_telemetry
from ..policy.mode import publish_mode
from ..policy.model_check import ModelCheck
from ..policy.pins import Pins
from ..policy.routing import PolicyRouter
from ..policy.swap import Swap
from ..policy.vllm import VllmFleet, operator_session
from ..policy.watch import Watch
from ..recording.metrics import Metrics
from ..recording.recorder import Recorder
from ..recording.redact import Redactor
from ..recording.redacting import RedactingRecorder
from ..store.database import opened
from ..store.retention import Keeper
from ..store.store import Store
from ..types import PublishMode
from ..upstreams.attempts import Upstreams
from ..upstreams.health import Health, check_health
from ..upstreams.http import make_session


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes work with."""

    config: Config
    publish: PublishMode
    store: Store
    recorder: Recorder
    swap: Swap | None
    watch: Watch | None
    pins: Pins
    keys: Keys
    metrics: Metrics
    redactor: Redactor
    relay: Relay
    model_check: ModelCheck
    health: Health

    def forget(self, rollout_id: str, why: str) -> None:
        """The rollout was deleted."""
        self.recorder.forget(rollout_id)
        self.pins.forget(rollout_id)
        self.relay.forget(rollout_id)
        self.metrics.deleted.labels(why).inc()


@asynccontextmanager
async def open_parts(config: Config) -> AsyncIterator[Parts]:
    """Open the store and the connections, and watch vLLM, until the block is left."""
    mode = publish_mode(config)
    async with opened(config.store) as database, make_session() as data, operator_session() as control:
        store, metrics = Store(database), Metrics()
        upstream = next((u for u in config.upstreams if u.kind == "vllm"), None)
        upstreams = Upstreams(data)
        health = upstreams.health
        pins = Pins(store, config.policy.pin_timeout_s)
        swap = watch = None
        if upstream is not None:
            vllm = VllmFleet(control, upstream.urls, upstream.credentials)
            swap = Swap(store, vllm, mode, config.policy.directory)
            watch = Watch(swap, upstream, pins, health)
        router = PolicyRouter(config, store, pins, watch)
        keys = Keys(config.proxy, store)
        await keys.refresh()
        async with Recorder(store, merged=mode == "merged") as recorder:
            redactor = Redactor(config.recording.redact, config.keys())
            kept = RedactingRecorder(recorder, redactor, metrics.redacted.inc) if redactor else recorder
            exact = config.policy.token_continuity == "exact"
            continuity = ExactTokens(upstreams, RecentTurns(store), metrics.continued) if exact else None
            conversations = UnnamedRollouts(store)
            telemetry = open_telemetry(config.telemetry, redactor)
            on_end = metrics.call_ended
            relay = Relay(config, upstreams, kept, router, keys, on_end, continuity, conversations, telemetry)
            model_check = ModelCheck(config, store, swap)
            parts = Parts(
                config,
                mode,
                store,
                recorder,
                swap,
                watch,
                pins,
                keys,
                metrics,
                redactor,
                relay,
                model_check,
                health,
            )
            keeper = Keeper(database, config, parts.forget)
            running = (
                keys.watch(),
                check_health(config, control, health),
                keeper.run(),
                memory.watch(),
                *([watch.run()] if watch is not None else []),
            )
            beside = [asyncio.create_task(one) for one in running]
            try:
                yield parts
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                await upstreams.close()
                if telemetry is not None:
                    await telemetry.close()
