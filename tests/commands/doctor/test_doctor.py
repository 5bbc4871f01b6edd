"""`doctor` on a whole system, and on one with each link broken."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.doctor.doctor import Check, Report, run_checks
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.store.opening import opened
from lightning_proxy.trainer.lock import only_trainer
from support.command_line import lightning

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def made(path: Path) -> list[Check]:
    report = Report(as_json=True)
    await run_checks(path, report)
    return report.checks


async def checks(system: Any) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads((await system.lightning("doctor", "--json")).stdout)}


async def test_what_an_agents_key_cannot_delete_is_told(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_API_KEY", "agent")
    async with running(tmp_path, api_keys=["agent"], admin_keys=["admin"]) as system:
        alias = (await checks(system))["alias"]
        assert alias["outcome"] == "ok" and "stays: only an admin's key deletes it" in alias["found"]


async def test_it_says_whether_a_trainer_runs_and_what_a_step_needs(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for task in range(system.config.trainer.tasks_per_step):
            names = [f"r{task}-{i}" for i in range(system.config.trainer.group_size)]
            await store.rollouts.open([(RolloutName(name, f"t{task}"), f"hash of {name}") for name in names], {})
            for name in set(names) - {"r0-0"}:
                await store.rewards.post([Reward(name, 0.5)])
                await system.chat(name)
        found = await checks(system)
        assert found["trainer"]["outcome"] == "ok"
        assert found["next step"]["found"].endswith("; 1 more has begun, 1 rollout short")
        await store.rewards.post([Reward("r0-0", 0.5)])
        found = await checks(system)
        assert found["trainer"]["outcome"] == "warning" and found["next step"]["found"].endswith("it can be made")
        with only_trainer(tmp_path / "policy", system.config.store.path):
            assert (await checks(system))["trainer"]["found"] == "one runs on this store"


async def test_where_nothing_was_ever_started_it_asks_whether_the_system_runs_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/new/s.db'}}\n")
    found = {check.name: check for check in await made(path)}
    assert (found["store"].outcome, "not there yet" in found["store"].found) == ("ok", True)
    assert "if it runs already, run doctor where it was started" in (found["proxy"].fix or "")
    codes = [lightning("--config", path, "keys", *words).returncode for words in (["list"], ["purge"], ["revoke", "x"])]
    assert codes == [0, 0, 1]
    assert [one.name for one in tmp_path.iterdir()] == ["config.yaml"], "looking makes no store"


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_full_disk_is_a_failed_check(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/s.db'}}\n")
    if is_there:
        async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/s.db")):
            pass
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))  # as if there was no room for more
    try:
        store = {check.name: check for check in await made(path)}["store"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (store.outcome, "full" in store.found) == ("failed", True), store
