"""What `/metrics` says of the store, the disks and the trainer: what the alerts in deploy/ ask for."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from lightning_proxy.core.records import CallEnd
from lightning_proxy.core.tokens import NO_TOKEN_IDS, NOT_THE_POLICY
from lightning_proxy.proxy.gateway.metrics import Metrics

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def metrics(system: Any) -> dict[str, float]:
    async with system.session.get(system.url + "/metrics") as answer:
        assert answer.status == 200
        return {name: float(value) for name, value in re.findall(r"^(lightning_\S+) (\S+)$", await answer.text(), re.M)}


async def test_a_step_under_way_says_since_when(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        assert (await metrics(system))["lightning_step_began_seconds"] == 0
        step = await store.steps.claim([], 0)
        began = await store.steps.under_way_since()
        found = await metrics(system)
        assert began is not None and found["lightning_step_began_seconds"] == began
        assert found["lightning_rollouts_per_step"] == system.config.trainer.rollouts_per_step
        await store.steps.trained(step, None, {})
        assert (await metrics(system))["lightning_step_began_seconds"] == 0


def test_calls_of_other_models_than_the_policy_are_not_counted_as_untrainable() -> None:
    metrics = Metrics()
    for why in (NOT_THE_POLICY, NO_TOKEN_IDS):
        metrics.call_ended(CallEnd("c", "r", "ok", {}, 200, (), (), untrainable_reason=why), recorded=True)
    assert b"lightning_untrainable_calls_total 1.0" in metrics.render()
