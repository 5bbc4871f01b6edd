"""Merged weights reach several servers one after the other, and agents never see any that were not verified."""

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
from aiohttp import web

from lightning_proxy.core.errors import PublishError
from lightning_proxy.serving.swap import LOADED
from lightning_proxy.serving.vllm import LOADING
from support.training import DeafServer, HonestServer, Start


class WatchedServer(HonestServer):
    """Notes the labels of all servers whenever one is asked for an answer, and what it was told to do."""

    all: ClassVar[list["WatchedServer"]] = []
    asked: ClassVar[list[tuple[int, list[str]]]] = []
    running = 0

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.told: list[str] = []
        self.all.append(self)

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/metrics":
            self.running = max(0, self.running - 1)
            text = '# HELP vllm:num_requests_running\nvllm:num_requests_running{engine="0",model_name="b"} '
            return web.Response(text=f"{text}{float(self.running)}\nvllm:num_requests_waiting 0.0\n")
        if request.path == "/collective_rpc":
            is_back = (await request.json())["kwargs"]["weights_path"] == str(self.base)
            assert self.running == 0 or is_back, "requests under way would go on with weights that nobody has verified"
            self.told.append("load")
        if request.path == "/v1/completions":
            self.asked.append((self.all.index(self), [server.label for server in self.all]))
        return await super().handle(request)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[WatchedServer]:
    monkeypatch.setattr(WatchedServer, "all", [])
    monkeypatch.setattr(WatchedServer, "asked", [])
    return WatchedServer


@pytest.mark.parametrize("servers", [2, 3, 4])
async def test_servers_are_verified_before_agents_come(
    bench: Start, watched: type[WatchedServer], servers: int
) -> None:
    async with bench(server=watched, replicas=[watched] * (servers - 1)) as b:
        watched.all[0].running = 5
        await b.train("t1", "t2")
        label = f"1-{int((await b.store.versions.live()).created_at)}"
        assert await b.live() == (1, 1, True)
        assert [server.label for server in watched.all] == [label] * servers
        assert [server.told for server in watched.all] == [["load"]] * servers
        half = (servers + 1) // 2
        for asked, labels in watched.asked:
            # One server at a time is away from agents; the others have verified weights.
            assert labels == [label] * asked + [LOADED + label] + ["default"] * (servers - asked - 1)
            assert len([one for one in labels if one == ("default" if asked < half else label)]) >= servers - half
        assert [asked for asked, _ in watched.asked] == sorted(asked for asked, _ in watched.asked)


@pytest.mark.parametrize("deaf_first", [True, False])
async def test_weights_that_one_server_does_not_serve_are_taken_back_and_reach_no_other(
    bench: Start, watched: type[WatchedServer], deaf_first: bool
) -> None:
    order = (DeafServer, watched) if deaf_first else (watched, DeafServer)
    async with bench(server=order[0], replicas=[order[1]]) as b:
        with pytest.raises(PublishError, match="does not serve the weights"):
            await b.train("t1", "t2")
        assert ((await b.live())[0], (await b.store.versions.get(1)).status) == (0, "failed")
        assert [server.label[:2] for server in (b.server, *b.replicas)] == ["0-", "de" if deaf_first else "0-"]
        assert watched.all[0].told == ([] if deaf_first else ["load", "load"])
        assert not b.server.paused


async def test_a_broken_off_publishing_leaves_the_live_weights(bench: Start, watched: type[WatchedServer]) -> None:
    async with bench(server=watched, replicas=[watched]) as b:
        await b.groups("t1", "t2")
        watched.all[0].running = 10**6
        training = asyncio.create_task(b.loop().run(asyncio.Event(), once=True))
        async with asyncio.timeout(60):
            while watched.all[0].label != LOADING:
                await asyncio.sleep(0.01)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert [server.label[:2] for server in watched.all] == ["0-", "de"]
        assert (await b.live())[0] == 0


async def test_a_server_that_answers_nobody_gets_new_weights_first(bench: Start, watched: type[WatchedServer]) -> None:
    async with bench(server=watched, replicas=[watched]) as b:
        watched.all[1].label = "lost"
        await b.train("t1", "t2")
        label = f"1-{int((await b.store.versions.live()).created_at)}"
        assert [server.label for server in watched.all] == [label] * 2
        first, labels = watched.asked[0]
        assert (first, labels[0]) == (1, "default"), "the other one answers agents meanwhile"
