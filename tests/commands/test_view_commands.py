"""Commands that look at a running system and steer it, from outside: a real proxy, a real store, real processes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_proxy.commands.formats import facts, table
from lightning_proxy.commands.system.steps import print_steps
from lightning_proxy.commands.system.up import UpView
from lightning_proxy.store.training import Collapse

STEP = {
    "reward_mean": 0.5, "reward_std": 0.31, "groups": 8.0, "groups_trained": 6.0, "trained_tokens": 3240.0,
    "kl": 0.0021, "clip_share": 0.02, "entropy": 1.3, "step_s": 2.1, "publish_s": 3.5, "trained_tokens_per_s": 1540.0,
    "advantage_std": 0.9, "ratio_mean": 1.01,
}  # fmt: skip


async def test_ready_versions_are_those_that_can_be_promoted(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        versions = [await system.earlier_version(store, tmp_path) for _ in range(3)]
        (tmp_path / "v1").rmdir()
        other = await store.versions.new("lora", 1, {})
        await store.versions.saved(other, str(tmp_path), "policy-v4")
        await store.versions.set_live(other, 1)
        await store.versions.set_live(0)
        failed = await store.versions.new("merged", 1, {})
        await store.versions.failed(failed, "no")
        assert (versions, other, failed) == ([1, 2, 3], 4, 5)
        _, out, _ = await system.lightning("policy", "list")
        told = {line.split()[0]: line for line in out.splitlines()[1:]}
        states = ["live", "files gone", "ready", "ready", "other mode", "failed"]
        assert " no  " in told["5"], "it was not verified"
        assert [state for state, line in zip(states, told.values(), strict=True) if state not in line] == [], out
        assert max(map(len, out.splitlines())) <= 80
        _, listed = await system.call("GET", "/policy/versions")
        for version in listed["data"]:
            code, said, err = await system.lightning("policy", "promote", str(version["version"]))
            assert (code == 0) == version["promotable"] == (version["obstacle"] is None), (version, said, err)


async def test_status_shows_the_last_steps_and_counts_rollouts(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await system.chat("r1")
        left_out = {"left_out_because": "67% of the calls are left out, 4 of them: a budget"}
        await store.steps.trained(await store.steps.claim(["r1"], 0), None, STEP | left_out)
        code, out, _ = await system.lightning("status")
        told = " ".join(out.split())
        words = ("ready", "version 0", "1 running", "step 1 reward 0.500 ± 0.31 6/8 groups", *left_out.values())
        assert code == 0 and [word for word in words if word not in told] == []
        await system.chat("r2", X_Task_Id="t1")
        await system.lightning("reward", "r2", "1")
        found = json.loads((await system.lightning("status", "--json"))[1])
        assert (found["rollouts"]["train"], found["waiting"]) == ({"completed": 1, "running": 1}, 1)
        assert found["next_step"] == "1 complete rollouts wait; it takes 8 groups of 8"
        await store.steps.drop({"all rewards of the group are equal": ["r2"]})
        assert "of the newest 200 rollouts: all rewards" in (await system.lightning("status"))[1]


async def test_a_collapse_is_said_everywhere_until_a_version_is_made_live_by_hand(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        console = Console(file=StringIO(), width=80)
        assert isinstance(console.file, StringIO)
        await store.steps.trained(await store.steps.claim([], 0), None, STEP)
        view = UpView(console)
        telling = asyncio.create_task(print_steps(system.config.store, view.step, view.say))
        await asyncio.sleep(0.3)  # until the first look, which shows nothing
        what = "the reward fell from 0.9 to 0.1 with policy version 1 (7.2 sigmas, 64 compared with 64)"
        collapse = Collapse("reward", what, time.time(), (await store.versions.live()).live_at, 0)
        metrics = {**STEP, "warnings": {"reward": what}, "collapse": asdict(collapse)}
        await store.steps.trained(await store.steps.claim([], 0), None, metrics)
        assert (await system.call("GET", "/policy"))[1]["collapse"] == asdict(collapse)
        _, out, _ = await system.lightning("status")
        for said in (f"s: {what}. Agents are served", "`lightning-proxy policy promote 0`", f"warning {what}"):
            assert said in " ".join(out.split())
        async with system.session.get(system.url + "/metrics") as answer:
            text = await answer.text()
        assert 'lightning_policy_collapsed{sign="reward"} 1.0' in text
        assert 'lightning_policy_collapsed{sign="kl"} 0.0' in text
        while "stopped: the reward fell" not in console.file.getvalue():
            await asyncio.sleep(0.05)
        assert (await system.call("POST", "/policy/promote", {"version": 0}))[0] == 200
        assert (await system.call("GET", "/policy"))[1]["collapse"] is None
        assert "stopped" not in (await system.lightning("status"))[1].split("step ")[0]
        while "not stopped any more" not in console.file.getvalue():
            await asyncio.sleep(0.05)
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling
        assert console.file.getvalue().count("step 2") == 1 and "step 1" not in console.file.getvalue()


def test_what_was_recorded_is_no_markup() -> None:
    console = Console(width=100, file=StringIO(), record=True)
    console.print(table("a", rows=[("[red]cell[/red]",)]), facts([("b", "[red]fact[/red]")]))
    assert [text in console.export_text(clear=False) for text in ("[red]cell[/red]", "[red]fact[/red]")] == [True] * 2
