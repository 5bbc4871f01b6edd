"""`GET /status`: what is recorded, what waits for the trainer, and why rollouts are not trained on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from lightning_proxy.core.records import CallEnd, CallStart, Choice, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_sampled_tokens_are_counted_where_no_usage_was_reported(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        async with Recorder(store, merged=False) as recorder:
            await recorder.start(CallStart("c", RolloutName("r"), "chat/completions", "policy", 0, {}, 1.0))
            await recorder.end(CallEnd("c", "r", "ok", {}, 200, (1,), (Choice(0, (2, 3), (-1.0, -1.0)),)))
        _, answer = await system.call("GET", "/status")
        assert answer["recent"]["response_tokens"] == 2


async def test_status_says_that_publication_is_stopped(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        live = await store.versions.live()
        collapse = {"sign": "entropy", "what": "it fell", "at": 1.0, "live_at": live.live_at, "go_back_to": 0}
        await store.steps.trained(await store.steps.claim([], 0), None, {"collapse": collapse})
        _, answer = await system.call("GET", "/status")
        assert answer["collapse"] == (await system.call("GET", "/policy"))[1]["collapse"] == collapse


async def test_status_says_how_the_live_version_was_verified(running: Running, tmp_path: Path) -> None:
    seen = {"verify_deviations": 5.1234, "verify_difference": 0.002}
    async with running(tmp_path, publish="lora") as system, system.store() as store:
        for n, (metrics, verified, story) in enumerate([
            (seen, True, "the new weights are 5.12 standard deviations from the old"),
            (seen | {"verified_by": "its label"}, True, "by its label alone: answers did not tell"),
            (seen | {"version": 1}, True, "it was verified; how clearly is not recorded"),
            ({}, False, "not verified yet: merged weights on a single server are compared once they answer agents"),
        ], 1):  # fmt: skip
            step = await store.steps.claim([], n - 1)
            await store.steps.trained(step, None, {"version": n, **metrics})
            assert await store.versions.new("lora", step, {}) == n
            await store.versions.set_live(n, step, verified=verified)
            _, answer = await system.call("GET", "/status")
            assert answer["verified"]["story"].startswith(story)
            _, out, _ = await system.lightning("status")
            assert f"verified {story}" in " ".join(out.split())
            async with system.session.get(system.url + "/metrics") as found:
                assert f"lightning_policy_verify_deviations {answer['verified']['deviations'] or 0.0}\n" in (
                    await found.text()
                )
