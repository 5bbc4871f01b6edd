"""Commands that look at a running system and steer it, from outside: a real proxy, a real store, real processes."""

from __future__ import annotations

import asyncio
import re
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
    "reward_mean": 0.5, "reward_std": 0.31, "groups": 8.0, "groups_trained": 6.0, "publish_s": 3.5,
    "left_out_because": "67% of the calls are left out, 4 of them because: a budget",
}  # fmt: skip


async def test_ready_versions_are_those_that_can_be_promoted(start: Any, tmp_path: Path) -> None:
    async with start() as system, system.store() as store:
        for _ in range(2):
            await system.earlier_version(store, tmp_path)
        (tmp_path / "v1").rmdir()
        other = await store.versions.new("lora", 1, {})
        await store.versions.saved(other, str(tmp_path), "policy-v3")
        await store.versions.set_live(other, 1)
        await store.versions.set_live(0)
        await store.versions.failed(await store.versions.new("merged", 1, {}), "no")
        out = (await system.lightning("policy", "list")).stdout
        told = {line.split()[0]: line for line in out.splitlines()[1:]}
        states = {"0": "live", "1": "files gone", "2": "ready", "3": "other mode", "4": "failed"}
        assert {version for version, state in states.items() if state not in told[version]} == set(), out
        assert " no  " in told["4"], "it was not verified"
        assert max(map(len, out.splitlines())) <= 80
        for version in (await system.get("/policy/versions"))["data"]:
            done = await system.lightning("policy", "promote", str(version["version"]))
            assert (done.returncode == 0) == version["promotable"] == (version["obstacle"] is None), (version, done)


async def test_a_step_and_a_collapse_are_said_everywhere_until_a_version_is_made_live_by_hand(start: Any) -> None:
    async with start() as system, system.store() as store:
        console = Console(file=(out := StringIO()), width=80)
        await store.steps.trained(await store.steps.claim([], 0), None, STEP)
        view = UpView(console)
        telling = asyncio.create_task(print_steps(system.config.store, view.step, view.say))
        await asyncio.sleep(0.3)  # until the first look, which shows nothing
        what = "the reward fell from 0.9 to 0.1 with policy version 1 (7.2 sigmas, 64 rollouts or tasks on each side)"
        collapse = asdict(Collapse("reward", what, time.time(), (await store.versions.live()).live_at, 0))
        metrics = STEP | {"warnings": {"reward": what}, "collapse": collapse}
        await store.steps.trained(await store.steps.claim([], 0), None, metrics)
        assert (await system.get("/policy"))["collapse"] == collapse
        told = " ".join((await system.lightning("status")).stdout.split())
        for said in (
            "step 1 reward 0.500 ± 0.31 6/8 groups", STEP["left_out_because"], f"s: {what}. Agents are served",
            "`lightning-proxy policy promote 0`", f"warning {what}",
        ):  # fmt: skip
            assert said in told
        async with system.session.get(system.url + "/metrics") as answer:
            signs = re.findall(r'lightning_policy_collapsed{sign="(reward|kl)"} (.*)', await answer.text())
        assert sorted(signs) == [("kl", "0.0"), ("reward", "1.0")]
        while "stopped: the reward fell" not in out.getvalue():
            await asyncio.sleep(0.05)
        await system.post("/policy/promote", {"version": 0})
        assert (await system.get("/policy"))["collapse"] is None
        assert "stopped" not in (await system.lightning("status")).stdout.split("step ")[0]
        while "no longer stopped" not in out.getvalue():
            await asyncio.sleep(0.05)
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling
        assert out.getvalue().count("step 2") == 1 and "step 1" not in out.getvalue()


def test_what_was_recorded_is_no_markup() -> None:
    console = Console(width=100, file=StringIO(), record=True)
    console.print(table("a", rows=[("[red]cell[/red]",)]), facts([("b", "[red]fact[/red]")]))
    assert [text in console.export_text(clear=False) for text in ("[red]cell[/red]", "[red]fact[/red]")] == [True] * 2
