"""Servers with a model that is a script, in OpenAI's, Anthropic's and vLLM's protocols: `judging(think)` yields one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from contract.system import listening


def answers(system: Any, text: str) -> None:
    """Let the policy's server answer so from now on."""
    system.vllm.answer = lambda _: {"role": "assistant", "content": text}


async def completed(system: Any, rollout_id: str, answer: str = "yes", **headers: str) -> None:
    """A rollout with one call, ended without a reward."""
    answers(system, answer)
    await system.chat(rollout_id, **headers)
    await system.post(f"/rollouts/{rollout_id}/end", {"status": "completed"})


async def group(system: Any, *texts: str) -> list[str]:
    """Siblings that were opened together, with these answers."""
    opened = await system.post("/rollouts", {"task_id": "t", "n": len(texts)})
    ids = [one["rollout_id"] for one in opened]
    for rollout_id, text in zip(ids, texts, strict=True):
        await completed(system, rollout_id, text)
    return ids


async def given(system: Any, rollout_id: str) -> Any:
    """The rewards of a rollout, once none is awaited."""
    async with asyncio.timeout(20):
        while (found := await system.get(f"/rollouts/{rollout_id}"))["awaits_reward"]:
            await asyncio.sleep(0.05)
    return found["rewards"]


async def until(came: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not came():
            await asyncio.sleep(0.02)


async def rewards(system: Any, ids: list[str]) -> Any:
    """The newest reward of each, once nothing is awaited; one of None where there is none."""
    return [[{"reward": None}, *await given(system, one)][-1] for one in ids]


async def values(system: Any, ids: list[str]) -> list[float | None]:
    return [one["reward"] for one in await rewards(system, ids)]


# Of the question: `system`, `text` (the first message), and the JSON schema, pattern or choices, if there are any.
Think = Callable[[str, str, Any], Any]


@dataclass
class ScriptedJudge:
    think: Think
    url: str = ""
    status: int = 200
    why: str = "no"
    firewall: str = "\0"  # refuses questions with this
    asked: list[Any] = field(default_factory=list)

    def asking(self, model: str = "openai/m") -> Any:
        """The settings by which it is asked."""
        return {"model": model, "api_base": self.url if model.startswith("anthropic") else f"{self.url}/v1"}

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body | {"headers": dict(request.headers)})
        status = 403 if self.firewall in str(body["messages"]) else self.status
        if status != 200:
            return web.json_response({"error": {"message": self.why}}, status=status)
        return web.json_response(self._message(body) if request.path == "/v1/messages" else self._chat(body))

    def _chat(self, body: Any) -> Any:
        made = body.get("response_format", {}).get("json_schema", {})
        shape = body.get("structured_outputs") or {"json": made.get("schema")}
        asked = {one["role"]: one["content"] for one in reversed(body["messages"])}  # the first of each
        said = self._said(asked.get("system", ""), asked["user"], next(iter(shape.values())))
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        return answer | {"choices": [choice], "usage": usage}

    def _message(self, body: Any) -> Any:
        assert body["tool_choice"] == {"type": "tool", "name": "answer"}
        schema = body["tools"][0]["input_schema"]
        said = self._said(body["system"], body["messages"][0]["content"], schema)
        used = {"input_tokens": 100, "output_tokens": 10}
        given = {"type": "tool_use", "id": "t", "name": "answer", "input": json.loads(said)}
        return {"id": "m", "type": "message", "content": [given], "usage": used}

    def _said(self, system: str, text: str, shape: Any) -> str:
        said = self.think(system, text, shape)
        return said if isinstance(said, str) else json.dumps(said)


@asynccontextmanager
async def judging(think: Think) -> AsyncIterator[ScriptedJudge]:
    judge, app = ScriptedJudge(think), web.Application(client_max_size=2**26)
    for path in ("/v1/chat/completions", "/v1/messages"):
        app.router.add_post(path, judge.answer)
    async with listening(app) as judge.url:
        yield judge


def attempts(system: str, text: str) -> dict[str, str]:
    """What stands between the marks of a question, by title; as a judge reads it that takes the marks at their word."""
    (mark,) = re.findall(r"lines that begin with (<<\S+)", system)
    found = re.findall(rf"^{re.escape(mark)} (.*?)>>\n(.*?)\n{re.escape(mark)} end>>$", text, re.DOTALL | re.MULTILINE)
    return {title.removeprefix("Attempt "): inside for title, inside in found}


def ordered(worth: Callable[[str], float]) -> Think:
    """A judge that ranks by what an attempt is worth; equally good ones share a place."""

    def think(system: str, text: str, shape: Any) -> Any:
        found = {title: worth(one) for title, one in attempts(system, text).items() if len(title) < 4}
        values = sorted(set(found.values()), reverse=True)
        order = [[title for title in found if found[title] == value] for value in values]
        return {"reason": "the more, the better", "order": order}

    return think


by_number = ordered(lambda text: float(re.findall(r"worth (\d+)", text)[-1]))
