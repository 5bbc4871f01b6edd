"""Any request to a running proxy: it is answered, not with an error of ours, and what was answered is in the store.

`make test-all` tries more; `LIGHTNING_FUZZ_SECONDS=600` more still.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from yarl import URL

from lightning_proxy.proxy.gateway.relay import DIALECTS
from support.fuzzing import examples

EXAMPLES = max(20, int(os.environ.get("LIGHTNING_FUZZ_SECONDS", "0")) * 2)
NAMES_TEXT = "model messages stream n prompt input tools logprobs stream_options return_token_ids include temperature x"
NAMES = st.sampled_from(NAMES_TEXT.split())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just("policy"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
CHATS = st.fixed_dictionaries({"model": st.just("policy")}, optional={"messages": JSON, "stream": JSON, "n": JSON})
BODIES = st.one_of(
    st.binary(max_size=60),
    (CHATS | st.dictionaries(NAMES, JSON, max_size=6)).map(lambda body: json.dumps(body).encode()),
    st.sampled_from([b'{"model": "policy", "messages": "\\ud800"}', b"{" * 3000, b"[]", b"x" * 20_000]),
)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=12)
HEADERS_TEXT = """
X-Rollout-Id X-Task-Id X-Agent-Name X-Rollout-Mode X-Stainless-Retry-Count Content-Type Authorization Accept
Content-Encoding Idempotency-Key Connection Range X-Own
"""
HEADERS = st.dictionaries(
    st.sampled_from(HEADERS_TEXT.split()),
    st.sampled_from(["r1", "r2", "train", "1", "application/json", "gzip", "X-Own", "bytes=0-"]) | VALUES,
    max_size=4,
)
ODD = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#?"), max_size=10)
KNOWN = [*sorted(DIALECTS), *["/v1/chat/completions"] * 4, "/v1/models", "/v1/embeddings", "/v1/"]
PATHS = st.sampled_from(KNOWN) | ODD.map("/v1/".__add__)
PREFIXES = st.sampled_from(["", "", "/rollouts/u1", "/rollouts/u2/tasks/t/agents/a", "/rollouts/%00", "/rollouts/é"])
METHODS = st.sampled_from(["POST"] * 6 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
ANYTHING = st.tuples(METHODS, st.tuples(PREFIXES, PATHS).map("".join), HEADERS, BODIES)
# As many again that can be answered.
CHAT = st.tuples(
    st.just("POST"),
    st.sampled_from(["", "/rollouts/u1", "/rollouts/u2/tasks/t/agents/a"]).map(lambda p: p + "/v1/chat/completions"),
    st.sampled_from([{}, {"X-Rollout-Id": "r1"}, {"X-Rollout-Id": "r1", "X-Stainless-Retry-Count": "1"}]),
    CHATS.map(lambda body: json.dumps(body).encode()),
)
REQUESTS = ANYTHING | CHAT


@pytest.mark.timeout(EXAMPLES * 20)
@examples(EXAMPLES, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(REQUESTS, min_size=15, max_size=30))
def test_what_is_answered_is_stored(running: Any, caplog: Any, requests: list[Any]) -> None:
    async def all_of_them(directory: Path) -> None:
        async with running(directory, max_body_mb=0.01) as system:
            answers = await asyncio.gather(*(ask(system, *request) for request in requests))
            for (method, path, *_), (status, headers, body) in zip(requests, answers, strict=True):
                assert b"internal error" not in body, (method, path, body)
                if "X-Call-Id" in headers:
                    _, rollout = await system.call("GET", f"/rollouts/{headers['X-Rollout-Id']}")
                    [call] = [call for call in rollout["calls"] if call["call_id"] == headers["X-Call-Id"]]
                    assert call["status"] == ("ok" if status < 300 else "error")
                    assert call["http_status"] == status
                elif method == "POST" and path in DIALECTS:
                    assert status >= 400, "a model call is recorded"
            assert (await system.call("GET", "/readyz"))[0] == 200

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(all_of_them(Path(directory)))
    ours = [r for r in caplog.records if r.name.startswith("lightning_proxy") and r.levelno >= logging.ERROR]
    assert ours == []


async def ask(system: Any, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any, bytes]:
    names = {name: value.strip() for name, value in headers.items()}
    skipped = ("Content-Type", "Accept", "Accept-Encoding")
    url = URL(system.url + path.replace("é", "%C3%A9"), encoded=True)
    async with system.session.request(
        method, url, data=body, headers=names, skip_auto_headers=skipped, allow_redirects=False
    ) as answer:
        return answer.status, answer.headers, await asyncio.wait_for(answer.read(), 20)
