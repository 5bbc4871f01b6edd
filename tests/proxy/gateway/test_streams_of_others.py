"""Streams as other servers send them: the agent gets the upstream's bytes, the record has what was said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from support.cases import Case, cases_with
from support.in_process import proxy_of
from support.streamed_cases import Outcome, check, played
from support.streams import OWN
from support.streams.content_types import VLLM

CASES = [*(case for case in cases_with("path", "stream") if "http_version" not in case), *OWN]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return played(CASES, tmp_path_factory.mktemp("streams"))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_record_says_what_the_stream_said(case: Case, outcomes: dict[str, Outcome]) -> None:
    check(case, outcomes[case["name"]])


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_each_event_reaches_the_agent_before_the_next_one_is_sent(tmp_path: Path, content_type: str) -> None:
    seen = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for event in VLLM:
            seen.clear()
            await response.write(event.encode())
            if '"content": "' in event and "stop" not in event:  # the last ones wait for the record
                await asyncio.wait_for(seen.wait(), 10)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as upstream:
        config = Config(
            store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db"),
            upstreams=[UpstreamConfig(name="up", kind="openai", base_url=str(upstream.make_url("/v1")))],
        )
        async with proxy_of(config) as url, aiohttp.ClientSession(url) as session:
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]}
            async with session.post("/v1/chat/completions", json=body) as got:
                assert got.content_type == content_type
                sent = b""
                async for piece in got.content.iter_any():
                    sent += piece
                    seen.set()
            assert sent == "".join(VLLM).encode()
