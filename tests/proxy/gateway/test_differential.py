"""Every case of the corpus, sent to a played upstream directly and through the proxy: the agent must see the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lightning_proxy.proxy.apis.dialects import DIALECTS
from support.corpus import FAMILIES
from support.corpus.case import Case
from support.corpus.http import UNPACK
from support.played import Asked, Got, Headers, Played, ask, playing
from support.relaying import MemoryRecorder, relaying

# What belongs to one connection, what shows where a body ends, and the proxy's own.
NOT_COMPARED = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade content-length host x-hop expect"
    b" x-rollout-id x-call-id x-policy-version".split()
)
INJECTED = {"return_token_ids", "logprobs", "stream_options", "enable_response_messages", "include"}
RUNS = [(family, kind) for family in FAMILIES for kind in ("openai", "vllm")]


@pytest.mark.parametrize(("family", "kind"), RUNS, ids=[f"{f}, {k}: {len(FAMILIES[f])} cases" for f, k in RUNS])
async def test_the_agent_sees_no_difference(family: str, kind: str) -> None:
    failed = []
    played, recorder = Played(), MemoryRecorder()
    settings = {"first_byte_timeout_s": 20, "idle_timeout_s": 20} | FAMILIES[family][0].settings
    async with playing(played) as direct, relaying(direct, recorder, max_body_mb=8, kind=kind, **settings) as proxied:
        for case in FAMILIES[family]:
            found = await differences(case, kind, played, direct, proxied, recorder)
            failed += [f"{case.name}: {difference}" for difference in found]
    assert failed == []


async def differences(
    case: Case, kind: str, played: Played, direct: str, proxied: str, recorder: MemoryRecorder
) -> list[str]:
    played.script = case.script
    played.asked, recorder.starts, recorder.ends = [], [], []
    recorder.ended.clear()
    patience = 0.5 if case.settings else 10.0  # an upstream that stalls is left by an agent, and by the proxy
    expected = await ask(direct, case.request, played.seen, patience)
    got = await ask(proxied, case.request, played.seen)
    found = _in_answers(expected, got) + ["the agent waits for ever"] * got.waits
    direct_asked, *asked = played.asked
    recorded, injects = bool(recorder.starts), kind == "vllm"
    if len(asked) == 2 and injects and expected.status in (400, 422):
        found += _in_requests(direct_asked, asked[1], recorded=recorded, injects=False)  # again, without our additions
    elif len(asked) == 2 and expected.status is None:
        pass  # a GET that nothing came back for, on a connection that was used before, is sent once more
    elif len(asked) != 1:
        found.append(f"the upstream was asked {len(asked)} times")
    else:
        found += _in_requests(direct_asked, asked[0], recorded=recorded, injects=injects)
    return found + await _in_record(case, got, recorder)


def _in_answers(expected: Got, got: Got) -> list[str]:
    if not expected.complete:
        return _in_broken_answers(expected, got)
    found = []
    if not got.complete:
        found.append("the answer is not complete")
    if got.status != expected.status:
        found.append(f"status {got.status}, not {expected.status}: {got.body[:200]!r}")
    decoded = _value(expected.headers, b"content-encoding") and not _value(got.headers, b"content-encoding")
    extra = frozenset((b"content-encoding",)) if decoded else frozenset()
    if _compared(got.headers) != _compared(expected.headers, extra):
        found.append(f"headers {_compared(got.headers)}, not {_compared(expected.headers, extra)}")
    if got.body != (_decoded(expected) if decoded else expected.body):
        found.append(f"body {got.body[:3000]!r}, not {expected.body[:3000]!r}")
    length = _value(got.headers, b"content-length")
    if length is not None and got.status == 204:
        found.append("204 with a length")
    return found


def _in_broken_answers(expected: Got, got: Got) -> list[str]:
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


def _in_requests(direct: Asked, proxied: Asked, *, recorded: bool, injects: bool) -> list[str]:
    found = []
    if (direct.method, direct.target) != (proxied.method, proxied.target):
        found.append(f"asked {proxied.method!r} {proxied.target!r}, not {direct.method!r} {direct.target!r}")
    is_read = recorded or direct.target.startswith(b"/v1/responses/")  # a background response's end is recorded
    own = frozenset((b"accept-encoding",)) if is_read else frozenset()
    if _compared(proxied.headers, own) != _compared(direct.headers, own):
        found.append(f"asked with {_compared(proxied.headers, own)}, not {_compared(direct.headers, own)}")
    if is_read and _value(proxied.headers, b"accept-encoding") != b"identity":
        found.append("a recorded call must be asked for as it is")
    if recorded and injects:
        before, after = json.loads(direct.body), json.loads(proxied.body)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        if not changed <= INJECTED:
            found.append(f"asked for {after}, not {before}")
    elif direct.body != proxied.body:
        found.append(f"asked with the body {proxied.body[:300]!r}, not {direct.body[:300]!r}")
    return found


async def _in_record(case: Case, got: Got, recorder: MemoryRecorder) -> list[str]:
    """A call is in the record, once, and ended well only if the agent had all of it."""
    method, target, _ = case.request.split(b" ", 2)
    if method != b"POST" or target.decode() not in DIALECTS:
        return [f"{len(recorder.starts)} calls recorded"] if recorder.starts else []
    if not recorder.ends:
        await asyncio.wait_for(recorder.ended.wait(), 5)
    if len(recorder.starts) != 1 or len(recorder.ends) != 1:
        return [f"{len(recorder.starts)} starts and {len(recorder.ends)} ends recorded"]
    end = recorder.ends[0]
    if end.status == "ok" and not (got.status or 500) < 300:
        return [f"recorded as ok: {got.status}"]
    return []


def _compared(headers: Headers, but: frozenset[bytes] = frozenset()) -> list[tuple[bytes, bytes]]:
    """Sorted by name; the order of headers of one name stays."""
    kept = [(n.lower(), v) for n, v in headers if n.lower() not in NOT_COMPARED | but]
    return sorted(kept, key=lambda header: header[0])


def _value(headers: Headers, name: bytes) -> Any:
    return next((v for n, v in headers if n.lower() == name), None)


def _decoded(got: Got) -> bytes:
    return UNPACK[_value(got.headers, b"content-encoding").decode()](got.body)
