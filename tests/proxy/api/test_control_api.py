"""What the control API tells of states that no agent can bring about from outside."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from lightning_proxy.core.records import Reward
from support.rewarded import record, train

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


async def test_status_counts_sampled_tokens_without_a_usage_and_says_that_publication_is_stopped(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await record(store, "r", ["ab"], 1.0)
        live = await store.versions.live()
        collapse = {"sign": "kl", "what": "it fell", "at": 1.0, "live_at": live.live_at, "go_back_to": 0}
        await store.steps.trained(await store.steps.claim([], 0), None, {"collapse": collapse})
        answer = await system.get("/status")
        assert answer["recent"]["response_tokens"] == 2
        assert answer["collapse"] == (await system.get("/policy"))["collapse"] == collapse


async def test_status_says_how_the_live_version_was_verified(running: Running, tmp_path: Path) -> None:
    seen = {"verify_deviations": 5.1234, "verify_difference": 0.002}
    async with running(tmp_path, publish="lora") as system, system.store() as store:
        for n, (found, verified, story) in enumerate([
            (seen, True, "the new weights are 5.12 standard deviations from the old"),
            (seen | {"verified_by": "its label"}, True, "by its label alone: the answers of new and old"),
            (seen | {"version": 1}, True, "the margin is not recorded"),
            ({}, False, "not verified yet: merged weights on a single server are compared once they answer agents"),
        ], 1):  # fmt: skip
            step = await store.steps.claim([], n - 1)
            await store.steps.trained(step, None, {"version": n, **found})
            assert await store.versions.new("lora", step, {}) == n
            await store.versions.set_live(n, step, verified=verified)
            answer = await system.get("/status")
            assert answer["verified"]["story"].startswith(story)
            shown = (await metrics(system))["lightning_policy_verify_deviations"]
            assert shown == (answer["verified"]["deviations"] or 0.0)


async def test_a_step_that_is_undone_takes_its_credit_with_it_and_a_new_one_takes_the_place_of_the_old(
    running: Running, tmp_path: Path
) -> None:
    async def shown(system: Any) -> list[tuple[Any, ...]]:
        answer = await system.get("/rollouts/good/rows")
        return [(call["step"], call["return"], call["placed"]) for call in answer["calls"]]

    async with running(tmp_path) as system, system.store() as store:
        for name in ("good", "bad"):
            await record(store, name, ["a", "b"], float(name == "good"))
        first = await train(store)
        assert await store.steps.release_unfinished() == [first]
        assert [placed for *_, placed in await shown(system)] == [None] * 2
        await store.steps.trained(await train(store), None, {})
        await store.rewards.post([Reward(name, 5.0 * i, retrain=True) for i, name in enumerate(("good", "bad"))])
        second = await train(store)
        assert await shown(system) == [(second, 0.0, "first"), (second, 0.0, "merged")]
        await store.steps.forget_all()
        assert [step for step, *_ in await shown(system)] == [None] * 2
