"""Jobs of a `run` that was killed: the next one deletes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.executors.kubernetes import cluster as api
from lightning_proxy.commands.run.journal import Journal, fail_left
from lightning_proxy.commands.run.run import RunOptions
from support.control_api import ControlApi
from support.played_kubernetes import PlayedCluster
from support.running import Program, run_all, task


@pytest.mark.parametrize("refused", [False, True])
async def test_the_next_run_deletes_the_jobs_of_a_killed_one_and_no_others(
    proxy: ControlApi, kubernetes: PlayedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    monkeypatch.setattr(api, "PATIENCE_S", 0.0)
    run = {"executor": "kubernetes", "proxy_url": proxy.url, "kubernetes": {"image": "agent:1"}}
    program = Program("kubernetes", run)
    sleeps = program(tmp_path, "import time; time.sleep(1000)")
    tasks = [task(1), task(2)]
    running = asyncio.create_task(run_all(proxy, sleeps, tasks, RunOptions(concurrency=2)))
    while [pod["status"]["phase"] for pod in kubernetes.pods.values()] != ["Running"] * 2:
        await asyncio.sleep(0.02)
    journal = Journal(proxy.url)  # as if its run had been killed
    journal.opened(["r0"])
    journal.close(keep=True)
    kubernetes.away = 1000 if refused else 0
    next_one = program.command("true")
    async with ApiClient(proxy.url) as client:
        assert await fail_left(client, next_one) == 1
    kubernetes.away = 0
    await next_one.close()
    assert proxy.rollouts["r0"]["status"] == "failed"
    left = {job["metadata"]["annotations"]["lightning-proxy/rollout"] for job in kubernetes.jobs.values()}
    assert ("r0" in left, "r1" in left) == (refused, True)
    assert any("may be left there" in said for said in program.said) is refused
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
