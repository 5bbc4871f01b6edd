"""Records traffic of real agents: `make record-traffic`.

Every agent program runs many rollouts at once against a real proxy, in front of a played model, with its rollouts named
in headers. Beside the fixture it prints, for each scenario, whether the store holds what was served.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from traffic.recording import FIXTURE, Call, Json, Traffic, write
from traffic.server import Answer, Playing, app, config_of, serving

from support.environments import command_for
from support.in_process import proxy_of

HERE = Path(__file__).parent
SECONDS = 240  # for one agent program


class Tape:
    """Records what passes between agents, proxy and model."""

    def __init__(self, model: Answer) -> None:
        self.traffic = Traffic({}, [], [])
        self._model, self._answers = model, list[Json | None]()

    async def answer(self, request: web.Request, body: Json) -> tuple[int, Json] | None:
        """The model's answer, with a number by which it is known again on its way to the agent."""
        answered = await self._model(request, body)
        request["number"] = len(self._answers)
        self._answers.append(without_tokens(answered[1]) if answered else None)
        return answered

    def around(self, proxy: ASGIApp) -> ASGIApp:
        async def taped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/"):
                await self._tape(proxy, scope, receive, send)
            else:
                await proxy(scope, receive, send)

        return taped

    async def _tape(self, proxy: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        call = Call(scope["path"], headers["x-rollout-id"], int(headers.get("x-stainless-retry-count", 0)), {})
        n, body = 0, b""

        async def listen() -> Message:
            nonlocal n, body
            message = await receive()
            body += message.get("body", b"")
            if message["type"] == "http.request" and not message.get("more_body"):
                n, call.body = len(self.traffic.calls), json.loads(body)
                self.traffic.calls.append(call)
                self.traffic.moments.append((n, False))
            return message

        async def speak(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                call.answer = self._answers[int(dict(message["headers"])[b"x-played"])]
            await send(message)

        await proxy(scope, listen, speak)
        self.traffic.moments.append((n, True))


async def record(programs: list[Path], out: Path) -> None:
    tape = Tape(Playing())
    with tempfile.TemporaryDirectory() as directory:
        async with (
            serving(app(tape.answer)) as upstream,
            proxy_of(config_of(upstream, Path(directory)), tape.around) as proxy,
        ):
            for program in programs:
                tape.traffic.versions |= await run(program, proxy)
            await report(proxy, tape.traffic)
    write(tape.traffic, out)
    print(f"{out}: {len(tape.traffic.calls)} calls, {out.stat().st_size / 1e6:.2f} MB")


async def run(program: Path, proxy: str) -> dict[str, str]:
    """Run an agent program; the versions of what it is made with."""
    environment = os.environ | {"OPENAI_BASE_URL": f"{proxy}/v1", "OPENAI_API_KEY": "same", "NO_COLOR": "1"}
    process = await asyncio.create_subprocess_exec(
        *command_for(program), proxy, stdout=PIPE, env=environment, cwd=tempfile.gettempdir()
    )
    out, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    if process.returncode:
        raise SystemExit(f"{program.name} ended with {process.returncode}")
    *said, last = out.decode().strip().splitlines()
    for line in said:
        print(line)
    versions: dict[str, str] = json.loads(last)
    return versions


@dataclass
class Account:
    """Of one scenario: calls served and stored, tool results sent back and found beside their calls in the store."""

    served: int = 0
    stored: int = 0
    sent_back: int = 0
    paired: int = 0

    def add(self, served: list[Call], stored: list[Json]) -> None:
        ids = {name for call in served for name in results(call.body)}
        self.served += len(served)
        self.stored += len(stored)
        self.sent_back += len(ids)
        self.paired += sum(t["id"] in ids and t["result"] is not None for call in stored for t in call["tool_calls"])

    def __str__(self) -> str:
        row = f"{self.served:7} {self.stored:7} {self.sent_back:8} {self.paired:7}"
        return row if (self.served, self.sent_back) == (self.stored, self.paired) else f"{row}  !"


async def report(proxy: str, traffic: Traffic) -> None:
    """Is every call that was served in the store, and every result that was sent back beside its tool call?"""
    accounts: dict[str, Account] = defaultdict(Account)
    async with aiohttp.ClientSession() as session:
        for truth in {call.truth for call in traffic.calls}:
            served = [call for call in traffic.calls if call.truth == truth]
            async with session.get(f"{proxy}/rollouts/{truth}?requests=whole") as answer:
                accounts[served[0].scenario].add(served, (await answer.json())["calls"])
    print(f"{'scenario':36}  served  stored  results  paired")
    for name, account in sorted(accounts.items()):
        print(f"{name:36} {account}")


def without_tokens(answer: Json) -> Json:
    """What only the proxy asked for."""
    kept = {name: value for name, value in answer.items() if name != "prompt_token_ids"}
    if "choices" in kept:
        kept["choices"] = [
            {name: value for name, value in choice.items() if name not in ("token_ids", "logprobs")}
            for choice in kept["choices"]
        ]
    return kept


def results(value: Any) -> list[str]:
    """Ids of the tool results anywhere in a request."""
    if isinstance(value, list):
        return [found for inner in value for found in results(inner)]
    if not isinstance(value, dict):
        return []
    own = []
    if value.get("role") == "tool":
        own = [value["tool_call_id"]]
    elif value.get("type") == "tool_result":
        own = [value["tool_use_id"]]
    elif str(value.get("type")).endswith("_call_output"):
        own = [value["call_id"]]
    return own + [found for inner in value.values() for found in results(inner)]


if __name__ == "__main__":
    chosen = sys.argv[1:]
    found = [p for p in sorted((HERE / "agents").glob("with_*.py")) if not chosen or any(c in p.name for c in chosen)]
    asyncio.run(record(found, Path(os.environ.get("OUT", FIXTURE))))
