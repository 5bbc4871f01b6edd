"""The proxy's parts, opened and closed in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lightning_proxy.proxy import memory
from lightning_proxy.proxy.auth import Keys
from lightning_proxy.proxy.chosen import Chosen
from lightning_proxy.proxy.config import Config
from lightning_proxy.proxy.continuity import Continuity
from lightning_proxy.proxy.conversations import Conversations
from lightning_proxy.proxy.database import opened
from lightning_proxy.proxy.events import Events
from lightning_proxy.proxy.fleet import open_vllm
from lightning_proxy.proxy.health import Health, check_health
from lightning_proxy.proxy.keeper import Keeper
from lightning_proxy.proxy.keyring import Keyring
from lightning_proxy.proxy.ledger import Ledger
from lightning_proxy.proxy.metrics import Metrics
from lightning_proxy.proxy.policy import Policy, Swap
from lightning_proxy.proxy.publish_mode import publish_mode
from lightning_proxy.proxy.recorder import Recorder
from lightning_proxy.proxy.redact import Redactor
from lightning_proxy.proxy.redacting import RedactingRecorder
from lightning_proxy.proxy.relay import Relay
from lightning_proxy.proxy.store import Store
from lightning_proxy.proxy.telemetry import open_telemetry
from lightning_proxy.proxy.types import PublishMode
from lightning_proxy.proxy.upstream import make_session
from lightning_proxy.proxy.upstreams import Upstreams
from lightning_proxy.proxy.vllm import operator_session


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes work with."""

    config: Config
    publish: PublishMode
    store: Store
    ledger: Ledger
    events: Events
    recorder: Recorder
    policy: Policy
    keys: Keys
    metrics: Metrics
    redactor: Redactor
    relay: Relay
    chosen: Chosen
    health: Health

    def forget(self, rollout_id: str, why: str) -> None:
        """The rollout was deleted."""
        self.recorder.forget(rollout_id)
        self.policy.forget(rollout_id)
        self.relay.forget(rollout_id)
        self.metrics.deleted.labels(why).inc()


@asynccontextmanager
async def open_parts(config: Config) -> AsyncIterator[Parts]:
    """Open the store and the connections, and watch vLLM, until the block is left."""
    mode = publish_mode(config)
    async with opened(config.store) as database, make_session() as data, operator_session() as control:
        store, ledger, metrics = Store(database), Ledger(database), Metrics()
        upstream = next((u for u in config.upstreams if u.kind == "vllm"), None)
        vllm = open_vllm(control, upstream.urls, upstream.credentials) if upstream else None
        swap = Swap(ledger, vllm, mode, config.policy.directory) if vllm else None
        upstreams = Upstreams(data)
        health = upstreams.health
        policy, keys = Policy(config, store, ledger, swap, health), Keys(config.proxy, store, Keyring(database))
        await keys.refresh()
        async with Recorder(store, merged=mode == "merged") as recorder:
            redactor = Redactor(config.recording.redact, config.keys())
            kept = RedactingRecorder(recorder, redactor, metrics.redacted.inc) if redactor else recorder
            exact = config.policy.token_continuity == "exact"
            continuity = Continuity(upstreams, store, metrics.continued) if exact else None
            conversations = Conversations(database)
            telemetry = open_telemetry(config.telemetry, redactor)
            on_end = metrics.call_ended
            relay = Relay(config, upstreams, kept, policy, keys, on_end, continuity, conversations, telemetry)
            events, chosen = Events(database), Chosen(config, ledger, swap)
            parts = Parts(
                config, mode, store, ledger, events, recorder, policy, keys, metrics, redactor, relay, chosen, health
            )
            keeper = Keeper(database, config, parts.forget)
            running = (
                policy.watch(),
                keys.watch(),
                check_health(config, control, health),
                keeper.run(),
                memory.watch(),
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
