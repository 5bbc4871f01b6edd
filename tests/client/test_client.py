"""`lightning_proxy.client` against a real proxy, with real OpenAI clients."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from contract.raw import Answer, RawServer, serving_raw
from contract.system import Proxy, in_this_process
from lightning_proxy import client
from lightning_proxy.client.control import FIND_S, Control
from lightning_proxy.client.scope import Rollout
from support.served import proxy_in_front

ASKED: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def ask(openai_client: Any, **more: Any) -> Any:
    return openai_client.chat.completions.create(**ASKED, **more)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with in_this_process(tmp_path_factory.mktemp("proxy")) as one:
        yield one


def calls_of(proxy: Proxy, *rollouts: str) -> list[int]:
    return [len(proxy.rollout(name)["calls"]) for name in rollouts]


def test_importing_it_brings_nothing_heavy() -> None:
    heavy = ("fastapi", "pydantic", "torch", "litellm", "openai", "httpx", "aiohttp", "lightning_proxy.proxy")
    script = f"import sys, lightning_proxy.client; sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or 0)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_scope_opens_names_and_completes_its_rollout_with_its_steps_in_order(proxy: Proxy) -> None:
    with client.rollout(task_id="t1", agent="solver", mode="eval", url=proxy.url) as run, run.openai() as llm:
        client.emit_state({"page": 1}, name="browser")
        client.emit_action("search", {"query": "cats"}, ["a", "b"])
        ask(llm)
        client.emit_action("fetch", {"url": "x"}, "no such page", is_error=True)
        client.emit_note("half way")
        ask(llm)
        client.emit_reward(0.5, final=False, comment="so far")
    rollout = proxy.rollout(run.rollout_id)
    facts = ("task_id", "agent", "mode", "status", "reward")
    assert [rollout[fact] for fact in facts] == ["t1", "solver", "eval", "completed", 0.5]
    assert [event["kind"] for event in rollout["events"]] == ["state", "action", "action", "note"]
    shown = proxy.run("rollouts", "show", run.rollout_id).stdout
    assert re.search("(?s)search.*call 0.*no such page.*half way.*call 1", shown), shown


async def test_an_exception_fails_the_rollout_also_one_without_calls(proxy: Proxy) -> None:
    with pytest.raises(KeyError, match="lost"):
        async with client.rollout("fails", task_id="t", url=proxy.url):
            raise KeyError("lost")
    rollout = proxy.rollout("fails")
    assert (rollout["status"], rollout["reason"], rollout["task_id"]) == ("failed", "KeyError: 'lost'", "t")


async def test_scopes_of_tasks_and_threads_keep_apart(proxy: Proxy) -> None:
    where: Any = {"base_url": f"{proxy.url}/v1", "api_key": "unused"}
    shared = openai.AsyncOpenAI(**where, http_client=client.follow(httpx.AsyncClient()))
    threaded = client.follow(openai.OpenAI(**where))

    async def one(name: str) -> None:
        async with client.rollout(name, url=proxy.url):
            for _ in range(3):
                await ask(shared)

    def other(name: str) -> None:
        with client.rollout(name, url=proxy.url):
            for _ in range(3):
                ask(threaded)

    tasks, threads = [f"task{i}" for i in range(4)], [f"thread{i}" for i in range(4)]
    await asyncio.gather(*map(one, tasks), *(asyncio.to_thread(other, name) for name in threads))
    assert calls_of(proxy, *tasks, *threads) == [3] * 8
    with pytest.raises(client.NoRollout, match="with client.rollout"):
        client.current()
    await shared.close()
    threaded.close()


async def test_clients_that_are_there_already_can_be_used_in_a_rollout(proxy: Proxy) -> None:
    proxy.vllm.requests.clear()
    mine: Any = {"api_key": "unused", "default_headers": {"X-Mine": "yes"}}
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", **mine) as there:
        async with client.rollout("there", task_id="t", url=proxy.url) as run:
            await ask(run.using(there))
            async with run.async_openai() as own:
                await ask(own)
            with client.agent("critic") as critic:
                assert critic is client.current()
                await ask(critic.using(there))
            assert client.current() is run and "X-Mine" not in run.headers
        assert [call["agent"] for call in proxy.rollout("there")["calls"]] == [None, None, "critic"]
        assert [asked["headers"].get("x-mine") for asked in proxy.vllm.requests] == ["yes", None, "yes"]
        assert client.follow(client.follow(there)) is there
        async with client.rollout("followed", url=proxy.url):
            await ask(there)
            await ask(there, extra_headers={"X-Rollout-Id": "by-hand"})
    assert calls_of(proxy, "followed", "by-hand") == [1, 1]
    claude = client.follow(client.follow(anthropic.Anthropic(base_url="http://127.0.0.1:1", api_key="unused")))
    assert len(claude._client.event_hooks["request"]) == 1
    claude.close()
    with pytest.raises(TypeError, match=r"run\.headers"):
        client.follow(object())


def test_a_program_that_the_agent_starts_belongs_to_its_rollout(proxy: Proxy) -> None:
    script = f"""
import openai
from lightning_proxy import client
with openai.OpenAI() as llm:
    llm.chat.completions.create(**{ASKED})
