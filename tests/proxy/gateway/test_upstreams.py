"""Fallbacks, replicas and health checks: a real proxy before servers that answer, refuse, hang and come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from contract.raw import Seen, Upstream
from contract.system import Json, Proxy, free_port, in_this_process, played, wait_until


class Server(Upstream):
    """A model server with a name, which is in its answers. `hangs`: it never answers a POST."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.hangs, self.port = name, False, free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def running(self) -> Any:
        return played(self, self.port)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            is_list = request.path == "/v1/models"
            body: Json = {"object": "list", "data": []} if is_list else {"by": self.name}
            return web.json_response(body, status=self.status if is_list else 200)
        self.seen.append(Seen(request.method, request.path_qs, {}, await request.read()))
        if self.hangs:
            await asyncio.sleep(60)
        if self.status != 200:
            return web.json_response({"error": {"message": f"by {self.name}"}}, status=self.status)
        if b'"stream": true' in self.seen[-1].body:
            text = 'data: {"choices": [{"index": 0, "delta": {"content": "by "}}]}\n\ndata: [DONE]\n\n'
            return web.Response(text=text, content_type="text/event-stream")
        choices = [{"index": 0, "message": {"role": "assistant", "content": f"by {self.name}"}}]
        return web.json_response({"id": f"by_{self.name}_{len(self.seen)}", "model": "m", "choices": choices})


def upstream(name: str, *servers: Server, **settings: Any) -> Json:
    first, *others = (server.url for server in servers)
    return {"name": name, "kind": "openai", "base_url": first, "replicas": others, **settings}


@contextmanager
def two(tmp_path: Path, first: Json, second: Json) -> Iterator[tuple[Proxy, Server, Server]]:
    """A proxy before the upstreams "one", which falls back to "two", and "two"."""
    a, b = Server("first"), Server("second")
    upstreams = [upstream("one", a, fallbacks=["two"], **first), upstream("two", b, **second)]
    with a.running(), b.running(), in_this_process(tmp_path, upstreams=upstreams) as proxy:
        yield proxy, a, b


