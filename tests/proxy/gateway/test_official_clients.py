"""The official clients, unchanged, directly and through the proxy: the same answers, events, exceptions and headers."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from traffic.server import config_of

from lightning_proxy.core.config.upstreams import UpstreamConfig
from support import voice
from support.clients import EACH_CLIENT, Client
from support.corpus import SSE_HEAD, chunk, head, streamed, whole
from support.in_process import proxy_of
from support.played import Asked, Do, Played, Step, playing

FOUND = {
    "/v1/models": {"object": "list", "data": [{"id": "base", "object": "model", "created": 1, "owned_by": "us"}]},
    "/v1/embeddings": {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1e-05]}]},
    "/v1/files": {"id": "file-1", "object": "file", "bytes": 3, "created_at": 1, "filename": "a", "purpose": "batch"},
    "/v1/messages/count_tokens": {"input_tokens": 12},
}


class Upstream:
    """Answers as vLLM does, and fails as the `user` of a request asks it to."""

    def __init__(self) -> None:
        self.tries = 0

    def __call__(self, asked: Asked) -> list[Step]:
        path = asked.target.decode()
        if path in FOUND:
            return [whole(voice.dumps(FOUND[path]), "x-request-id: req_1")]
        body = json.loads(asked.body)
        user = body.get("user") or (body.get("metadata") or {}).get("user_id") or ""
        frames = voice.STREAM[path.removeprefix("/v1/")](body)
        match user.split(" "):
            case ["status", status]:
                return [self.error(path, int(status))]
            case ["busy", times] if self.tries < int(times):
                self.tries += 1
                return [head(503, "retry-after-ms: 1", "Content-Length: 0")]
            case ["silence"]:
                return [Do.HANG]
            case ["stall"]:
                return [SSE_HEAD, chunk(frames[0]), Do.HANG]
            case ["broken"]:
                return [SSE_HEAD, *map(chunk, frames[:2]), Do.CLOSE]
            case ["error", "event"]:
                return streamed(frames[0], b'data: {"error": {"message": "boom", "code": 500}}\n\n', frames[-1])
        self.tries = 0
        if body["model"] == "nobody":
            return [self.error(path, 404)]
        if body.get("temperature") == "hot":
            return [self.error(path, 400)]
        if body.get("stream"):
            return streamed(*frames)
        return [whole(voice.dumps(voice.WHOLE[path.removeprefix("/v1/")](body)), "x-request-id: req_2", "x-own: 1")]

    def error(self, path: str, status: int) -> bytes:
        error: dict[str, Any] = {"message": f"because {status}", "type": "own_error", "param": "user", "code": "c"}
        shaped = {"type": "error", "error": error} if path.startswith("/v1/messages") else {"error": error}
        return whole(voice.dumps(shaped), "Retry-After: 0", "x-request-id: req_3", status=status)


@pytest.mark.long  # tests/end_to_end/test_transparency.py has the clients with a real vLLM
@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_an_official_client_sees_no_difference(client: Client, tmp_path: Path) -> None:
    if client.missing:
        (pytest.fail if "CI" in os.environ else pytest.skip)(client.missing)
    played = Played()
    played.script = Upstream()
    config = config_of("http://127.0.0.1:1", tmp_path)  # the policy's server would be asked by the proxy itself, too
    async with playing(played) as direct:
        config.upstreams.insert(0, UpstreamConfig(name="asked", kind="vllm", base_url=f"{direct}/v1"))
        expected = await client.run(direct, "base", "played")
        async with proxy_of(config) as proxied, aiohttp.ClientSession() as session:
            got = await client.run(proxied, "base", "played")
            found = await rollouts(session, proxied)
    assert got == expected
    assert expected["429"][0] == "RateLimitError"
    assert expected["no such model"][0] == "NotFoundError"
    calls = [call for rollout in found for call in rollout["calls"]]
    assert sum(call["superseded_by"] is not None for call in calls) == 2, "busy twice"
    assert Counter(call["status"] for call in calls)["ok"] >= 4


async def rollouts(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with session.get(f"{url}/rollouts?limit=1000") as listed:
        ids = [one["rollout_id"] for one in (await listed.json())["data"]]
    found = []
    for rollout_id in ids:
        async with session.get(f"{url}/rollouts/{rollout_id}") as answer:
            found.append(await answer.json())
    return found
