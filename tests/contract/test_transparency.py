"""CONTRACT.md, section 1: what an agent receives is what the upstream would have sent it directly.

Every case of the corpus is sent to a played upstream directly, and again through the proxy.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
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
TEXTS = ["a", "é😀", "", '"logprob":-1,"bytes":', '"}]}', "\\", "\n\n", '"choices":[', "data: [DONE]", "\u2028"]
Token = tuple[str, int, float]
DELTAS = ["content", "content", "content", "reasoning", ""]


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


@pytest.mark.parametrize("most", [20, pytest.param(10_000, marks=pytest.mark.long)])
async def test_the_agent_sees_no_difference(pair: Between, most: int) -> None:
    failed: list[str] = []
    for cases in (*FAMILIES.values(), frameworks()):
        for case in cases[:: 1 + len(cases) // most]:
            failed += [f"{case.name}: {found}" for found in await differences(case, pair)]
    assert failed == []


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
    """Their chunks are as vLLM writes them, with odd texts and odd chunks among them."""
    for seed in range(streams):
        found = await differences(Case("", post(body={"messages": [], "stream": True}), partial(tokens, seed)), pair)
        assert found == [], seed
        (call,) = pair.proxy.rollout(f"r{pair.rollouts}")["calls"]
        message = call["response"]["choices"][0]["message"]
        for name in ("content", "reasoning"):
            text = "".join(text for part, said in chunks_of(seed) for text, _, _ in said if part == name)
            assert (message.get(name) or "") == text, seed
        if pair.kind == "vllm":
            said = [token for _, chunk in chunks_of(seed) for token in chunk]
            assert call["response_token_ids"] == [number for _, number, _ in said], seed
            assert call["logprobs"] == pytest.approx([value for _, _, value in said]), seed


def chunks_of(seed: int) -> list[tuple[str, list[Token]]]:
    """The tokens of each chunk of a stream, and where its text is; "": held back, as parsers of tools do."""
    source = random.Random(seed)

    def token() -> Token:
        return source.choice(TEXTS), source.randrange(150_000), source.choice([-0.5, 0.0, -1e-7, -12.25, -99.5])

    return [
        (source.choice(DELTAS), [token() for _ in range(source.choice([0, 1, 1, 1, 2, 3]))])
        for _ in range(source.randint(1, 12))
    ]


def tokens(seed: int, asked: Asked) -> list[Step]:
    body, source = json.loads(asked.body), random.Random(seed)
    top = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "base"}
    has_ids, count = bool(body.get("return_token_ids")), sum(len(said) for _, said in chunks_of(seed))

    def event(delta: Json, tokens: list[Token], finish: str | None = None, **more: Any) -> bytes:
        choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        if body.get("logprobs"):
            entries = [{"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []} for t, _, v in tokens]
            choice["logprobs"] = {"content": entries}
        choice["token_ids"] = [number for _, number, _ in tokens] if has_ids else None
        return sse(top | {"choices": [choice | more]})

    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events = [sse(top | {"choices": [first], "prompt_token_ids": [7, 8] if has_ids else None})]
    for name, said in chunks_of(seed):
        odd: Json = source.choice([{}, {}, {}, {"stop_reason": None}, {"unknown": [1.5]}])
        if name:
            events.append(event({name: "".join(text for text, _, _ in said)}, said, **odd))
        elif has_ids:
            events.append(event({}, said))
        events += [b": ping\n\n"] * (source.random() < 0.1)
    events.append(event({}, [], "stop"))
    if body.get("stream_options"):
        usage = {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2}
        events.append(sse(top | {"choices": [], "usage": usage}))
    whole_stream = b"".join(events) + b"data: [DONE]\n\n"
    cuts = sorted({0, *(source.randrange(len(whole_stream)) for _ in range(source.randint(0, 6))), len(whole_stream)})
    return streamed(*(whole_stream[a:b] for a, b in itertools.pairwise(cuts)))


async def differences(case: Case, pair: Between) -> list[str]:
    pair.rollouts += 1
    pair.played.script, pair.played.asked, rollout = case.script, [], f"r{pair.rollouts}"
    line, rest = case.request.split(b"\r\n", 1)
    request = line + b"\r\nX-Rollout-Id: " + rollout.encode() + b"\r\n" + rest
    expected = await ask(pair.direct, case.request, pair.played.seen)
    got = await ask(pair.proxy.url, request, pair.played.seen)
    found = in_answers(expected, got) + ["the agent waits for ever"] * got.waits
    direct_asked, *asked = pair.played.asked
    method, target, _ = line.decode().split(" ")
    recorded = method == "POST" and target in RECORDED
    injects = recorded and pair.kind == "vllm"
    if len(asked) == 2 and injects and expected.status in (400, 422):
        found += in_requests(direct_asked, asked[1], recorded, injects=False)  # again, without our additions
    elif len(asked) == 2 and expected.status is None:
        pass  # a GET that nothing came back for, on a connection that was used before, is sent once more
    elif len(asked) != 1:
        found.append(f"the upstream was asked {len(asked)} times")
    else:
        found += in_requests(direct_asked, asked[0], recorded, injects)
    return found + await in_record(pair.proxy, rollout, got, recorded)


def in_answers(expected: Got, got: Got) -> list[str]:
    if not expected.complete:
        return in_broken_answers(expected, got)
    found = []
    if not got.complete:
        found.append("the answer is not complete")
    if got.status != expected.status:
        found.append(f"status {got.status}, not {expected.status}: {got.body[:200]!r}")
    decoded = value(expected.headers, b"content-encoding") and not value(got.headers, b"content-encoding")
    extra = frozenset((b"content-encoding",)) if decoded else frozenset()
    if compared(got.headers) != compared(expected.headers, extra):
        found.append(f"headers {compared(got.headers)}, not {compared(expected.headers, extra)}")
    body = UNPACK[value(expected.headers, b"content-encoding").decode()](expected.body) if decoded else expected.body
    if got.body != body:
        found.append(f"body {got.body[:3000]!r}, not {body[:3000]!r}")
    if value(got.headers, b"content-length") is not None and got.status == 204:
        found.append("204 with a length")
    return found


def in_broken_answers(expected: Got, got: Got) -> list[str]:
    """Broken is what the agent must see: an answer without its end, or an error in place of it."""
    if got.complete:
        ours = b'"upstream_error"' in got.body or b'"api_error"' in got.body
        return [] if got.status in (502, 504) and ours else [f"a clean end: {got.status} {got.body[:200]!r}"]
    if got.status != expected.status or not expected.body.startswith(got.body):
        return [f"{got.status} {got.body[:300]!r}, not {expected.status} {expected.body[:300]!r}"]
    whole_events = expected.body[: expected.body.rfind(b"\n\n") + 2] if b"\n\n" in expected.body else b""
    terminal = whole_events.rfind(b"data: [DONE]")
    must = whole_events if terminal < 0 else whole_events[:terminal]
    return [] if got.body.startswith(must) else [f"events are missing: {got.body[-300:]!r}, not {must[-300:]!r}"]


def in_requests(direct: Asked, proxied: Asked, recorded: bool, injects: bool) -> list[str]:
    found = []
    if (direct.method, direct.target) != (proxied.method, proxied.target):
        found.append(f"asked {proxied.method!r} {proxied.target!r}, not {direct.method!r} {direct.target!r}")
    is_read = recorded or direct.target.startswith(b"/v1/responses/")  # a background response's end is recorded
    own = frozenset((b"accept-encoding",)) if is_read else frozenset()
    if compared(proxied.headers, own) != compared(direct.headers, own):
        found.append(f"asked with {compared(proxied.headers, own)}, not {compared(direct.headers, own)}")
    if is_read and value(proxied.headers, b"accept-encoding") != b"identity":
        found.append("a recorded call must be asked for without an encoding")
    if injects:
        before, after = json.loads(direct.body), json.loads(proxied.body)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        if not changed <= INJECTED:
            found.append(f"asked for {after}, not {before}")
    elif direct.body != proxied.body:
        found.append(f"asked with the body {proxied.body[:300]!r}, not {direct.body[:300]!r}")
    return found


async def in_record(proxy: Proxy, rollout: str, got: Got, recorded: bool) -> list[str]:
    """A call is in the record, once, and ended well only if the agent had all of it."""
    if not recorded:
        answer = proxy.call("GET", f"/rollouts/{rollout}")
        return [] if answer.status == 404 or answer.json["calls"] == [] else ["it is recorded"]
    while "incomplete" in (statuses := [call["status"] for call in proxy.rollout(rollout)["calls"]]):
        await asyncio.sleep(0.01)
    if len(statuses) != 1:
        return [f"{len(statuses)} calls recorded"]
    ended_well = (got.status or 500) < 300 and (got.complete or b"data: [DONE]" in got.body)
    return ["recorded as ok"] if statuses == ["ok"] and not ended_well else []


def compared(headers: Headers, but: frozenset[bytes] = frozenset()) -> list[tuple[bytes, bytes]]:
    """Sorted by name; the order of headers of one name stays."""
    kept = [(n.lower(), v) for n, v in headers if n.lower() not in NOT_COMPARED | but]
    return sorted(kept, key=lambda header: header[0])


def value(headers: Headers, name: bytes) -> Any:
    return next((v for n, v in headers if n.lower() == name), None)