def ask(proxy: Proxy, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    return proxy.post(f"/rollouts/r{path}", {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


def ready(proxy: Proxy) -> Json:
    found: Json = proxy.call("GET", "/readyz").json
    return found


def test_a_server_may_answer_below_any_path_and_want_a_query_of_its_own(tmp_path: Path) -> None:
    server, version = Server("any"), "api-version=2024-10-21"
    root = server.url.removesuffix("/v1")
    azure = {"name": "azure", "kind": "openai", "base_url": f"{root}/openai/deployments/d/?{version}"}
    gemini = {"name": "gemini", "kind": "openai", "base_url": f"{root}/v1beta/openai/", "models": ["g"]}
    with server.running(), in_this_process(tmp_path, upstreams=[azure, gemini]) as proxy:
        assert ask(proxy).status == ask(proxy, model="g").status == 200
        assert ask(proxy, "/v1/chat/completions?a=b").status == 200
    assert [seen.target for seen in server.seen] == [
        f"/openai/deployments/d/chat/completions?{version}", "/v1beta/openai/chat/completions",
        f"/openai/deployments/d/chat/completions?{version}&a=b",
    ]  # fmt: skip


def test_a_fallback_answers_for_an_upstream_that_fails(tmp_path: Path) -> None:
    first = {"first_byte_timeout_s": 0.3, "models": ["m"]}
    with two(tmp_path, first, {"model_map": {"m": "other", "away": "other"}}) as (proxy, one, second):
        for failure in (429, 500, 503, "hangs"):
            one.status, one.hangs = (200, True) if failure == "hangs" else (failure, False)
            for stream in (False, True):
                answer = ask(proxy, stream=stream)
                call = proxy.rollout("r")["calls"][-1]
                assert (answer.status, b"by " in answer.body) == (200, True)
                found = (call["status"], call["upstream"], call["model"], call["http_status"])
                assert found == ("ok", "two", "other", 200), failure
        assert {json.loads(seen.body)["model"] for seen in second.seen} == {"other"} and len(one.seen) == 8


def test_an_upstream_that_has_no_such_api_falls_back(tmp_path: Path) -> None:
    last = Server("last")
    litellm = {"name": "litellm", "kind": "litellm", "model_map": {"m": "gemini/m"}, "fallbacks": ["last"]}
    with last.running(), in_this_process(tmp_path, upstreams=[litellm, upstream("last", last)]) as proxy:
        answer = ask(proxy, "/v1/moderations")
        assert (answer.status, b"by last" in answer.body) == (200, True)


def test_a_fallback_is_asked_after_retries_and_only_for_a_failure_and_the_last_one_is_shown(tmp_path: Path) -> None:
    with two(tmp_path, {"retries": 2, "retry_wait_s": 0.01}, {}) as (proxy, first, second):
        for first.status in (200, 400, 404):
            assert ask(proxy).status == first.status
        assert {call["upstream"] for call in proxy.rollout("r")["calls"]} == {"one"} and second.seen == []
        first.reset()
        first.status, second.status = 503, 429
        answer = ask(proxy)
        assert (answer.status, b"by second" in answer.body) == (429, True)
        assert (len(first.seen), len(second.seen)) == (3, 1)
        call = proxy.rollout("r")["calls"][-1]
        assert (call["status"], call["upstream"], call["http_status"]) == ("error", "two", 429)


def test_a_fallback_that_has_no_name_for_the_alias_makes_nothing_ready(tmp_path: Path) -> None:
    vllm = upstream("policy", Server("gone"), kind="vllm", fallbacks=["litellm"])
    litellm = {"name": "litellm", "kind": "litellm", "models": ["gemini/m"]}
    with in_this_process(tmp_path, upstreams=[vllm, litellm]) as proxy:
        assert ask(proxy, model="policy").status == 502
        assert ready(proxy)["status"] == "not ready"


def placement(proxy: Proxy) -> dict[str, str]:
    """Which replica answers which of 40 rollouts."""
    answers = {f"r{i}": proxy.chat(f"r{i}", model="m").json["choices"][0]["message"] for i in range(40)}
    return {rollout: message["content"].removeprefix("by ") for rollout, message in answers.items()}


def test_rollouts_keep_to_a_replica_and_only_those_of_a_dead_one_move(tmp_path: Path) -> None:
    a, b, c = map(Server, "abc")
    with a.running(), b.running(), in_this_process(tmp_path, upstreams=[upstream("one", a, b, c)]) as proxy:
        with c.running():
            placed = placement(proxy)
            assert {*placed.values()} == {"a", "b", "c"} and placement(proxy) == placed
        moved = placement(proxy)
        assert {*moved.values()} == {"a", "b"}
        assert all(moved[rollout] == name for rollout, name in placed.items() if name != "c")
        a.reset()
        b.reset()
        a.status = b.status = 500
        assert ask(proxy).status == 500
        assert len(a.seen) + len(b.seen) == 1, "an error of one is not followed by another"


def test_a_health_check_takes_a_replica_out_and_puts_it_back(tmp_path: Path) -> None:
    a, b = map(Server, "ab")
    address = a.url.removeprefix("http://").removesuffix("/v1")
    metric = f'lightning_upstream_up{{replica="{address}",upstream="one"}}'

    checked, placed = upstream("one", a, b, health_check_s=0.05), list[dict[str, str]]()
    with a.running(), b.running(), in_this_process(tmp_path, upstreams=[checked]) as proxy:
        for a.status, down in ((200, []), (503, ["one, server 1 of 2"]), (200, [])):
            wait_until(lambda down=down: ready(proxy).get("down", []) == down, 20, f"down: {down}")
            assert f"{metric} {float(not down)}" in proxy.call("GET", "/metrics").body.decode()
            placed.append(placement(proxy))
    assert {*placed[0].values()} == {"a", "b"} and {*placed[1].values()} == {"b"} and placed[2] == placed[0]


def test_an_upstream_that_is_known_to_be_down_is_not_waited_for(tmp_path: Path) -> None:
    with two(tmp_path, {"health_check_s": 0.05}, {}) as (proxy, first, second):
        first.status, first.hangs = 500, True
        wait_until(lambda: ready(proxy).get("down") == ["one"], 20, "it is down")
        assert ask(proxy).status == 200
        assert (first.seen, len(second.seen)) == ([], 1)


def test_a_model_goes_to_the_upstream_that_names_it_also_in_a_form_and_what_a_fallback_maps_does_not(
    tmp_path: Path,
) -> None:
    sound, first, second = b"\x00\r\n--\xff" * 9, Server("first"), Server("second")
    upstreams = [
        upstream("one", first, fallbacks=["two"]),
        upstream("two", second, models=["direct"], model_map={"m": "renamed"}),
        upstream("three", second, model_map={"mapped": "other"}),
    ]
    with first.running(), second.running(), in_this_process(tmp_path, upstreams=upstreams) as proxy:
        for model in ("m", "unknown", "direct", "mapped"):
            ask(proxy, model=model)
        found = [(call["upstream"], call["model"]) for call in proxy.rollout("r")["calls"]]
        assert found == [("one", "m"), ("one", "unknown"), ("two", "direct"), ("three", "other")]
        first.reset()
        second.reset()
        for model in ("m", "direct", "mapped"):
            form: Any = {"files": {"file": ("a.wav", sound, "audio/wav")}, "data": {"language": "en", "model": model}}
            assert proxy.client.post(f"{proxy.url}/v1/audio/transcriptions", **form).status_code == 200
    asked = [seen.body for seen in (*first.seen, *second.seen)]
    for body, model in zip(asked, (b"m", b"direct", b"other"), strict=True):
        assert sound in body and b"\r\n\r\nen\r\n" in body and b'name="model"\r\n\r\n' + model + b"\r\n" in body


def test_a_response_is_asked_for_again_where_it_was_given(tmp_path: Path) -> None:
    first, twin, other = map(Server, ("first", "twin", "other"))
    upstreams = [upstream("one", first, twin), upstream("two", other, models=["theirs"])]
    with first.running(), twin.running(), other.running(), in_this_process(tmp_path, upstreams=upstreams) as proxy:
        for prefix in ("/rollouts/r/v1", "/v1"):
            for model in ("theirs", *["m"] * 6):
                given = proxy.post(f"{prefix}/responses", {"model": model}).json["id"]
                by = proxy.get(f"{prefix}/responses/{given}/input_items")["by"]
                assert given.startswith(f"by_{by}_")
        assert proxy.get("/rollouts/r/v1/responses/unknown")["by"] in ("first", "twin")
