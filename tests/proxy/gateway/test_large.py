"""Large requests are read in a thread and in turns with others, and are treated like small ones."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.aside import LARGE
from lightning_proxy.proxy.control.requests import large_response
from lightning_proxy.proxy.gateway.call import CallUnderWay, Question
from lightning_proxy.proxy.json_text import encode_in_turns, loads, loads_in_turns

Running = Callable[..., AbstractAsyncContextManager[Any]]
PADDING = json.dumps("x" * LARGE).encode()

VALUES = [
    b'{"a": [1, -2.5, 1e3, true, null, "\\u00e9", {}], "b": {"c": []}}',
    b'{"twice": 1, "twice": 2}',
    b'{"lone": "\\ud800", "long": 123456789012345678901234567890}',
    b"[]",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": 1',
    b'{"a": "\xff"}',
    b"",
    b"[" * 100_000 + b"]" * 100_000,
]


@pytest.mark.parametrize("text", VALUES)
def test_json_read_in_turns_is_the_same(text: bytes) -> None:
    def read(how: Callable[[bytes], Any]) -> Any:
        try:
            return repr(how(text))
        except ValueError:
            return ValueError

    assert read(loads_in_turns) == read(loads)


def test_json_written_in_turns_is_the_same() -> None:
    value = {"data": [{"a": "\ud800"}, [1, 2.5, None], "é"], "none": None, "empty": [], "é": {"b": [1]}}
    assert json.loads(encode_in_turns(value)) == value
    assert encode_in_turns({}) == b"{}"


async def test_a_large_answer_is_sent_in_parts() -> None:
    value = {"data": [{"text": f"{i}" * 50_000} for i in range(60)], "next_cursor": None}
    response = await large_response(lambda: value)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    start, *bodies = sent
    parts = [message["body"] for message in bodies]
    assert json.loads(b"".join(parts)) == value
    assert max(map(len, parts)) < 2**19
    assert dict(start["headers"])[b"content-length"] == str(sum(map(len, parts))).encode()


@pytest.mark.parametrize("bad", [b"NaN", b'"\xff"', b"[" * 3000 + b"]" * 3000, b"{", b"1, 2"])
async def test_a_large_body_that_is_not_valid_is_refused(running: Running, tmp_path: Path, bad: bytes) -> None:
    async with running(tmp_path) as system:
        chat = b'{"model": "policy", "messages": [], "padding": %s, "bad": %s}' % (PADDING, bad)
        assert (await system.call("POST", "/v1/chat/completions", chat))[0] == 400
        reward = b'{"rollout_id": "r", "reward": 1, "padding": %s, "bad": %s}' % (PADDING, bad)
        assert (await system.call("POST", "/reward", reward))[0] in (400, 422)
        assert (await system.call("GET", "/rollouts"))[1]["data"] == []


@pytest.mark.parametrize("recording", [{}, {"redact": {"patterns": ["secret"]}}])
@pytest.mark.parametrize("named", [True, False])
async def test_a_large_conversation_is_recorded_and_gone_on_with(
    running: Running, tmp_path: Path, named: bool, recording: dict[str, Any]
) -> None:
    async with running(tmp_path, recording=recording) as system:
        system.vllm.answer = lambda body: {"role": "assistant", "content": f"after {len(body['messages'])}"}
        messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} is no secret"} for i in range(10_001)]
        path = "/rollouts/r1/v1/chat/completions" if named else "/v1/chat/completions"
        sent = []
        for turn in range(3):
            body = {"model": "policy", "messages": messages, "n": 1, "user": f"u{turn}"}
            sent.append(body)
            status, answer = await system.call("POST", path, body)
            assert status == 200
            messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": f"more {turn}"}]
        (rollout,) = (await system.call("GET", "/rollouts"))[1]["data"]
        _, seen = await system.call("GET", f"/rollouts/{rollout['rollout_id']}?requests=whole")
        kept = json.loads(json.dumps(sent).replace("secret", "[redacted]" if recording else "secret"))
        assert [call["request"] for call in seen["calls"]] == kept
        _, told = await system.call("GET", f"/rollouts/{rollout['rollout_id']}/transitions?requests=whole")
        assert [t["state"]["messages"] for t in told["data"]] == [body["messages"] for body in kept]


async def test_large_bodies_of_the_control_api_are_recorded_as_they_are(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        metadata = {str(i): [i, {"a": None}, "é"] for i in range(20_000)}
        _, opened = await system.call("POST", "/rollouts", {"metadata": metadata, "n": 2})
        rollout = opened[0]["rollout_id"]
        _, page = await system.call("GET", "/rollouts")
        assert [one["metadata"] for one in page["data"]] == [metadata] * 2
        notes = [{"kind": "note", "value": {"at": [i] * 100}} for i in range(1_000)]
        assert (await system.call("POST", f"/rollouts/{rollout}/events", notes))[0] == 200
        rewards = [{"rollout_id": rollout, "reward": i} for i in range(10_000)]
        assert len((await system.call("POST", "/reward", rewards))[1]) == 10_000
        _, seen = await system.call("GET", f"/rollouts/{rollout}")
        assert [event["value"] for event in seen["events"]] == [note["value"] for note in notes]
        assert [reward["reward"] for reward in seen["rewards"]] == [*range(10_000)]


@pytest.mark.parametrize("continuity", ["text", "exact"])
async def test_nothing_of_a_call_waits_until_python_looks_for_cycles(
    running: Running, tmp_path: Path, continuity: str
) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    async with running(tmp_path, publish="lora", continuity=continuity) as system:
        gc.disable()
        try:
            for path in ("/v1/chat/completions", "/rollouts/r/v1/chat/completions"):
                assert (await system.call("POST", path, body))[0] == 200
            async with asyncio.timeout(10):  # the server's side may end a moment later
                while any(type(found) in (Question, CallUnderWay) for found in gc.get_objects()):
                    await asyncio.sleep(0.05)
        finally:
            gc.enable()
