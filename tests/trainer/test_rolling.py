"""Merged weights reach several servers one after the other, and agents never see any that were not verified."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lightning_proxy.core.errors import PublishError
from lightning_proxy.serving.swap import LOADED, labels_of
from lightning_proxy.serving.vllm import LOADING
from support.training import Bench, DeafServer, HonestServer, Start


class WatchedServer(HonestServer):
    """Has requests under way, each for one look, and counts how often it opened weights."""

    running = opened = 0

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.app.router.add_get("/metrics", self._metrics)

    def _open(self, path: str) -> Any:
        self.opened += 1
        is_back = path == str(self.root)
        assert self.running == 0 or is_back, "requests under way would go on with weights that nobody has verified"
        return super()._open(path)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.running = max(0, self.running - 1)
        text = '# HELP vllm:num_requests_running\nvllm:num_requests_running{engine="0",model_name="b"} '
        return web.Response(text=f"{text}{float(self.running)}\nvllm:num_requests_waiting 0.0\n")


def watch(b: Bench) -> list[tuple[int, list[str]]]:
    """Note which server is asked for an answer, with the labels of all."""
    servers, asked = [b.server, *b.replicas], list[tuple[int, list[str]]]()

    def note(place: int, path: str) -> None:
        if path == "/v1/completions":
            asked.append((place, [server.label for server in servers]))

    for place, server in enumerate(servers):
        server.before = partial(note, place)
    return asked


@pytest.mark.parametrize("servers", [2, 3])
async def test_servers_are_verified_before_agents_come(bench: Start, servers: int) -> None:
    async with bench(server=WatchedServer, replicas=[WatchedServer] * (servers - 1)) as b:
        b.server.running, watched = 5, watch(b)
        await b.train("t1", "t2")
        (label,) = labels_of(await b.store.versions.live())
        assert await b.live() == (1, 1, True)
        assert [(server.label, server.opened) for server in (b.server, *b.replicas)] == [(label, 2)] * servers
        half = (servers + 1) // 2
        for asked, labels in watched:
            # One server at a time is away from agents; the others have verified weights.
            assert labels == [label] * asked + [LOADED + label] + ["default"] * (servers - asked - 1)
            assert len([one for one in labels if one == ("default" if asked < half else label)]) >= servers - half
        assert [asked for asked, _ in watched] == sorted(asked for asked, _ in watched)


@pytest.mark.parametrize("deaf_first", [True, False])
async def test_weights_that_one_server_does_not_serve_are_taken_back_and_reach_no_other(
    bench: Start, deaf_first: bool
) -> None:
    order = (DeafServer, WatchedServer) if deaf_first else (WatchedServer, DeafServer)
    async with bench(server=order[0], replicas=[order[1]]) as b:
        with pytest.raises(PublishError, match="does not serve the weights"):
            await b.train("t1", "t2")
        assert ((await b.live())[0], (await b.store.versions.get(1)).status) == (0, "failed")
        assert [server.label[:2] for server in (b.server, *b.replicas)] == ["0-", "de" if deaf_first else "0-"]
        assert (b.replicas[0] if deaf_first else b.server).opened == (1 if deaf_first else 3)
        assert not b.server.paused


async def test_a_broken_off_publishing_leaves_the_live_weights(bench: Start) -> None:
    async with bench(server=WatchedServer, replicas=[WatchedServer]) as b:
        b.server.running = 10**6
        training = asyncio.create_task(b.train("t1", "t2"))
        async with asyncio.timeout(60):
            while b.server.label != LOADING:
                await asyncio.sleep(0.01)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert [server.label[:2] for server in (b.server, *b.replicas)] == ["0-", "de"]
        assert (await b.live())[0] == 0


async def test_a_server_that_answers_nobody_gets_new_weights_first(bench: Start) -> None:
    async with bench(replicas=[HonestServer]) as b:
        b.replicas[0].label, watched = "lost", watch(b)
        await b.train("t1", "t2")
        (label,) = labels_of(await b.store.versions.live())
        assert b.server.label == b.replicas[0].label == label
        first, labels = watched[0]
        assert (first, labels[0]) == (1, "default"), "the other one answers agents meanwhile"
