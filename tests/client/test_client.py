"""`lightning_proxy.client` against a real proxy, with real OpenAI clients."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from lightning_proxy import client
from lightning_proxy.client.control import FIND_S, Control
from lightning_proxy.client.scope import Rollout
from support.served import proxy_in_front

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def ask(openai_client: Any) -> Any:
    return openai_client.chat.completions.create(model="policy", messages=MESSAGES)


async def read(system: Any, rollout_id: str) -> dict[str, Any]:
    status, rollout = await system.call("GET", f"/rollouts/{rollout_id}")
    assert status == 200, rollout
    return rollout


def test_importing_it_brings_nothing_heavy() -> None:
    heavy = ("fastapi", "pydantic", "torch", "litellm", "openai", "httpx", "aiohttp", "lightning_proxy.proxy")
    script = f"import sys, lightning_proxy.client; sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or 0)"
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_a_scope_opens_names_and_completes_its_rollout(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system:

        def agent() -> str:
            with client.rollout(task_id="t1", agent="solver", mode="eval", url=system.url) as run, run.openai() as llm:
                ask(llm)
                client.emit_reward(0.5, final=False, comment="so far")
            return run.rollout_id

        rollout = await read(system, await asyncio.to_thread(agent))
    assert (rollout["task_id"], rollout["agent"], rollout["mode"]) == ("t1", "solver", "eval")
    assert (rollout["status"], rollout["reward"], len(rollout["calls"])) == ("completed", 0.5, 1)


async def test_an_exception_fails_the_rollout_also_one_without_calls(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        with pytest.raises(KeyError, match="lost"):
            async with client.rollout("r1", task_id="t", url=system.url):
                raise KeyError("lost")
        rollout = await read(system, "r1")
    assert (rollout["status"], rollout["reason"], rollout["task_id"]) == ("failed", "KeyError: 'lost'", "t")


async def test_scopes_of_tasks_and_threads_keep_apart(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        http = client.follow(httpx.AsyncClient())
        shared = openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="unused", http_client=http)
        threaded = client.follow(openai.OpenAI(base_url=f"{system.url}/v1", api_key="unused"))

        async def one(name: str) -> None:
            async with client.rollout(name, url=system.url):
                for _ in range(3):
                    await ask(shared)

        def other(name: str) -> None:
            with client.rollout(name, url=system.url):
                for _ in range(3):
                    ask(threaded)

        names = [f"{kind}{i}" for kind in ("task", "thread") for i in range(4)]
        # Threads of their own: the proxy needs the loop's, and these wait for the proxy.
        with ThreadPoolExecutor(4) as pool:
            loop = asyncio.get_running_loop()
            await asyncio.gather(
                *(one(n) if n.startswith("task") else loop.run_in_executor(pool, other, n) for n in names)
            )
        assert [len((await read(system, name))["calls"]) for name in names] == [3] * len(names)
        with pytest.raises(client.NoRollout, match="with client.rollout"):
            client.current()
        await shared.close()
        threaded.close()


async def test_clients_that_are_there_already_can_be_used_in_a_rollout(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        there = openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="unused", default_headers={"X-Mine": "yes"})
        async with client.rollout("r1", task_id="t", url=system.url) as run:
            await ask(run.using(there))
            async with run.async_openai() as own:
                await ask(own)
            with client.agent("critic") as critic:
                assert critic is client.current()
                await ask(critic.using(there))
            assert client.current() is run
        rollout = await read(system, "r1")
        await there.close()
        assert [call["agent"] for call in rollout["calls"]] == [None, None, "critic"]
        assert {asked["headers"].get("x-mine") for asked in system.vllm.requests} == {"yes", None}
        assert "X-Mine" not in run.headers


async def test_following_twice_adds_one_hook_and_explicit_headers_win(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        there = openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="unused")
        assert client.follow(client.follow(there)) is there
        async with client.rollout("r1", url=system.url):
            await there.chat.completions.create(
                model="policy", messages=MESSAGES, extra_headers={"X-Rollout-Id": "by-hand"}
            )
        await there.close()
        assert len((await read(system, "by-hand"))["calls"]) == 1
    claude = client.follow(anthropic.Anthropic(base_url="http://127.0.0.1:1", api_key="unused"))
    assert len(claude._client.event_hooks["request"]) == 1
    claude.close()
    with pytest.raises(TypeError, match=r"run\.headers"):
        client.follow(object())


async def test_a_program_that_the_agent_starts_belongs_to_its_rollout(running: Any, tmp_path: Path) -> None:
    script = """
import openai
from lightning_proxy import client
with openai.OpenAI() as llm:
    llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
