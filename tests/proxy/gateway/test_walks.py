"""The walks of docs/architecture.md: the files that a request runs through, in order, as a tracer sees them."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aiohttp
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from traffic.server import config_of

import lightning_proxy
from contract.system import listening
from contract.vllm import PlayedVllm
from support.paths import TOPS
from support.served import proxy_of

ROOT = Path(lightning_proxy.__file__).parent

_WALKED: ContextVar[bool] = ContextVar("walked", default=False)


class Walk:
    """The functions that ran for a request, in its own task and those that it began; background work has others."""

    def __init__(self) -> None:
        self.functions: list[CodeType] = []

    @property
    def files(self) -> list[str]:
        """The files of these functions, relative to the product's root."""
        return list(dict.fromkeys(str(Path(code.co_filename).relative_to(ROOT)) for code in self.functions))


def marking(app: ASGIApp) -> ASGIApp:
    """The app, with each of its requests marked as what a walk follows."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        _WALKED.set(scope["type"] == "http")
        await app(scope, receive, send)

    return marked


@contextmanager
def walking(*, others: bool = False) -> Iterator[Walk]:
    """Trace the requests that `marking` marks, or what `others` run, in this thread and during the block."""
    walk, seen, product = Walk(), set[CodeType](), tuple(f"{ROOT / top}/" for top in TOPS)

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(product) and code.co_qualname not in AROUND
        if event == "call" and code not in seen and ours and _WALKED.get() != others:
            seen.add(code)
            walk.functions.append(code)

    sys.setprofile(on_event)
    try:
        yield walk
    finally:
        sys.setprofile(None)


# Of proxy/gateway/server.py, what uvicorn runs around each request: in which place depends on what the socket brings.
AROUND = {
    "_Cycle.run_asgi", "_Cycle.send", "_Joining.write", "_Joining._flush", "_Joining.__getattr__",
    "ServerProtocol.on_response_complete", "Connections.move", "Connections.lost",
}  # fmt: skip
# Files. One is core/prices.py: the recorder stores how many tokens a call took, from which costs are summed.
MOST = {"call": 25, "stream": 27, "reward": 11, "responses": 30}
NAMED = {"X-Rollout-Id": "r1"}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "call": ("/v1/chat/completions", CHAT),
    "stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "reward": ("/reward", {"rollout_id": "r1", "reward": 1.0}),
    "responses": ("/v1/responses", {"model": "policy", "input": "hi"}),
}


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with listening(PlayedVllm(tmp_path).app) as upstream:
        config = config_of(upstream, tmp_path)
        async with proxy_of(config, marking) as url, aiohttp.ClientSession(url, headers=NAMED) as session:
            yield session


async def walk_of(agent: aiohttp.ClientSession, what: str, *, others: bool = False) -> Walk:
    """The walk of a request that is the second of its kind: the first fills caches. `others`: what other tasks run."""
    path, body = SENT[what]
    for _ in range(2):
        with walking(others=others) as walk:
            async with agent.post(path, json=body) as answer:
                assert answer.status < 300, await answer.text()
                await answer.read()
    return walk


def told(heading: str) -> list[str]:
    """The files of the section's list, in order."""
    document = (ROOT / "docs" / "architecture.md").read_text()
    section = document.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+\.py)`:", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("what", "heading"),
    [
        ("call", "The way of a call"),
        ("reward", "The way of a reward"),
        ("stream", "What a stream adds"),
        ("responses", "What a Responses call adds"),
    ],
)
async def test_a_walk_names_the_files_that_run_in_order(agent: aiohttp.ClientSession, what: str, heading: str) -> None:
    call, walk = await walk_of(agent, "call"), await walk_of(agent, what)
    named = [file for file in walk.files if "adds" not in heading or file not in call.files]
    assert told(heading) == named, [code.co_qualname for code in walk.functions]
    assert len(walk.files) <= MOST[what]


async def test_the_writer_runs_what_a_record_adds(agent: aiohttp.ClientSession) -> None:
    walk, named = await walk_of(agent, "call", others=True), told("What its record adds")
    assert len(named) == 2
    assert set(named) <= set(walk.files), [code.co_qualname for code in walk.functions]