client.emit_reward(0.75, name="inner", final=False)
"""
    with client.rollout("started", task_id="t", agent="a", mode="eval", url=proxy.url) as run:
        subprocess.run([sys.executable, "-c", script], env=os.environ | run.environ, check=True)
    rollout = proxy.rollout("started")
    assert (rollout["task_id"], rollout["mode"], rollout["calls"][0]["agent"]) == ("t", "eval", "a")
    assert [(reward["name"], reward["reward"]) for reward in rollout["rewards"]] == [("inner", 0.75)]


def test_a_scope_may_be_left_in_another_context_than_it_was_entered_in(proxy: Proxy) -> None:
    """As where a framework runs both halves of a generator, a dependency with `yield`, as it sees fit."""
    scope = client.rollout("moved", url=proxy.url)
    contextvars.copy_context().run(scope.__enter__)
    contextvars.copy_context().run(scope.__exit__, None, None, None)
    assert proxy.rollout("moved")["status"] == "completed"


def test_redaction_applies_to_events(tmp_path: Path) -> None:
    with in_this_process(tmp_path, recording={"redact": {"patterns": [r"\d{6}"]}}) as proxy:
        proxy.post("/rollouts/r1/events", {"kind": "action", "name": "login", "arguments": {"pin": "it is 123456"}})
        (event,) = proxy.rollout("r1")["events"]
    assert event["arguments"] == {"pin": "it is [redacted]"}


async def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy:
        await proxy.start()
        with client.rollout("r1", url=proxy.url, end=False):
            for i in range(5):
                client.emit_action("step", i, i)
            client.emit_reward(1.0, name="progress", final=False)
        await proxy.end(signal.SIGKILL)
        done = proxy.rows("SELECT arguments, result FROM events ORDER BY event_id")
        assert done == [(f"{i}", f"{i}") for i in range(5)]
        assert proxy.rows("SELECT name, value FROM rewards") == [("progress", 1.0)]


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


RECORDED, BUSY, HANG_UP = answer(200, b'{"reward_id": 7}'), answer(503, b"{}"), b""
REFUSED = answer(404, b'{"error": {"message": "no rollout \'r\'", "param": "rollout_id"}}')


def in_turn(*answers: bytes) -> Answer:
    """These answers first, then that it was recorded."""
    turns = itertools.chain(answers, itertools.repeat(RECORDED))
    return lambda connection, _: connection.sendall(next(turns))


def rollout_at(server: RawServer, **patience: float) -> Rollout:
    return Rollout(Control(server.url.removesuffix("/v1"), **{"patience_s": 20, **patience}), "r")


@pytest.mark.parametrize("way", ["reward", "open"])
def test_what_is_sent_is_sent_again_until_it_is_recorded_and_counts_once(way: str) -> None:
    with serving_raw(in_turn(BUSY, HANG_UP, BUSY)) as server:
        if way == "open":
            rollout_at(server, find_s=0.0).open()  # a proxy that is there is waited for
        else:
            assert rollout_at(server).reward(1.0) == 7
    keys = [re.search(rb"(?i)idempotency-key: \S+", asked) for asked in server.asked]
    assert len(keys) == 4 and len({key and key[0] for key in keys}) == 1 and all(keys)


def test_a_reward_without_patience_waits_for_its_answer_and_is_a_number_of_any_kind() -> None:
    def late(connection: Any, _: bytes) -> None:
        time.sleep(0.3)
        connection.sendall(RECORDED)

    with serving_raw(late) as server:
        assert rollout_at(server, patience_s=0.0).reward(1.0) == 7
        assert rollout_at(server).reward(np.float32(0.5)) == rollout_at(server).reward(np.int64(1)) == 7  # type: ignore[arg-type]


def test_what_is_refused_is_not_sent_again_and_what_is_no_json_never() -> None:
    with serving_raw(in_turn(REFUSED)) as server:
        with pytest.raises(client.Refused, match="404: no rollout 'r'") as error:
            rollout_at(server).reward(1.0)
        assert (error.value.status, error.value.param) == (404, "rollout_id")
        for value in (float("nan"), object()):
            with pytest.raises(client.ClientError, match="cannot be sent as JSON"):
                rollout_at(server).event("note", value=value)
        assert len(server.asked) == 1


def test_a_proxy_that_is_away_is_named_with_what_was_lost_and_at_the_start_long_before_the_patience_ends() -> None:
    away = Rollout(Control("http://127.0.0.1:1", patience_s=0.3), "r")
    with pytest.raises(client.ProxyUnreachable, match=r"^POST /reward got .* http://127\.0\.0\.1:1: .*refused"):
        away.reward(1.0)
    scopes = client.rollout(), client.rollout(patience_s=50)
    assert [scope._rollout.control.find_s for scope in scopes] == [FIND_S, 50] and FIND_S < 10
    away = Rollout(Control("http://127.0.0.1:1", patience_s=10_000, find_s=0.1), "r")
    with pytest.raises(client.ProxyUnreachable, match=r"^POST /rollouts/r/events got .*127\.0\.0\.1:1: .*refused"):
        away.open()


def test_the_text_of_an_answer_is_read_whatever_its_api() -> None:
    for response in (
        {"choices": [{"message": {"content": "7"}}]},
        {"choices": [{"text": "7"}]},
        {"output": [{"type": "reasoning"}, {"type": "message", "content": [{"type": "output_text", "text": "7"}]}]},
        {"content": [{"type": "thinking", "thinking": "3+4"}, {"type": "text", "text": "7"}]},
    ):
        assert client.answer({"response": response}) == "7"
    assert client.answer({"response": None}) == client.answer({"response": {"error": {}}}) == ""
