"""Claude Code itself works through the proxy on a played vLLM: its calls are recorded, paired, and trained on.

The model is played, because no model that a test could run calls Claude Code's tools.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from traffic.server import app, config_of, serving
from traffic.shapes import Ids, Said, chat

from support.in_process import proxy_of

Json = dict[str, Any]

MISSING = "no Claude Code: `npm install -g @anthropic-ai/claude-code`, or `pip install claude-agent-sdk`"
COMMAND = "echo lightning"


def claude_code() -> str | None:
    """The program on PATH, or the one that its Python package carries."""
    package = importlib.util.find_spec("claude_agent_sdk")
    carried = Path(package.origin or "").parent / "_bundled" / "claude" if package else None
    return shutil.which("claude") or (str(carried) if carried and carried.exists() else None)


def tokens(messages: list[Json]) -> list[int]:
    """A template of its own: every message begins with token 1, and a byte is a token."""
    return [token for message in messages for token in (1, *json.dumps(message.get("content")).encode())]


class PlayedModel:
    """Calls Bash once, then repeats what it said. It counts a Messages request's tokens as those of its chat."""

    def __init__(self) -> None:
        self.asked: list[Json] = []
        self._ids = Ids()

    def served(self) -> web.Application:
        application = app(self.answer)
        application.router.add_post("/v1/messages/count_tokens", self.count)
        return application

    async def count(self, request: web.Request) -> web.Response:
        body = await request.json()
        system = [{"content": body["system"]}] if "system" in body else []
        return web.json_response({"input_tokens": len(tokens([*system, *body["messages"]]))})

    async def answer(self, request: web.Request, body: Json) -> tuple[int, Json]:
        if body.get("tools"):  # else it is asked about its template
            self.asked.append(body)
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        say = Said(f"It says {results[-1]}.") if results else Said("I run it.", [("Bash", {"command": COMMAND})])
        answer, prompt = chat(body, [say], self._ids), tokens(body["messages"])
        answer["usage"]["prompt_tokens"] = len(prompt)
        return 200, answer | {"prompt_token_ids": prompt}


async def work(program: str, url: str, home: Path) -> Json:
    """Let Claude Code do one task; return what it says in the end."""
    arguments = ["-p", "Run it.", "--model", "policy", "--allowedTools", "Bash", "--output-format", "json"]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "unused",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        program, *arguments, cwd=home, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    answer: Json = json.loads(said)
    return answer


async def test_claude_code_works_and_what_it_does_is_trained_on(tmp_path: Path) -> None:
    program = claude_code()
    if program is None:
        pytest.skip(MISSING)
    model = PlayedModel()
    async with (
        serving(model.served()) as upstream,
        proxy_of(config_of(upstream, tmp_path)) as url,
        aiohttp.ClientSession() as session,
    ):
        answer = await work(program, url, tmp_path)
        async with session.get(f"{url}/rollouts") as found:
            rollouts = (await found.json())["data"]
        async with session.get(f"{url}/rollouts/{rollouts[0]['rollout_id']}?requests=whole") as found:
            calls = (await found.json())["calls"]
    assert (answer["result"], answer["num_turns"], len(rollouts)) == ("It says lightning.", 2, 1)
    assert [(call["endpoint"], call["status"], call["untrainable_reason"]) for call in calls] == [
        ("messages", "ok", None)
    ] * 2
    [tool] = calls[0]["tool_calls"]
    assert (tool["name"], json.loads(tool["arguments"])["command"], tool["result"]) == ("Bash", COMMAND, "lightning")
    first, second = (asked["messages"] for asked in model.asked)
    assert second[: len(first)] == first