client.emit_reward(0.75, name="inner", final=False)
"""
    async with (
        running(tmp_path) as system,
        client.rollout("r1", task_id="t", agent="a", mode="eval", url=system.url) as run,
    ):
        environment = os.environ | run.environ
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, env=environment)
        assert await process.wait() == 0
        rollout = await read(system, "r1")
    assert (rollout["task_id"], rollout["mode"], rollout["calls"][0]["agent"]) == ("t", "eval", "a")
    assert [(reward["name"], reward["reward"]) for reward in rollout["rewards"]] == [("inner", 0.75)]


async def test_a_scope_may_be_left_in_another_context_than_it_was_entered_in(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        scope = client.rollout("r1", url=system.url)
        # As where a framework runs both halves of a generator, a dependency with `yield`, as it sees fit.
        await asyncio.to_thread(contextvars.copy_context().run, scope.__enter__)
        await asyncio.to_thread(contextvars.copy_context().run, scope.__exit__, None, None, None)
        assert (await read(system, "r1"))["status"] == "completed"


async def test_actions_states_and_notes_stand_in_order_with_the_calls(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system:

        def agent() -> None:
            with client.rollout("r1", url=system.url) as run, run.openai() as llm:
                client.emit_state({"page": 1}, name="browser")
                client.emit_action("search", {"query": "cats"}, ["a", "b"])
                ask(llm)
                client.emit_action("fetch", {"url": "x"}, "no such page", is_error=True)
                client.emit_note("half way")
                ask(llm)
                client.emit_reward(1.0)

        await asyncio.to_thread(agent)
        rollout = await read(system, "r1")
        shown = (await system.lightning("rollouts", "show", "r1")).stdout
    assert [event["kind"] for event in rollout["events"]] == ["state", "action", "action", "note"]
    places = [shown.index(text) for text in ("search", "call 0", "no such page", "half way", "call 1")]
    assert places == sorted(places)


async def test_redaction_applies_to_events(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path, recording={"redact": {"patterns": [r"\d{6}"]}}) as system:
        body = {"kind": "action", "name": "login", "arguments": {"pin": "it is 123456"}}
        await system.call("POST", "/rollouts/r1/events", body)
        (event,) = (await read(system, "r1"))["events"]
    assert event["arguments"] == {"pin": "it is [redacted]"}


async def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy:
        await proxy.start()

        def agent() -> None:
            with client.rollout("r1", url=proxy.url, end=False):
                for i in range(5):
                    client.emit_action("step", i, i)
                client.emit_reward(1.0, name="progress", final=False)

        await asyncio.to_thread(agent)
        await proxy.end(signal.SIGKILL)
        assert proxy.rows("SELECT arguments, result FROM events ORDER BY event_id") == [
            (f"{i}", f"{i}") for i in range(5)
        ]
        assert proxy.rows("SELECT name, value FROM rewards") == [("progress", 1.0)]


class Flaky(BaseHTTPRequestHandler):
    """Takes each request in, and answers the first ones with 503, or hangs up without any answer."""

    protocol_version = "HTTP/1.1"
    ways: list[str]
    keys: list[str]

    def do_POST(self) -> None:
        self.keys.append(self.headers["Idempotency-Key"])
        self.rfile.read(int(self.headers["Content-Length"]))
        way = self.ways.pop(0) if self.ways else "answer"
        if way == "late":
            time.sleep(0.3)
        if way == "hang up":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status = {"answer": 200, "late": 200, "busy": 503, "refuse": 404}[way]
        error = {"error": {"message": "no rollout 'r'", "param": "rollout_id"}}
        body = json.dumps({"reward_id": 7} if status == 200 else error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def flaky() -> Any:
    Flaky.ways, Flaky.keys = [], []
    with HTTPServer(("127.0.0.1", 0), Flaky) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield Rollout(Control(f"http://127.0.0.1:{server.server_port}", patience_s=20), "r")
        server.shutdown()


@pytest.mark.parametrize("way", ["reward", "open"])
def test_what_is_sent_is_sent_again_until_it_is_recorded_and_counts_once(flaky: Rollout, way: str) -> None:
    Flaky.ways = ["busy", "hang up", "busy"]
    if way == "open":
        Rollout(replace(flaky.control, find_s=0.0), "r").open()  # a proxy that is there is waited for
    else:
        assert flaky.reward(1.0) == 7
    assert len(Flaky.keys) == 4 and len(set(Flaky.keys)) == 1


def test_a_reward_without_patience_waits_for_its_answer_and_is_a_number_of_any_kind(flaky: Rollout) -> None:
    Flaky.ways = ["late"]
    assert Rollout(replace(flaky.control, patience_s=0.0), "r").reward(1.0) == 7
    assert flaky.reward(np.float32(0.5)) == flaky.reward(np.int64(1)) == 7  # type: ignore[arg-type]


def test_what_is_refused_is_not_sent_again(flaky: Rollout) -> None:
    Flaky.ways = ["refuse"]
    with pytest.raises(client.Refused, match="404: no rollout 'r'") as error:
        flaky.reward(1.0)
    assert (error.value.status, error.value.param, len(Flaky.keys)) == (404, "rollout_id", 1)


def test_a_proxy_that_is_away_is_named_with_what_was_lost_and_at_the_start_long_before_the_patience_ends() -> None:
    away = Rollout(Control("http://127.0.0.1:1", patience_s=0.3), "r")
    with pytest.raises(client.ProxyUnreachable, match=r"127\.0\.0\.1:1, .*not done: POST /reward: .*refused"):
        away.reward(1.0)
    assert client.rollout(url="http://127.0.0.1:1")._rollout.control.find_s == FIND_S < 10
    assert client.rollout(url="http://127.0.0.1:1", patience_s=50)._rollout.control.find_s == 50
    away = Rollout(Control("http://127.0.0.1:1", patience_s=10_000, find_s=0.1), "r")
    with pytest.raises(client.ProxyUnreachable, match=r"^no proxy answers at http://127\.0\.0\.1:1, .*refused"):
        away.open()


def test_what_is_no_json_is_refused_before_it_is_sent(flaky: Rollout) -> None:
    for value in (float("nan"), float("inf"), object()):
        with pytest.raises(client.ClientError, match="cannot be sent as JSON"):
            flaky.event("note", value=value)
    assert Flaky.keys == []


def test_the_text_of_an_answer_is_read_whatever_its_api() -> None:
    for response in (
        {"choices": [{"message": {"content": "7"}}]},
        {"choices": [{"text": "7"}]},
        {"output": [{"type": "reasoning"}, {"type": "message", "content": [{"type": "output_text", "text": "7"}]}]},
        {"content": [{"type": "thinking", "thinking": "3+4"}, {"type": "text", "text": "7"}]},
    ):
        assert client.answer({"response": response}) == "7"
    assert client.answer({"response": None}) == client.answer({"response": {"error": {}}}) == ""
