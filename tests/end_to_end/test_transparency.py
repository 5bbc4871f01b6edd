"""The same requests to a real vLLM directly and through the proxy: what the agent receives must not differ."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any, NamedTuple

import pytest

from contract.real import System
from support.clients import EACH_CLIENT, Client

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(900)]

NAME = "speller"
SAY = [{"role": "user", "content": "Say hello to Zoë, in French."}]
DIGITS = {name: {"type": "integer", "maximum": 9} for name in "ab"}
ADDED = {"type": "object", "properties": DIGITS, "required": ["a", "b"]}
SUM = {"type": "function", "function": {"name": "add", "description": "adds two digits", "parameters": ADDED}}
FORCED = {"tools": [SUM], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 40}
LEAF = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TREE = {"type": "json_schema", "json_schema": {"name": "x", "schema": LEAF}}

# What each route is asked; and what else, whole and streamed, greedily.
ONE = "One, two,"
ASKED: dict[str, Any] = {
    "chat/completions": {"messages": SAY}, "completions": {"prompt": ONE}, "responses": {"input": SAY},
    "messages": {"messages": SAY},
}  # fmt: skip
CHAT: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 2},
    {"stop": ["o"]},
    {"response_format": TREE, "max_tokens": 30},
    {"messages": [*SAY, {"role": "assistant", "content": "Bonjour"}, {"role": "user", "content": "😀 again"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]},
    {"unknown_field": {"kept": [1, 2.50, None]}},
    FORCED,
    {"max_tokens": 1},
    {"messages": []},
    {"temperature": "hot"},
    {"max_tokens": 100_000},
    {"model": "nobody"},
]
COMPLETIONS: list[dict[str, Any]] = [
    {}, {"logprobs": 2}, {"prompt": [ONE, "A, B,"]}, {"echo": True}, {"prompt": [1, 2, 3]}, {"prompt": 5},
]  # fmt: skip
RESPONSES: list[dict[str, Any]] = [
    {"input": "Say hello."},
    {"instructions": "Be brief."},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"max_output_tokens": 2},
    {"enable_response_messages": True},
    {"input": 5},
]
MESSAGES: list[dict[str, Any]] = [{}, {"system": "Be brief."}, {"stop_sequences": ["o"]}, {"messages": []}]
CASES = [
    (path, body | {"stream": stream})
    for path, bodies in zip(ASKED, (CHAT, COMPLETIONS, RESPONSES, MESSAGES), strict=True)
    for body in bodies
    for stream in (False, True)
]


class Served(NamedTuple):
    direct: str
    proxied: str


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


@pytest.fixture(scope="module")
def served(merged: System) -> Served:
    return Served(f"http://127.0.0.1:{merged.vllm_port}", f"http://127.0.0.1:{merged.port}/rollouts/r")


@pytest.mark.parametrize(("path", "body"), CASES, ids=lambda value: json.dumps(value)[:70])
def test_the_agent_sees_no_difference(served: Served, path: str, body: dict[str, Any]) -> None:
    body = {"max_tokens": 8, "temperature": 0} | ASKED[path] | body
    if path == "responses":
        body.setdefault("max_output_tokens", body.pop("max_tokens"))
    ours = body | {"model": body.get("model", "policy")}
    theirs = body | {"model": body.get("model", NAME)}
    post(f"{served.direct}/v1/{path}", theirs)  # fills vLLM's prefix cache, which `usage` shows
    several = body["stream"] and (body.get("n") or isinstance(body.get("prompt"), list))  # vLLM sends as they come
    for _ in range(10):  # where it falls behind, vLLM joins tokens in one frame: then both are asked again
        expected = post(f"{served.direct}/v1/{path}", theirs)
        got = post(f"{served.proxied}/v1/{path}", ours)
        assert (got.status, got.headers) == (expected.status, expected.headers)
        frames, expected_frames = (frames_of(path, answer.body, several) for answer in (got, expected))
        if frames == expected_frames:
            break
    assert frames == expected_frames


def test_what_was_sampled_is_recorded_with_its_tokens(served: Served) -> None:
    url = served.proxied.replace("/rollouts/r", "/rollouts/sampled")
    for path, body in ASKED.items():
        post(f"{url}/v1/{path}", {"model": "policy", "max_tokens": 5, "max_output_tokens": 5} | body)
    calls = json.loads(urllib.request.urlopen(url + "?requests=whole").read())["calls"]
    lengths = [(len(call["response_token_ids"]), len(call["logprobs"])) for call in calls if call["trainable"]]
    assert len(lengths) == len(ASKED) and all(tokens == logprobs > 0 for tokens, logprobs in lengths)


@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_an_official_client_sees_no_difference(served: Served, client: Client) -> None:
    if client.missing:
        pytest.skip(client.missing)
    await client.run(served.direct, NAME)  # fills vLLM's prefix cache
    for _ in range(5):  # as above
        expected = _shown(await client.run(served.direct, NAME))
        got = _shown(await client.run(served.proxied.replace("/rollouts/r", "/rollouts/clients"), "policy"))
        if got == expected:
            break
    assert got == expected


def _shown(answers: dict[str, Any]) -> dict[str, str]:
    """Without what is new in every answer, also of JSON in a string."""
    texts = {step: json.dumps(value, separators=(",", ":")).replace('\\"', '"') for step, value in answers.items()}
    return {step: _without_ids(text) for step, text in texts.items()}


def post(url: str, body: dict[str, Any]) -> Answer:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        answer = urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read().decode()
        return Answer(answer.status, _comparable(dict(answer.headers)), _without_ids(text))


def frames_of(path: str, body: str, several: bool) -> list[Any]:
    """Return the parts of an answer that are to be the same; of what is translated, their order of fields is free."""
    if path in ("responses", "messages"):
        lines = [line.removeprefix("data: ") for line in body.splitlines() if not line.startswith("event: ")]
        return [json.loads(line) for line in lines if line]
    return sorted(body.split("\n\n")) if several else body.split("\n\n")


def _comparable(headers: dict[str, str]) -> dict[str, str]:
    """Without what is new in every answer, ours, and how the body's end is shown."""
    changing = ("date", "content-length", "transfer-encoding", "x-rollout-id", "x-call-id", "x-policy-version")
    return {name.lower(): value for name, value in headers.items() if name.lower() not in changing}


def _without_ids(text: str) -> str:
    text = re.sub(r"\b(chatcmpl|chatcmpl-tool|cmpl|resp|msg|fc|call|rs)[-_][0-9a-f-]{8,}", "ID", text)
    return re.sub(r'"(created|created_at|completed_at)":[0-9.]+', r'"\1":0', text)
