"""The real packages, installed as a user does it, against a real proxy and a played vLLM."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lightning_proxy.core.tokens import ONLY_RECORDED
from support.command_line import lightning
from tests.conftest import System

TASKSET = Path(__file__).parents[3] / "examples" / "taskset"
Running = Callable[..., AbstractAsyncContextManager[System]]
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a kind into an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def install(kind: str, *more: str) -> None:
        done = lightning("environments", kind, "--install", *more)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"installing into .venv-environments/{kind}, with their dependencies: ")

    return install


async def evaluated(system: System, environment: str, args: str) -> float:
    options = ("--environment", environment, "--environment-args", args, "--json")
    code, out, err = await system.lightning("eval", *options)
    assert code == 0, err
    return float(json.loads(out)["rows"][0]["mean_reward"])


async def rollouts_of(system: System) -> list[dict[str, Any]]:
    """All rollouts, the newest first; `named` has their rewards."""
    _, page = await system.call("GET", "/rollouts")
    found = [(await system.call("GET", f"/rollouts/{one['rollout_id']}"))[1] for one in page["data"]]
    return [one | {"named": {reward["name"]: reward["reward"] for reward in one["rewards"]}} for one in found]


async def test_questions_of_reasoning_gym(running: Running, tmp_path: Path, installed: Callable[..., None]) -> None:
    installed("reasoning_gym")
    assert len((await asyncio.to_thread(lightning, "environments", "reasoning_gym")).stdout.splitlines()) == 106

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        numbers = body["messages"][-1]["content"].partition(": ")[2].partition(".")[0]
        return {"role": "assistant", "content": f"<answer>{gcd(*map(int, numbers.split(', ')))}</answer>"}

    async with running(tmp_path) as system:
        system.vllm.answer = answer
        assert await evaluated(system, "reasoning_gym:gcd", '{"tasks": 4, "max_value": 20}') == 1.0


async def test_a_game_of_textarena(running: Running, tmp_path: Path, installed: Callable[..., None]) -> None:
    """Who takes the first free cell loses or wins, and never makes an invalid move."""
    installed("textarena")
    assert len((await asyncio.to_thread(lightning, "environments", "textarena")).stdout.splitlines()) == 712

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        free = body["messages"][-1]["content"].rpartition("Available Moves: ")[2]
        return {"role": "assistant", "content": free.split(", ")[0].strip("' \n")}

    async with running(tmp_path) as system:
        system.vllm.answer = answer
        assert -1 < await evaluated(system, "textarena:TicTacToe-v0", '{"tasks": 4}') < 1
        for rewards in (rollout["named"] for rollout in await rollouts_of(system)):
            assert (rewards["invalid_move"], rewards["turn_count"] >= 3) == (0.0, True)
            assert sum(reward for name, reward in rewards.items() if name[:-1] in ("player-", "opponent-")) == 0
    done = await asyncio.to_thread(lightning, "run", "--environment", "textarena:Hangman-v0")
    assert "this game needs NLTK's words, and nothing is downloaded here; run `" in done.stderr


async def test_a_taskset_of_verifiers_with_tools(
    running: Running, tmp_path: Path, installed: Callable[..., None]
) -> None:
    shutil.copytree(TASKSET, tmp_path / "taskset")
    installed("verifiers", "--with", str(tmp_path / "taskset"))
    listed = (await asyncio.to_thread(lightning, "environments", "verifiers")).stdout
    assert " ".join(listed.splitlines()[-1].split()) == "word-problems Word problems with a calculator"

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        first, last = body["messages"][0]["content"], body["messages"][-1]
        if "###DONE###" in first:  # the played user
            (question,) = re.findall(r".+ has .+\?|.+ buys .+\?", first)
            return {"role": "assistant", "content": "###DONE###" if last["content"].isdigit() else question}
        if last["role"] == "tool":
            return {"role": "assistant", "content": last["content"]}
        given = json.dumps({"expression": expression(last["content"])})
        call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": given}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    async def streamed(request: web.Request) -> web.Response:
        message = answer(await request.json())
        calls = [{"index": 0, **call} for call in message.get("tool_calls", [])]
        delta = message | ({"tool_calls": calls} if calls else {})
        ends = [(delta, None), ({}, "tool_calls" if calls else "stop")]
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "base"}
        chunks = [{**chunk, "choices": [{"index": 0, "delta": d, "finish_reason": end}]} for d, end in ends]
        lines = [*map(json.dumps, chunks), "[DONE]"]
        text = "".join(f"data: {line}\n\n" for line in lines)
        return web.Response(text=text, content_type="text/event-stream")

    async with running(tmp_path) as system:
        system.vllm.odd = streamed
        options = ("--mode", "eval", "--json", "--environment", "verifiers:word-problems", "--environment-args")
        code, out, err = await system.lightning("run", *options, '{"tasks": 2}')
        assert (code, code or json.loads(out)["mean_reward"]) == (0, 1.0), err
        rollout, *_ = await rollouts_of(system)
        code, _, err = await system.lightning("run", *options, '{"tasks": 1, "env": {"id": "user-sim"}}')
        assert code == 0, err
        played, *_ = await rollouts_of(system)
    assert [call["agent"] for call in rollout["calls"]] == ["agent", "agent"]
    assert rollout["named"] == {"agent.turns": 2.0, "agent.right": 1.0, "reward": 1.0}
    agents = {(call["agent"], call["untrainable_reason"] == ONLY_RECORDED) for call in played["calls"]}
    assert (agents, played["reward"]) == ({("assistant", False), ("user", True)}, 1.0)


def expression(problem: str) -> str:
    x, y, z = re.findall(r"\d+", problem)
    if "gives" in problem:
        return f"{x} + {y} - {z}"
    return f"{x} * {y} + {z}" if "boxes" in problem else f"{x} + {y} * {z}"
