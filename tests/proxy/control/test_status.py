"""`GET /status`: what is recorded, what waits for the trainer, and why rollouts are not trained on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.control import status as control
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.waiting import EQUAL_REWARDS
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, RolloutName

NOTHING: dict[str, Any] = {
    "dropped": {}, "untrainable": {}, "publishing": None, "standstill": None, "uncounted": None, "collapse": None,
    "plugins": [], "per_step": 64, "unrewarded": 0, "other_rewards": {},
    "verified": {
        "version": 0, "verified": True, "deviations": None, "difference": None, "by": None, "probed_at": None,
        "problem": None, "story": "the base model: there is nothing to verify",
    },
}  # fmt: skip
OF_SIDE_ROOMS = {"contexts", "spent"}
NO_CALLS = {"calls": 0, "since": None, "by_status": {}, "latency_ms": None, "ttft_ms": None, "response_tokens": 0}
Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_status_counts_rollouts_and_those_that_wait(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        code, status = await system.call("GET", "/status")
        for name in OF_SIDE_ROOMS:
            status.pop(name, None)
        assert (code, status) == (200, {**NOTHING, "rollouts": {}, "waiting": 0, "recent": NO_CALLS})
        await system.chat("r1", X_Task_Id="t1")
        await system.chat("r2", X_Task_Id="t1")
        await system.chat("e1", X_Rollout_Mode="eval")
        await system.call("POST", "/reward", [{"rollout_id": name, "reward": 1.0} for name in ("r1", "e1")])
        code, status = await system.call("GET", "/status")
        assert status.pop("recent")["calls"] == 3
        for name in OF_SIDE_ROOMS:
            status.pop(name, None)
        assert (code, status) == (
            200,
            {
                "rollouts": {"eval": {"completed": 1, "running": 0}, "train": {"completed": 1, "running": 1}},
                **NOTHING,
                "waiting": 1,
            },
        )
        await store.steps.drop({"too long": ["r1"]})
        _, status = await system.call("GET", "/status")
        assert (status["waiting"], status["dropped"]) == (0, {"too long": 1})


async def test_status_says_which_calls_cannot_be_trained_on(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")
        system.vllm.returns_token_ids = False
        await system.chat("r2")
        _, status = await system.call("GET", "/status")
        assert status["untrainable"] == {"no token ids from the upstream": 1}
        _, out, _ = await system.lightning("status")
        shown = " ".join(out.split())
        assert "of the newest 200 calls: no token ids from the upstream (1) `lightning-proxy doctor` says" in shown


async def test_status_says_which_rewards_do_not_count(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        for name in ("r1", "r2", "r3", "r4"):
            await system.chat(name, X_Task_Id="t1")
        other = [{"rollout_id": name, "name": "accuracy", "reward": 1.0} for name in ("r1", "r2")]
        await system.call("POST", "/reward", [*other, {"rollout_id": "r3", "reward": 1.0}])
        await system.call("POST", "/rollouts/r4/end", {"status": "completed"})
        _, status = await system.call("GET", "/status")
        assert (status["waiting"], status["unrewarded"], status["other_rewards"]) == (1, 3, {"accuracy": 2})
        shown = " ".join((await system.lightning("status")).stdout.split())
        assert "3 completed of the newest 200 rollouts have none that counts" in shown
        assert "trainer.reward_weights leaves out what came: accuracy (2)" in shown


async def test_status_says_that_nothing_was_learned_for_three_batches(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        names = [f"r{i}" for i in range(3 * 64)]
        await store.rollouts.open([(RolloutName(name, "t1"), f"hash of {name}") for name in (*names, "next")], {})
        await system.call("POST", "/reward", [{"rollout_id": name, "reward": 0.5} for name in names])
        await store.steps.drop({EQUAL_REWARDS: names[1:], "failed or discarded": names[:1]})
        _, status = await system.call("GET", "/status")
        assert status["standstill"] is None
        await store.steps.drop({EQUAL_REWARDS: names[:1]})
        _, status = await system.call("GET", "/status")
        assert (status["standstill"]["rollouts"], status["standstill"]["reward"]) == (192, 0.5)
        assert "nothing was learned from the newest 192 rollouts (mean reward 0.5)" in status["standstill"]["story"]
        await store.steps.trained(await store.steps.claim(["next"], 0), None, {})
        _, status = await system.call("GET", "/status")
        assert status["standstill"] is None
        assert (await system.call("POST", "/rollouts/next/end", {"status": "completed"}))[0] == 200
        assert (await system.call("DELETE", "/rollouts/next"))[0] == 204
        _, status = await system.call("GET", "/status")
        assert status["standstill"] is None


async def test_status_sums_up_the_newest_calls(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "RECENT_CALLS", 3)
    async with running(tmp_path) as system, system.store() as store:
        async with Recorder(store, merged=False) as recorder:
            for i, (status, usage, took) in enumerate(
                [
                    ("ok", {"completion_tokens": 1000}, 1.0),
                    ("ok", {"completion_tokens": 7}, 10.0),
                    ("error", {"completion_tokens": "many"}, 20.0),
                    ("ok", {"output_tokens": 5}, 60.0),
                ]
            ):
                start = CallStart(f"c{i}", RolloutName("r"), "chat/completions", "policy", 0, {"n": i}, 100.0 + i)
                await recorder.start(start)
                await recorder.end(
                    CallEnd(f"c{i}", "r", status, {}, 200, usage=usage, latency_ms=took, ttft_ms=took / 2)
                )
        _, answer = await system.call("GET", "/status")
        assert answer["recent"] == {
            "calls": 3, "since": 101.0, "by_status": {"ok": 2, "error": 1}, "latency_ms": 20.0, "ttft_ms": 10.0,
            "response_tokens": 12,
        }  # fmt: skip


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


async def test_status_needs_a_key_where_there_are_keys(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["secret"]) as system:
        assert (await system.call("GET", "/status", Authorization=""))[0] == 401
        assert (await system.call("GET", "/status", Authorization="Bearer secret"))[0] == 200


async def test_the_document_describes_status(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        _, document = await system.call("GET", "/openapi.json")
        answer = document["paths"]["/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        properties = document["components"]["schemas"][answer["$ref"].rsplit("/", 1)[1]]["properties"]
        assert set(properties) - OF_SIDE_ROOMS == {"rollouts", "waiting", "recent", *NOTHING}
