"""The proxy as processes: workers over one store, killed under load, and a proxy that is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from support.served import Client, Proxy, proxy_in_front, settled, workers


@asynccontextmanager
async def two_workers(directory: Path) -> AsyncIterator[Proxy]:
    async with proxy_in_front(directory) as proxy:
        proxy.set("proxy", workers=2)
        proxy.set("store", busy_timeout_s=20)
        await proxy.start()
        await settled(proxy, 2)
        yield proxy
        await proxy.end(signal.SIGTERM)


async def test_a_killed_worker_has_lost_no_answer_another_takes_its_place_and_metrics_are_those_of_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with two_workers(tmp_path) as proxy:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # so each call goes to a worker of its own
        async with aiohttp.ClientSession(connector=connector) as session:
            client = Client(proxy, "c")
            await asyncio.gather(*(client.turn(session, f"r{i}", stream=False) for i in range(40)))
            for _ in range(6):
                async with session.get(proxy.url + "/metrics") as answer:
                    text = await answer.text()
                assert re.findall(r'^lightning_calls_total\{status="ok"\} (\S+)$', text, re.MULTILINE) == ["40.0"]
                assert re.findall(r'^lightning_rollouts\{.*"completed"\} (\S+)$', text, re.MULTILINE) == ["40.0"]

            async def work(talker: Client, rollout_id: str) -> None:
                for turn in itertools.count():
                    with contextlib.suppress(aiohttp.ClientError):
                        await talker.turn(session, rollout_id, stream=turn % 2 == 0)

            talkers = [Client(proxy, f"t{i}") for i in range(12)]
            working = [asyncio.create_task(work(talker, f"shared-{i % 4}")) for i, talker in enumerate(talkers)]
            await asyncio.sleep(1)
            killed = min(workers(proxy))
            os.kill(killed, signal.SIGKILL)
            await settled(proxy, 2, without={killed})
            assert f"worker {killed} died (signal SIGKILL): another was started" in capfd.readouterr().err
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            received = {call for talker in talkers for call in talker.calls}
            assert {200} == set().union(*(talker.statuses for talker in talkers))
            assert received <= {call for (call,) in proxy.rows("SELECT call_id FROM calls WHERE status = 'ok'")}
            for i in range(4):
                async with session.get(f"{proxy.url}/rollouts/shared-{i}") as answer:
                    calls = (await answer.json())["calls"]
                assert [call["seq"] for call in calls] == list(range(len(calls)))
                assert received & {call["call_id"] for call in calls}


async def test_workers_end_with_their_supervisor_however_it_ends_and_leave_the_port(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as proxy, aiohttp.ClientSession() as session:
        assert proxy.process is not None
        for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)):
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True, "pause_s": 1}
            async with session.post(f"{proxy.url}/rollouts/long/v1/chat/completions", json=body) as answer:
                await answer.content.readany()  # it is under way
                left = workers(proxy)
                await proxy.end(number)
            assert proxy.process.returncode == code
            await proxy.start()
            await settled(proxy, 2, without=left)
            assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


@pytest.mark.long  # uvicorn waits half a minute for a worker that has gone
def test_workers_that_cannot_start_end_the_proxy_with_an_error(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    settings = {"proxy": {"workers": 2, "port": 0}, "store": {"url": f"sqlite:///{tmp_path}/store.db"}}
    config.write_text(yaml.safe_dump(settings | {"otel": {"otlp_endpoint": "http://127.0.0.1:9"}}))
    command = [sys.executable, "-m", "lightning_proxy.cli", "--config", str(config), "serve"]
    broken = os.environ | {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "99999"}  # larger than the queue
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=broken)
    assert done.returncode == 1
    assert "max_export_batch_size" in done.stderr
    assert "a worker of the proxy could not start" in done.stderr.splitlines()[-1]


# Asked to stop

PAUSE_S = 0.8  # between the tokens of an answer, of which there are five


async def answer(proxy: Proxy, session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
    """An answer that has begun."""
    body = {"model": "policy", "stream": True, "pause_s": PAUSE_S, "messages": [{"role": "user", "content": "hi"}]}
    begun = await session.post(f"{proxy.url}/v1/chat/completions", json=body)
    await begun.content.readany()
    return begun


async def refused(proxy: Proxy) -> None:
    """Ask for readiness until nobody listens any more."""
    while True:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(f"{proxy.url}/readyz"):
                    await asyncio.sleep(0.02)
            except aiohttp.ClientConnectorError:
                return
            except aiohttp.ClientError:  # the connection was there just before
                continue


def ask_to_stop(proxy: Proxy, number: signal.Signals) -> None:
    assert proxy.process is not None
    proxy.process.send_signal(number)


async def test_an_answer_that_takes_longer_is_said_and_cut_off(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        proxy.set("proxy", stop_timeout_s=0.2)
        await proxy.start()
        begun = await answer(proxy, session)
        ask_to_stop(proxy, signal.SIGTERM)
        with pytest.raises(aiohttp.ClientPayloadError):
            await begun.read()
        assert proxy.process is not None and await proxy.process.wait() == 0
        assert proxy.rows("SELECT status FROM calls") == [("cancelled",)]
    told = capfd.readouterr().err
    assert "stopping: 1 call is under way, for at most 0.2 s more" in told
    assert "Traceback" not in told  # it is recorded, and no fault of the proxy


@pytest.mark.parametrize(
    ("workers", "status"), [(1, "cancelled"), pytest.param(2, "incomplete", marks=pytest.mark.long)]
)
async def test_a_second_ctrl_c_ends_it_now(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int, status: str
) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        proxy.set("proxy", workers=workers, stop_timeout_s=600)
        await proxy.start()
        begun = await answer(proxy, session)
        for _ in range(2):
            ask_to_stop(proxy, signal.SIGINT)
            await refused(proxy)
        with pytest.raises(aiohttp.ClientError):
            await begun.read()
        assert proxy.process is not None and await proxy.process.wait() == 0
        await proxy.start()
        await proxy.end(signal.SIGTERM)
        assert proxy.rows("SELECT status FROM calls") == [(status,)]
    assert "Traceback" not in capfd.readouterr().err
