"""Nothing acknowledged is lost: the proxy as a real process, killed, short of disk, or locked out of its store."""

from __future__ import annotations

import resource
from pathlib import Path

import aiohttp

from support.served import Client, proxy_in_front


async def test_a_full_disk_is_a_503_and_leaves_nothing_half_recorded(tmp_path: Path) -> None:
    def little_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))

    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        client = Client(proxy, "c")
        await proxy.start(little_disk)
        for i in range(60):
            await client.turn(session, f"r{i}", stream=False, padding=20_000 + i)
        assert client.statuses == {200, 503}
        assert client.calls == {call for (call,) in proxy.rows("SELECT call_id FROM calls WHERE status = 'ok'")}
        await client.turn(session, "full", stream=False, padding=600_000)
        async with session.get(f"{proxy.url}/readyz") as answer:
            assert answer.status == 503 and "be written: " in (await answer.json())["store"]
        assert proxy.process is not None
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE, unlimited)
        await client.turn(session, "afterwards", stream=False, padding=20_000)
        async with session.get(f"{proxy.url}/readyz") as answer:
            assert answer.status == 200
        assert proxy.rows("SELECT status FROM calls WHERE rollout_id = 'afterwards'") == [("ok",)]
