"""Plays cases of streamed answers: an upstream that answers in their pieces, one proxy in front of it, its record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from support.cases import Case
from support.in_process import proxy_of
from support.sections import PolicyConfig

Json = dict[str, Any]

ASKED: dict[str, Json] = {
    "/v1/responses": {"input": "go"},
    "/v1/completions": {"prompt": "go"},
    "/v1/messages": {"messages": [{"role": "user", "content": "go"}], "max_tokens": 99},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go"}]},
}


@dataclass(frozen=True)
class Outcome:
    """What an agent got of one case, whether that ended as HTTP says, the call's record, what the upstream saw.

    `came_early`: bytes came before the upstream had sent its last piece.
    """

    status: int
    sent: bytes
    clean: bool
    record: Json
    asked: Json
    came_early: bool = False


class PlayedPieces:
    """Answers with the pieces of the case that the header X-Case names, each in a packet of its own."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = {case["name"]: case for case in cases}
        self.asked: dict[str, Json] = {}  # the newest request of each case
        self.done: set[str] = set()  # the cases whose last piece is about to be sent
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/{route:.+}", self._answer)
        self.app.on_response_prepare.append(_without_type)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base", "parent": None, "root": "/base"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        case = self._cases[request.headers["X-Case"]]
        self.asked[case["name"]] = await request.json()
        kind = case.get("content_type", "text/event-stream")
        answer = web.StreamResponse(status=case.get("http_status", 200))
        if kind is not None:
            answer.headers["Content-Type"] = kind
        await answer.prepare(request)
        for i, piece in enumerate(case["stream"]):
            await asyncio.sleep(case.get("delay", 0) if i else 0)
            if i + 1 == len(case["stream"]):
                self.done.add(case["name"])
            await answer.write(piece if isinstance(piece, bytes) else piece.encode())
        if case.get("breaks"):
            assert request.transport is not None
            request.transport.abort()
        return answer


async def _without_type(_: web.Request, answer: web.StreamResponse) -> None:
    """Take off the type that aiohttp gives to what has none."""
    if answer.headers.get("Content-Type") == "application/octet-stream":
        del answer.headers["Content-Type"]


def played(cases: Sequence[Case], directory: Path) -> dict[str, Outcome]:
    """Ask for each case once, in a rollout of its name."""
    return asyncio.run(_played(cases, directory))


async def _played(cases: Sequence[Case], directory: Path) -> dict[str, Outcome]:
    pieces = PlayedPieces(cases)
    async with TestServer(pieces.app) as upstream:
        base = str(upstream.make_url("/v1"))
        config = Config(
            store=StoreConfig(url=f"sqlite:///{directory}/store.db"),
            upstreams=[
                UpstreamConfig(name="policy", base_url=base),
                UpstreamConfig(name="other", kind="openai", base_url=base, models=["theirs"]),
            ],
            policy=PolicyConfig(publish="lora", directory=directory / "policy"),
        )
        async with proxy_of(config) as url, aiohttp.ClientSession(url) as session:
            return {case["name"]: await _ask(session, case, pieces) for case in cases}


async def _ask(session: aiohttp.ClientSession, case: Case, pieces: PlayedPieces) -> Outcome:
    model = "policy" if case.get("upstream") == "vllm" else "theirs"
    body = {"model": model, "stream": case.get("asks_stream", True)} | ASKED[case["path"]] | case.get("request", {})
    rollout, sent, clean, status, came_early = f"/rollouts/{case['name']}", b"", True, 0, False
    try:
        async with session.post(rollout + case["path"], json=body, headers={"X-Case": case["name"]}) as answer:
            status = answer.status
            async for piece in answer.content.iter_any():
                sent += piece
                came_early |= case["name"] not in pieces.done
    except aiohttp.ClientError:
        clean = False
    async with session.get(rollout) as answer:
        (call,) = json.loads(await answer.read())["calls"]
    return Outcome(status, sent, clean, call, pieces.asked[case["name"]], came_early)


def check(case: Case, outcome: Outcome) -> None:
    """Fail unless what `tests/cases/README.md` says of the case's keys holds."""
    record, sent = outcome.record, outcome.sent.decode(errors="replace")
    response = record["response"]
    if "tool_calls" in case:
        got = [[call["id"], call["name"], _object(call["arguments"])] for call in record["tool_calls"]]
        assert got == [[call_id, name, _object(arguments)] for call_id, name, arguments in case["tool_calls"]], response
    if "message" in case:
        assert _part(response["choices"][0]["message"], case["message"]) == case["message"], response
    if "choice" in case:
        assert _part(response["choices"][0], case["choice"]) == case["choice"], response
    for name in ("output", "content"):
        if name in case:
            assert response[name] == case[name], response
    for name in ("usage", "finish_reason", "status", "trainable"):
        if name in case:
            assert record[name] == case[name], record
    if "first_byte_s" in case:
        assert outcome.came_early
    if "sent" in case:
        assert _part(outcome.asked, case["sent"]) == case["sent"]
    if "untrainable" in case:
        assert case["untrainable"] in (record["untrainable_reason"] or ""), record
    if "error" in case:
        assert case["error"] in (record["error"] or ""), record
    held = json.dumps(response, ensure_ascii=False)
    assert [text for text in case.get("holds", ()) if text not in held] == [], held
    if case.get("clean"):
        assert outcome.clean
        pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in case["stream"]]
        assert outcome.sent == b"".join(pieces)
    assert [text for text in case.get("not_in_answer", ()) if text in sent] == [], sent
    if "broken" in case:
        assert outcome.clean is not case["broken"]


def _part(value: Json, of: Json) -> Json:
    """The fields of a value that a case names."""
    return {name: value.get(name) for name in of}


def _object(arguments: str) -> Any:
    """The arguments, if they are an object, or else their text."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
