"""CONTRACT.md, section 1: what an agent receives is what the upstream would have sent it directly.

Every case of the corpus is sent to a played upstream directly, and again through the proxy.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from traffic.server import read, stream

from contract.system import Json, Proxy, in_this_process
from support.corpus import FAMILIES, UNPACK, Case, post, sse, streamed, whole
from support.played import Asked, Got, Headers, Played, Step, ask, playing

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
# What belongs to one connection, what shows where a body ends, and the proxy's own.
NOT_COMPARED = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade content-length host x-hop expect"
    b" x-rollout-id x-call-id x-policy-version".split()
)
INJECTED = {"return_token_ids", "logprobs", "stream_options", "enable_response_messages", "include"}
TOP: Json = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "base"}
# The texts of each chunk's tokens, and where they are; "": held back, as parsers of tools do.
CHUNKS: list[tuple[str, list[str]]] = [
    ("reasoning", ["a", "\\"]), ("content", ["é😀"]), ("content", []), ("", ['"logprob":-1,"bytes":']), ("", []),
    ("content", ["", '"}]}', "\n\n"]), ("reasoning", ["\u2028"]), ("content", ['"choices":[', "data: [DONE]"]),
]  # fmt: skip
LOGPROBS = [-0.5, 0.0, -1e-7, -12.25, -99.5, -0.25, -1e-5, -3.0, -7.125, -0.75]


@dataclass
class Between:
    """A proxy between an agent and a played upstream of a kind, which can be asked directly, too."""

    kind: str
    played: Played
    direct: str
    proxy: Proxy
    rollouts: int = 0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["openai", "vllm"])
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Between]:
    played = Played()
    async with playing(played) as direct:
        target = {"base_url": f"{direct}/v1"}
        # The policy's own server is asked by the proxy itself, too: here it is none of the played ones.
        policy = {"name": "policy", "kind": "vllm", "base_url": "http://127.0.0.1:1/v1"}
        others = {"name": "others", "kind": "openai", **target}
        asked = {"name": "asked", "kind": request.param, "models": ["m"], **target}
        upstreams = [others, policy, asked]
        with in_this_process(tmp_path_factory.mktemp("between"), upstreams=upstreams) as proxy:
            yield Between(request.param, played, direct, proxy)
        await asyncio.sleep(0.1)  # the upstream's ends of connections close


@pytest.mark.parametrize("most", [30, pytest.param(10_000, marks=pytest.mark.long)])
async def test_the_agent_sees_no_difference(pair: Between, most: int) -> None:
    for cases in (*FAMILIES.values(), frameworks()):
        for case in cases[:: max(1, len(cases) // most)]:
            await see_the_same(case, pair)


def frameworks() -> list[Case]:
    """The recorded traffic of agent frameworks, in the order of its paths."""
    cases = []
    for call in sorted(read().calls, key=lambda call: (call.path, bool(call.body.get("stream")))):
        name, body = f"{call.truth} {call.path}", call.body | {"model": "m"}
        answer: list[Step] = [whole(json.dumps(call.answer).encode(), status=call.status or 500)]
        if body.get("stream") and call.status == 200:
            answer = streamed(*stream(call.path, call.answer, body))
        cases.append(Case(name, post(call.path.removeprefix("/v1/"), body), answer))
    return cases


@pytest.mark.parametrize("streams", [40, pytest.param(400, marks=pytest.mark.long)])
async def test_streams_of_tokens_reach_agent_and_record_however_they_are_cut(pair: Between, streams: int) -> None:
    for seed in range(streams):
        await see_the_same(Case(f"{seed}", post(body={"messages": [], "stream": True}), partial(tokens, seed)), pair)
        (call,) = pair.proxy.rollout(f"r{pair.rollouts}")["calls"]
        message = call["response"]["choices"][0]["message"]
        for name in ("content", "reasoning"):
            assert message[name] == "".join("".join(texts) for part, texts in CHUNKS if part == name), seed
        if pair.kind == "vllm":
            assert call["response_token_ids"] == [*range(len(LOGPROBS))], seed
            assert call["logprobs"] == pytest.approx(LOGPROBS), seed


def tokens(seed: int, asked: Asked) -> list[Step]:
    """A stream as vLLM writes it, with pings among the chunks, cut at any places."""
    body, source, numbers = json.loads(asked.body), random.Random(seed), itertools.count()
    has_ids = bool(body.get("return_token_ids"))

    def event(delta: Json, texts: Sequence[str] = (), finish: str | None = None, **more: Any) -> bytes:
        choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
        ids = [next(numbers) for _ in texts]
        if body.get("logprobs"):
            both = zip(texts, [LOGPROBS[number] for number in ids], strict=True)
            entries = [{"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []} for t, v in both]
            choice["logprobs"] = {"content": entries}
        if has_ids:
            choice["token_ids"] = ids
        return sse(TOP | {"choices": [choice]} | more)

    events = [event({"role": "assistant", "content": ""}, prompt_token_ids=[7, 8] if has_ids else None)]
    for name, texts in CHUNKS:
        more: Json = source.choice([{}, {}, {"unknown": [1.5]}])
        if name or has_ids:
            events += [event({name: "".join(texts)} if name else {}, texts, **more)]
        events += [b": ping\n\n"] * (source.random() < 0.1)
    events.append(event({}, finish="stop"))
    if body.get("stream_options"):
        usage = {"prompt_tokens": 2, "completion_tokens": len(LOGPROBS), "total_tokens": 2}
        events.append(sse(TOP | {"choices": [], "usage": usage}))
    whole_stream = b"".join(events) + b"data: [DONE]\n\n"
    cuts = sorted({0, *source.choices(range(len(whole_stream)), k=source.randint(0, 6)), len(whole_stream)})
    return streamed(*(whole_stream[a:b] for a, b in itertools.pairwise(cuts)))


async def see_the_same(case: Case, pair: Between) -> None:
    """Ask directly and through the proxy, and compare what the agent gets, what is asked for, and the record."""
    pair.rollouts += 1
    pair.played.script, pair.played.asked, rollout = case.script, [], f"r{pair.rollouts}"
    line, rest = case.request.split(b"\r\n", 1)
    request = line + b"\r\nX-Rollout-Id: " + rollout.encode() + b"\r\n" + rest
    expected = await ask(pair.direct, case.request, pair.played.seen)
    got = await ask(pair.proxy.url, request, pair.played.seen)
    assert not got.waits, case.name
    if expected.complete:
        compare_answers(case.name, expected, got)
    else:
        compare_broken_answers(case.name, expected, got)
    direct, *asked = pair.played.asked
    method, target, _ = line.decode().split(" ")
    recorded = method == "POST" and target in RECORDED
    injects = recorded and pair.kind == "vllm"
    if len(asked) == 2 and injects and expected.status in (400, 422):
        compare_requests(case.name, direct, asked[1], recorded, injects=False)  # again, without our additions
    elif len(asked) != 2 or expected.status is not None:  # a GET without an answer is sent again on a new connection
        assert len(asked) == 1, case.name
        compare_requests(case.name, direct, asked[0], recorded, injects)
    await compare_record(case.name, pair.proxy, rollout, got, recorded)


def compare_answers(name: str, expected: Got, got: Got) -> None:
    encoding, body, left_out = value(expected.headers, b"content-encoding"), expected.body, frozenset[bytes]()
    if encoding and not value(got.headers, b"content-encoding"):
        body, left_out = UNPACK[encoding.decode()](body), frozenset([b"content-encoding"])
    assert (got.complete, got.status, got.body) == (True, expected.status, body), name
    assert compared(got.headers) == compared(expected.headers, left_out), name
    assert got.status != 204 or value(got.headers, b"content-length") is None, name


def compare_broken_answers(name: str, expected: Got, got: Got) -> None:
    """Broken is what the agent must see: an answer without its end, or an error in place of it."""
    if got.complete:
        assert got.status in (502, 504) and (b'"upstream_error"' in got.body or b'"api_error"' in got.body), name
        return
    assert got.status == expected.status and expected.body.startswith(got.body), name
    events = expected.body[: expected.body.rfind(b"\n\n") + 2] if b"\n\n" in expected.body else b""
    assert got.body.startswith(events.rsplit(b"data: [DONE]", 1)[0]), name


def compare_requests(name: str, direct: Asked, proxied: Asked, recorded: bool, injects: bool) -> None:
    is_read = recorded or direct.target.startswith(b"/v1/responses/")  # a background response's end is recorded
    own = frozenset((b"accept-encoding",)) if is_read else frozenset()
    asked, expected = (
        (one.method, one.target, compared(one.headers, own), b"" if injects else one.body) for one in (proxied, direct)
    )
    assert asked == expected, name
    if is_read:
        assert value(proxied.headers, b"accept-encoding") == b"identity", name
    if injects:
        before, after = json.loads(direct.body), json.loads(proxied.body)
        assert {key for key in before | after if before.get(key) != after.get(key)} <= INJECTED, name


async def compare_record(name: str, proxy: Proxy, rollout: str, got: Got, recorded: bool) -> None:
    """A call is in the record, once, and ended well only if the agent had all of it."""
    if not recorded:
        answer = proxy.call("GET", f"/rollouts/{rollout}")
        assert answer.status == 404 or answer.json["calls"] == [], name
        return
    while "incomplete" in (statuses := [call["status"] for call in proxy.rollout(rollout)["calls"]]):
        await asyncio.sleep(0.01)
    ended_well = (got.status or 500) < 300 and (got.complete or b"data: [DONE]" in got.body)
    assert len(statuses) == 1 and (ended_well or statuses != ["ok"]), name


def compared(headers: Headers, but: frozenset[bytes] = frozenset()) -> list[tuple[bytes, bytes]]:
    """Sorted by name; the order of headers of one name stays."""
    kept = [(n.lower(), v) for n, v in headers if n.lower() not in NOT_COMPARED | but]
    return sorted(kept, key=lambda header: header[0])


def value(headers: Headers, name: bytes) -> Any:
    return next((v for n, v in headers if n.lower() == name), None)
