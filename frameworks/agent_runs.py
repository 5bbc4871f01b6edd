"""Programs of agents run as processes of their own, through a proxy, in front of a model that multiplies."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from asyncio.subprocess import PIPE
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

Json = dict[str, Any]


# One answer: text, or the call of a tool with its arguments.
Said = str | tuple[str, Json]


NUMBERS = itertools.count()


def new_id(prefix: str) -> str:
    return f"{prefix}_{next(NUMBERS):024x}"


def chat(said: Said) -> Json:
    message: Json = {"role": "assistant", "content": said}
    if is_call := not isinstance(said, str):
        function = {"name": said[0], "arguments": json.dumps(said[1])}
        message |= {"content": None, "tool_calls": [{"id": new_id("call"), "type": "function", "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if is_call else "stop", "logprobs": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return {"id": new_id("chatcmpl"), "object": "chat.completion", "created": 1, "choices": [choice], "usage": usage}


def responses(said: Said) -> Json:
    if isinstance(said, str):
        part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
        item: Json = {"type": "message", "role": "assistant", "id": new_id("msg"), "content": [part]}
    else:
        item = {"type": "function_call", "id": new_id("fc"), "call_id": new_id("call"), "name": said[0]}
        item["arguments"] = json.dumps(said[1])
    usage = {
        "input_tokens": 3, "output_tokens": 4, "total_tokens": 7, "output_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    }  # fmt: skip
    return {
        "id": new_id("resp"), "object": "response", "created_at": 1, "status": "completed", "error": None,
        "incomplete_details": None, "instructions": None, "output": [item | {"status": "completed"}],
        "parallel_tool_calls": True, "temperature": 1, "top_p": 1, "tool_choice": "auto", "tools": [], "usage": usage,
        "metadata": {},
    }  # fmt: skip


def messages(said: Said) -> Json:
    if is_text := isinstance(said, str):
        block: Json = {"type": "text", "text": said}
    else:
        block = {"type": "tool_use", "id": new_id("toolu"), "name": said[0], "input": said[1]}
    return {
        "id": new_id("msg"), "type": "message", "role": "assistant", "content": [block], "stop_sequence": None,
        "stop_reason": "end_turn" if is_text else "tool_use", "usage": {"input_tokens": 3, "output_tokens": 4},
    }  # fmt: skip


SHAPES = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}
QUESTION = re.compile(r"(\d+) \* (\d+)")


class Calculator:
    def __init__(self) -> None:
        self.asked: dict[str | None, list[Json]] = defaultdict(list)

    async def __call__(self, request: web.Request, body: Json) -> tuple[int, Json]:
        self.asked[key_of(request)].append(body)
        return 200, SHAPES[request.path](say(body)) | {"model": body.get("model")}


def key_of(request: web.Request) -> str | None:
    """The credential that came with a request."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return request.headers.get("X-Api-Key") or bearer or None


def say(request: Json) -> Said:
    """The call of the tool for the last product that is asked for, or what came of it."""
    names = [tool.get("function", tool).get("name") or "" for tool in request.get("tools") or ()]
    multiply = next((name for name in names if name.endswith("multiply")), None)
    items = request.get("messages", request.get("input"))
    for item in reversed(items if isinstance(items, list) else [items]):
        if isinstance(item, dict) and item.get("role") in ("system", "developer"):
            continue
        text = _text(item)
        if multiply and (question := QUESTION.search(text)):
            a, b = map(int, question.groups())
            return multiply, {"a": a, "b": b}
        if numbers := re.findall(r"\d+", text):
            answer = f"Multiplied by the tool, the two numbers make {numbers[-1]}."
            return ("final_answer", {"answer": answer}) if "final_answer" in names else answer
    return "Fine."


def _text(item: Any) -> str:
    """What an item of a conversation says, without the tool calls and ids in it."""
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return "\n".join(map(_text, item))
    return _text([item[name] for name in ("content", "text", "output") if item.get(name)])


# No telemetry, and nothing asked of other servers: there are none here.
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1", "CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}  # fmt: skip
SECONDS = 120  # for one run
TASK = "sums"


@dataclass(frozen=True)
class Run:
    """One run of a program. `rollout`: the one that it is named as, if it is named."""

    first: int  # of the numbers that it is asked to multiply
    root: str
    rollout: str | None = None
    api_key: str = "unnamed"
    headers: dict[str, str] = field(default_factory=dict)
    stream: bool = False

    @property
    def shown(self) -> str | None:
        """The credential that the model is shown: never a key of the proxy's own."""
        return None if self.api_key.startswith("lpk-") else self.api_key

    @property
    def questions(self) -> list[str]:
        return [f"What is {self.first} * 7?", f"And what is {self.first} * 11?"]

    @property
    def products(self) -> list[str]:
        return [str(self.first * 7), str(self.first * 11)]

    async def __call__(self, command: Sequence[str], home: Path) -> None:
        """Run the program; fails where it fails or does not say both products."""
        home.mkdir()
        environment = QUIET | {
            "PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_BASE_URL": f"{self.root}/v1",
            "OPENAI_API_KEY": self.api_key, "ANTHROPIC_BASE_URL": self.root, "ANTHROPIC_API_KEY": self.api_key,
            "HEADERS": json.dumps(self.headers), "STREAM": "1" if self.stream else "",
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, *self.questions, stdout=PIPE, stderr=PIPE, env=environment, cwd=home
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, f"ended with {process.returncode}: {err.decode()[-3000:]}"
        answers = re.findall(r"^Multiplied by the tool, the two numbers make (\d+)\.$", out.decode(), re.MULTILINE)
        assert answers == self.products, out.decode()[-3000:]


async def plan(proxy: str, session: aiohttp.ClientSession) -> list[Run]:
    """A run for each way to name a rollout, and two without a name."""
    named = {"X-Rollout-Id": "by-headers", "X-Task-Id": TASK}
    async with session.post("/rollouts", json={"task_id": TASK}) as answer:
        [opened] = await answer.json()
    return [
        Run(101, proxy, "by-headers", "headers", headers=named),
        Run(103, f"{proxy}/rollouts/by-url/tasks/{TASK}", "by-url", "url", stream=True),
        Run(107, proxy, opened["rollout_id"], opened["api_key"]),
        Run(109, proxy),
        Run(113, proxy, stream=True),
    ]


async def stored(session: aiohttp.ClientSession) -> dict[str, Json]:
    """Every rollout with its calls, by id."""
    async with session.get("/rollouts?limit=1000") as answer:
        ids = [rollout["rollout_id"] for rollout in (await answer.json())["data"]]
    found = {}
    for rollout_id in ids:
        async with session.get(f"/rollouts/{rollout_id}?requests=whole") as answer:
            found[rollout_id] = await answer.json()
    return found


def told(rollout: Json) -> list[str]:
    """What the tool is recorded to have answered, each time that it was called."""
    tools = [tool for call in rollout["calls"] for tool in call["tool_calls"] if tool["name"].endswith("multiply")]
    return [re.sub(r"\D", "", json.dumps(tool["result"])) for tool in tools]
