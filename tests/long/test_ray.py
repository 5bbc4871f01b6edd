"""Programs as tasks of a real Ray cluster on this machine: a head, and two nodes with addresses of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.run.run import RunOptions
from lightning_proxy.core.errors import LightningError
from support.control_api import ControlApi, Program, run_all, served, task
from support.ray_cluster import RayCluster, ray_cluster

pytest.importorskip("ray")
SLEEPS = "import os, time; open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n'); time.sleep(1000)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        cluster.add_node("127.0.0.3")
        yield cluster


@pytest.fixture
async def proxy() -> AsyncIterator[ControlApi]:
    async with served() as api:
        yield api


def by_ray(cluster: RayCluster, proxy: ControlApi | None, **ray: Any) -> Program:
    url = {} if proxy is None else {"proxy_url": proxy.url}
    config: dict[str, Any] = {"run": {"executor": "ray", **url}, "ray": {"address": cluster.address, **ray}}
    return Program("ray", config | {"recording": {"redact": {"secrets": True}}})


async def written(path: Path, lines: int) -> list[int]:
    while not path.exists() or path.read_text().count("\n") < lines:
        await asyncio.sleep(0.05)
    return [int(line) for line in path.read_text().split()]


async def gone(pids: list[int]) -> None:
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.05)


async def test_a_program_on_a_node_that_goes_away_fails_and_the_others_go_on(
    cluster: RayCluster, proxy: ControlApi, tmp_path: Path
) -> None:
    removed = cluster.add_node("127.0.0.4")
    pids, logs = tmp_path / "pids", tmp_path / "logs"
    ray = {"runtime_env": {"env_vars": {"PIDS": str(pids)}}}
    text = f"import os\nif os.environ['LIGHTNING_ROLLOUT_ID'] in ('r0', 'r1'):\n    {SLEEPS.replace('1000', '30')}"
    runner = by_ray(cluster, proxy, **ray)(tmp_path, text)
    options = RunOptions(group_size=3, concurrency=2, logs=logs)
    running = asyncio.create_task(run_all(proxy, runner, [task(1)], options))
    first = await written(pids, 2)
    cluster.remove_node(removed)
    results = await running
    (lost,) = [result for result in results if result.failed]
    assert lost.reason is not None and lost.reason.startswith("Ray lost the run"), lost.reason
    assert sorted(str(rollout["status"]) for rollout in proxy.rollouts.values()) == ["failed", "running", "running"]
    await gone(first)


async def test_a_log_is_written_as_the_program_goes_without_secrets(
    cluster: RayCluster, proxy: ControlApi, tmp_path: Path
) -> None:
    go, log, secret = tmp_path / "go", tmp_path / "logs" / "r0.log", "sk-" + "A1b2C3d4" * 4
    text = (
        f"import pathlib, time\nprint('one', {secret!r}, flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\nprint('two' * 100_000, end='')"
    )
    runner = by_ray(cluster, proxy)(tmp_path, text)
    running = asyncio.create_task(run_all(proxy, runner, [task(1)], RunOptions(logs=log.parent)))
    while not log.exists() or log.read_text() != "one [redacted]\n":
        await asyncio.sleep(0.05)
    assert log.stat().st_mode & 0o077 == 0
    go.touch()
    await running
    assert log.read_text() == "one [redacted]\n" + "two" * 100_000


@pytest.mark.parametrize(
    ("ray", "told"),
    [
        ({"address": "127.0.0.2:9"}, "no Ray cluster answers at '127.0.0.2:9'"),
        ({"runtime_env": {"working_dir": "/nowhere"}}, "the Ray cluster cannot be used: .*nowhere"),
        ({"runtime_env": {"env_vars": {"A": 1}}}, "the Ray cluster cannot be used: .*env_vars"),
        ({"runtime_env": {"pip": ["/nowhere"]}}, "Ray cannot run the program: Failed to set up runtime environment"),
        ({}, r"the Ray cluster has \d machines, .* set run"),
    ],
    ids=["address", "directory", "type", "package", "several machines"],
)
async def test_a_cluster_that_cannot_be_used_is_one_error(
    cluster: RayCluster, proxy: ControlApi, tmp_path: Path, ray: dict[str, Any], told: str
) -> None:
    runner = by_ray(cluster, proxy if ray else None, **ray)(tmp_path, "pass")
    with pytest.raises(LightningError, match=told):
        await run_all(proxy, runner, [task(1)], RunOptions())
    assert proxy.rollouts["r0"]["status"] == "discarded"


async def test_a_cluster_that_goes_away_fails_what_ran_on_it(proxy: ControlApi, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with ray_cluster() as cluster:
        cluster.add_node("127.0.0.3")
        runner = by_ray(cluster, proxy, runtime_env={"env_vars": {"PIDS": str(pids)}})(tmp_path, SLEEPS)
        running = asyncio.create_task(run_all(proxy, runner, [task(1)], RunOptions()))
        begun = await written(pids, 1)
        cluster.close()
        (result,) = await running
        await gone(begun)
    assert (result.reason or "").startswith(("the Ray driver died", "Ray lost the run"))  # by who is gone first
    assert proxy.rollouts[result.rollout_id]["status"] == "failed"
