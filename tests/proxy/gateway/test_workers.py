"""Several workers over one store: real processes, one of them killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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


class Talker(Client):
    """Turns of a rollout that it shares with others, each on a connection, and so on a worker, of its own."""

    def __init__(self, proxy: Proxy, name: str, rollout_id: str) -> None:
        super().__init__(proxy, name)
        self.rollout_id = rollout_id

    async def work(self, session: aiohttp.ClientSession) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{self._name} begins"}]
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                body = {"model": "policy", "messages": messages, "stream": len(messages) % 4 == 1}
                url = f"{self._proxy.url}/rollouts/{self.rollout_id}/v1/chat/completions"
                async with session.post(url, json=body) as answer:
                    await answer.read()
                    self.statuses.add(answer.status)
                    self.calls.add(answer.headers["X-Call-Id"])
                said = [{"role": "assistant", "content": "x"}, {"role": "user", "content": f"turn {len(messages)}"}]
                messages = [*messages, *said]


async def test_a_killed_worker_has_lost_no_answer_and_another_takes_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with two_workers(tmp_path) as proxy:
        talkers = [Talker(proxy, f"t{i}", f"r{i % 4}") for i in range(12)]
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            working = [asyncio.create_task(talker.work(session)) for talker in talkers]
            for _ in range(2):
                await asyncio.sleep(1)
                before = workers(proxy)
                os.kill(min(before), signal.SIGKILL)
                await settled(proxy, 2, without={min(before)})
                assert f"worker {min(before)} died (signal SIGKILL): another was started" in capfd.readouterr().err
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            received = {call for talker in talkers for call in talker.calls}
            assert {200} == set().union(*(talker.statuses for talker in talkers))
            assert received <= {call for (call,) in proxy.rows("SELECT call_id FROM calls WHERE status = 'ok'")}
            for i in range(4):
                async with session.get(f"{proxy.url}/rollouts/r{i}?requests=whole") as answer:
                    calls = (await answer.json())["calls"]
                assert [call["seq"] for call in calls] == list(range(len(calls)))
                assert all(call["request"]["messages"][0]["content"].endswith("begins") for call in calls)
                assert received & {call["call_id"] for call in calls}
        print(f"2 kills of a worker, 12 clients: {len(received)} answers received whole")


async def test_the_metrics_are_those_of_all_workers(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as proxy:
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            client = Client(proxy, "c")
            await asyncio.gather(*(client.turn(session, f"r{i}", stream=False) for i in range(40)))
            for _ in range(6):
                async with session.get(proxy.url + "/metrics") as answer:
                    text = await answer.text()
                assert re.findall(r'^lightning_calls_total\{status="ok"\} (\S+)$', text, re.MULTILINE) == ["40.0"]
                assert re.findall(r'^lightning_rollouts\{.*"completed"\} (\S+)$', text, re.MULTILINE) == ["40.0"]


async def test_workers_end_with_their_supervisor_however_it_ends(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as proxy:
        assert proxy.process is not None
        for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)):
            left = workers(proxy)
            await proxy.end(number)
            assert proxy.process.returncode == code
            for _ in range(100):
                if not any(Path(f"/proc/{pid}").exists() for pid in left):
                    break
                await asyncio.sleep(0.1)
            assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
            if code == 0:
                await proxy.start()
                await settled(proxy, 2)


async def test_after_the_supervisor_was_killed_under_load_the_next_serve_gets_its_port(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as proxy, aiohttp.ClientSession() as session:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True, "pause_s": 3}
        url = f"{proxy.url}/rollouts/long/v1/chat/completions"
        async with session.post(url, json=body) as answer:
            await answer.content.readany()
            before = workers(proxy)
            await proxy.end(signal.SIGKILL)
            await proxy.start()
            await settled(proxy, 2, without=before)


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
