"""Rewards of single calls are what a rollout earned, wherever one looks: routes, commands, exports, fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.trainer.report.batch_metrics import Seen
from lightning_proxy.trainer.tuning.rollouts import RolloutReader, as_sampled

Running = Callable[..., AbstractAsyncContextManager[Any]]

WEIGHTS = {"reward": 1.0, "style": 0.5}
EARNED = {"high": 1.25, "low": 0.25, "own": 0.5, "zero": 0.0}


async def play(system: Any) -> None:
    """Rollouts of one task; the first two have rewards of calls alone."""
    for name in EARNED:
        for _ in range(2):
            await system.chat(name, X_Task_Id="t")
    first, second = [
        {name: (await system.call("GET", f"/rollouts/{name}"))[1]["calls"][i]["call_id"] for name in EARNED}
        for i in range(2)
    ]
    posts = [
        ("high", first["high"], "reward", 0.0), ("high", first["high"], "reward", 1.0),  # the newest counts
        ("high", second["high"], "style", 0.5), ("high", second["high"], "unknown", 9.0),
        ("low", first["low"], "reward", 0.25),
        ("own", first["own"], "reward", 7.0), ("own", None, "reward", 0.5),
        ("zero", None, "style", 0.0),
    ]  # fmt: skip
    body = [{"rollout_id": r, "call_id": c, "name": name, "reward": value} for r, c, name, value in posts]
    assert (await system.call("POST", "/reward", body))[0] == 200
    for name in ("high", "low"):
        await system.call("POST", f"/rollouts/{name}/end", {"status": "completed"})


async def test_every_route_and_command_shows_the_return_that_is_trained(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, trainer={"reward_weights": WEIGHTS}) as system:
        await play(system)

        async def get(path: str) -> Any:
            return (await system.call("GET", path))[1]

        listed = {r["rollout_id"]: r["reward"] for r in (await get("/rollouts"))["data"]}
        assert listed == EARNED
        assert [r["rollout_id"] for r in (await get("/rollouts?min_reward=0.5"))["data"]] == ["own", "high"]
        assert [r["rollout_id"] for r in (await get("/rollouts?max_reward=0.25"))["data"]] == ["zero", "low"]
        high = await get("/rollouts/high")
        assert (high["reward"], high["own_reward"], [call["reward"] for call in high["calls"]]) == (
            1.25,
            None,
            [1, 0.25],
        )
        rewards = [t["reward"] for t in (await get("/rollouts/high/transitions"))["data"]]
        assert rewards == [1.0, 0.25]  # not counted twice at the end
        assert [t["reward"] for t in (await get("/rollouts/own/transitions"))["data"]] == [7.0, 0.5]
        (task,) = (await get("/tasks"))["data"]
        assert (task["rewarded"], task["mean"], task["min"], task["max"]) == (4, 0.5, 0.0, 1.25)
        (version,) = (await get("/policy/versions"))["data"]
        assert version["rewards"]["train"] == {"mean": 0.5, "rollouts": 4}
        compared = await get("/policy/compare?a=0&b=0")
        assert (compared["mean_a"], compared["data"][0]["a"]["rollouts"]) == (0.5, 4)
        assert {r["rollout_id"]: r["reward"] for r in (await get("/rollouts/high/rows"))["group"]} == EARNED

        shown = await system.lightning("rollouts", "list", "--min-reward", "1", "--json")
        assert [r["rollout_id"] for r in json.loads(shown.stdout)["data"]] == ["high"]
        assert "1.25, that of its calls" in (await system.lightning("rollouts", "show", "high")).stdout
        told = (await system.lightning("doctor")).stdout
        assert "4 of the newest 4 ended training rollouts have one" in told
        for kind, least, rows in (("sft", "1", 1), ("transitions", "0.25", 6)):
            out = tmp_path / f"{kind}.jsonl"
            await system.lightning("export", out, "--kind", kind, "--min-reward", least)
            found = [json.loads(line) for line in out.read_text().splitlines()]
            name = "reward" if kind == "sft" else "rollout_reward"
            assert len(found) == rows and all(row[name] == EARNED[row["rollout_id"]] for row in found)

        async with system.store() as store:
            reader = RolloutReader(system.config.trainer, store, as_sampled, 100)
            assert {one.rollout.rollout_id: one.reward for one in await reader.rewarded(None, Seen())} == EARNED


async def test_other_weights_at_the_next_start_count_for_what_was_recorded_before(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path, trainer={"reward_weights": WEIGHTS}) as system:
        await play(system)
    async with running(tmp_path, trainer={"reward_weights": {"unknown": 2.0}}) as system, system.store() as store:
        await store.returns.settle()
        listed = {r["rollout_id"]: r["reward"] for r in (await system.call("GET", "/rollouts"))[1]["data"]}
        assert listed == {"high": 18.0, "low": None, "own": None, "zero": None}


async def test_doctor_names_rewards_that_do_not_count(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r")
        await system.call("POST", "/reward", {"rollout_id": "r", "reward": 1, "name": "score"})
        told = " ".join((await system.lightning("doctor")).stdout.split())
        assert "0 of the newest 1 ended training rollouts have one" in told
        assert "they have rewards named score: give these names weights in trainer.reward_weights" in told


@pytest.mark.parametrize("status", ["completed", "failed"])
async def test_a_failed_rollout_has_the_reward_that_failures_have_in_training(
    running: Running, tmp_path: Path, status: str
) -> None:
    async with running(tmp_path, trainer={"failed_rollouts": -1.0}) as system:
        await system.chat("r")
        await system.call("POST", "/rollouts/r/end", {"status": status})
        assert (await system.call("GET", "/rollouts/r"))[1]["reward"] == {"completed": None, "failed": -1.0}[status]
