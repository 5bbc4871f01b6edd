"""A model server that answers each request with what its test wrote down, and a proxy in front of it."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from contract.raw import Wire as Wire
from contract.raw import write
from contract.system import Answer, Proxy, in_this_process
from contract.vllm import PlayedVllm, chat_answer

Json = dict[str, Any]
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ASKED: dict[str, Json] = {  # the smallest request of each dialect
    CHAT: {"messages": [{"role": "user", "content": "go"}]}, COMPLETIONS: {"prompt": "go"}, RESPONSES: {"input": "go"},
    MESSAGES: {"messages": [{"role": "user", "content": "go"}], "max_tokens": 9},
}  # fmt: skip
CASES = Path(__file__).parents[1] / "cases"


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> Json:
    return {"role": "assistant", "content": content} | more


def calls(*made: tuple[str | None, Any], name: str = "f", text: str | None = None) -> Json:
    """An answer with these calls: their ids and arguments."""
    tools = []
    for call_id, given in made:
        tools.append({"type": "function", "function": {"name": name, "arguments": json.dumps(given)}})
        if call_id is not None:
            tools[-1]["id"] = call_id
    return said(text, tool_calls=tools)


def told(call_id: str | None, text: str, **more: Any) -> Json:
    return {"role": "tool", "content": text} | ({} if call_id is None else {"tool_call_id": call_id}) | more


def sampled(message: Json, prompt: list[int], ids: list[int]) -> Wire:
    """The message as vLLM answers with it, with tokens."""
    return Wire([json.dumps(chat_answer(message, prompt, ids, [-0.5] * len(ids))).encode()], "application/json")


class ScriptedVllm(PlayedVllm):
    """Answers what is written for the request's header X-Script: a `Wire`, an error's status, or an answer's content.

    That is a message, a text (completions), blocks (Messages), items (Responses), or a function that says so.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.scripts: dict[str, Any] = {}
        self.asked: dict[str, Json] = {}  # the newest request for each script
        self._ids = itertools.count()
        self.app.router.add_route("*", "/v1/{path:.*}", self._chat)
        self.app.on_response_prepare.append(_without_type)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        name = request.headers.get("X-Script", "")
        script = self.scripts.get(name, 404)
        body = json.loads(await request.read() or b"{}", parse_int=_integer)
        self.asked[name] = {"path": request.raw_path, **body}
        script = script(self.asked[name]) if callable(script) else script
        script = await script if inspect.isawaitable(script) else script
        if isinstance(script, Wire):
            return await write(request, script)
        if isinstance(script, int):
            return web.json_response({"error": {"message": "busy"}}, status=script)
        head = {"id": f"answer_{next(self._ids)}_of_the_server", "model": body["model"]}
        return web.json_response(head | _shaped(request.path, script))


def _integer(digits: str) -> int | str:
    """The integer, unless it is longer than Python reads."""
    return int(digits) if len(digits) < 4000 else digits


def _shaped(path: str, content: Any) -> Json:
    if path == RESPONSES:
        return {"object": "response", "status": "completed", "output": content}
    if path == f"{RESPONSES}/compact":
        return {"object": "response.compaction", "output": content}
    if path == MESSAGES:
        return {"type": "message", "role": "assistant", "content": content, "stop_reason": "end_turn"}
    name = "text" if path == COMPLETIONS else "message"
    return {"choices": [{"index": 0, name: content, "finish_reason": "stop"}]}


async def _without_type(_: web.Request, answer: web.StreamResponse) -> None:
    """Take off the type that aiohttp gives to what has none."""
    if answer.headers.get("Content-Type") == "application/octet-stream":
        del answer.headers["Content-Type"]


@dataclass
class Scripted:
    """A proxy in front of a scripted server: model "m" is an upstream's of kind openai, "policy" a vLLM's."""

    proxy: Proxy
    server: ScriptedVllm
    asked: Json = field(default_factory=dict)  # what the server got for the script that ended last

    @contextmanager
    def script(self, answer: Any) -> Iterator[Json]:
        """Yield the headers of a request that has this answer."""
        name = uuid.uuid4().hex
        self.server.scripts[name] = answer
        try:
            yield {"X_Script": name}
        finally:
            del self.server.scripts[name]
            self.asked = self.server.asked.pop(name, {})

    def ask(self, path: str, request: Json | None, answer: Any, /, *, method: str = "POST", **headers: str) -> Answer:
        """Send a request and have it answered; its model is "m"."""
        with self.script(answer) as scripted:
            body = None if request is None else {"model": "m"} | request
            got = self.proxy.call(method, path, body, **scripted, **headers)
        assert callable(answer) or got.status == (answer if isinstance(answer, int) else 200), got.body
        return got

    def receive(
        self, method: str, path: str, body: Json | None, wire: Wire, until: bytes = b""
    ) -> tuple[httpx.Headers, bytes, bool]:
        """Ask for an answer as the wire has it; return its headers, what came of it, and whether it came whole,
        with its status.

        The answer's gate opens once `until` has come, or its first byte.
        """
        got = b""
        ask, url = self.proxy.client.stream, self.proxy.url + path
        with self.script(wire) as named, ask(method, url, json=body, headers={"X-Script": named["X_Script"]}) as answer:
            try:
                for piece in answer.iter_raw():
                    got += piece
                    if wire.gate is not None and until in got:
                        wire.gate.set()
            except httpx.HTTPError:
                return answer.headers, got, False
        return answer.headers, got, answer.status_code == wire.status

    def results(self, rollout: str, turns: list[Any]) -> list[list[Any]]:
        """Ask [messages, answer, agent's name?] one after the other; return the results of each call's tools."""
        for messages, answer, *agent in turns:
            named = {"X_Agent_Name": agent[0]} if agent else {}
            self.ask(CHAT, {"messages": messages}, answer, X_Rollout_Id=rollout, **named)
        return results_of(self.proxy.rollout(rollout))

    def rollouts(self, turns: list[Any], key: str) -> list[str]:
        """Ask [path, request, answer] one after the other, unnamed; return the rollouts of the recorded ones."""
        found = [self.ask(*turn, Authorization=f"Bearer {key}").headers.get("x-rollout-id") for turn in turns]
        return [rollout for rollout in found if rollout]


def together(count: int, after_s: float = 0.0) -> Callable[[Any], Any]:
    """Return what holds an answer back until `count` requests are there, and `after_s` seconds longer."""
    barrier = asyncio.Barrier(count)

    def answered(answer: Any) -> Any:
        async def script(_: Json) -> Any:
            await barrier.wait()
            await asyncio.sleep(after_s)
            return answer

        return script

    return answered


def results_of(rollout: Json) -> list[list[Any]]:
    return [[tool["result"] for tool in call["tool_calls"]] for call in rollout["calls"] if call["tool_calls"]]


@contextmanager
def scripted(directory: Path, **sections: Any) -> Iterator[Scripted]:
    upstreams = [{"name": "policy", "kind": "vllm"}, {"name": "theirs", "kind": "openai", "models": ["m"]}]
    server = ScriptedVllm(directory)
    with in_this_process(directory, server, **{"upstreams": upstreams} | sections) as proxy:
        yield Scripted(proxy, server)
