"""CONTRACT.md, section 1: no operator route of an upstream is reachable, and what is, is what was checked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from contract.raw import HOST, Upstream, send, statuses
from contract.system import Proxy, free_port, in_this_process, played
from support.fuzzing import METHODS, spellings

KEY = "sk-upstream-5c1dD0nTl3akM3pl34s3"
BODY = b'{"model":"m","messages":[]}'
JSON = HOST + b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture(scope="module")
def keyed(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with played(upstream) as url:
        known = {"name": "u", "kind": "openai", "base_url": f"{url}/v1", "api_key": KEY}
        with in_this_process(tmp_path_factory.mktemp("keyed"), upstreams=[known]) as proxy:
            yield proxy


@pytest.fixture(autouse=True)
def as_new(upstream: Upstream) -> None:
    upstream.reset()


HIDDEN = rb"""
/v1/load_lora_adapter /v1/../v1/load_lora_adapter /v1/./load_lora_adapter /v1/x/../load_lora_adapter
/v1/%2e%2e/pause /v1/%2E%2E%2Fpause /v1/..%2fpause /v1/%252e%252e/pause /v1/%25252e%25252e/pause /v1/%2525252e./x
/v1%2fload_lora_adapter /v1/x%2f..%2fload_lora_adapter /v1/load_lora_adapter; /v1/load_lora_adapter;a=b
/v1/;/load_lora_adapter /v1/load_lora_adapter%20 /v1/load_lora_adapter%09 /v1/load_lora_adapter%00
/v1/load_lora_adapter%0a /v1/LOAD_lora_adapter/ /v1/load_lora_adapter?x /v1/load_lora_adapter#x
/v1/%6coad_lora_adapter /v1/%256coad_lora_adapter /v1/%25256coad_lora_adapter /v1/load_lora_adapter/x
/v1\load_lora_adapter /v1/%5cload_lora_adapter /v1/x\..\load_lora_adapter //v1/load_lora_adapter
/v1//load_lora_adapter /v1/unload_lora_adapter /rollouts/a/v1/load_lora_adapter /rollouts/../v1/load_lora_adapter
/rollouts/a/tasks/b/agents/c/v1/../../pause /V1/load_lora_adapter /V1/files /v1 /pause /collective_rpc /is_paused
http://127.0.0.1/v1/load_lora_adapter https://evil.example:443/v1/load_lora_adapter http://evil.example/ * v1/files ?x
/rollouts/a%2Fb/v1/models /v1/a%0db /v1/.%2Fload_lora_adapter /rollouts/a%0d%0aX-Evil:1/v1/files
/rollouts/a/tasks/b%0aX-Evil:1/v1/files
""".split()


def test_no_path_leads_to_an_operators_route_or_out_of_v1(keyed: Proxy, upstream: Upstream) -> None:
    for target in HIDDEN:
        (answer,) = send(keyed.url, b"POST " + target + b" HTTP/1.1\r\n" + JSON)
        assert statuses([answer]) in ([404], [400], [405]) and b"\nx-evil" not in answer.lower(), target
        assert upstream.seen == [], target


def test_methods_of_proxies_and_of_debugging_go_nowhere(keyed: Proxy, upstream: Upstream) -> None:
    for start in ("CONNECT evil.example:443", "CONNECT /v1/files", "OPTIONS *", "TRACE /v1/files", "post /v1/files"):
        answers = send(keyed.url, f"{start} HTTP/1.1\r\n".encode() + HOST + b"\r\n")
        assert statuses(answers) in ([400], [404], [405]) and upstream.seen == [], start


def test_what_was_checked_is_what_is_asked_for(keyed: Proxy, upstream: Upstream) -> None:
    for target, asked_for in {
        "/v1/files/%E2%82%AC": "/v1/files/%E2%82%AC",
        "/v1/files/a%3Ab%2fc%2Fd%7e%25%zz%20b": "/v1/files/a%3Ab%2fc%2Fd%7e%25%zz%20b",
        "/rollouts/r%31/v1/files/a%2Fb": "/v1/files/a%2Fb",
        "/v1/models/acme%2Fsmall-1": "/v1/models/acme%2Fsmall-1",
        "/%76%31/files/a%2Fb": "/v1/files/a/b",
        "/v1/files?u=http://evil.example/&x=%0d%0aX:1": "/v1/files?u=http://evil.example/&x=%0d%0aX:1",
        "http://evil.example/v1/files": "/v1/files",
        "/v1/%c0%ae%c0%ae/x": "/v1/%EF%BF%BD%EF%BF%BD%EF%BF%BD%EF%BF%BD/x",
    }.items():
        upstream.reset()
        assert statuses(send(keyed.url, b"POST " + target.encode() + b" HTTP/1.1\r\n" + JSON)) == [200], target
        assert [seen.target for seen in upstream.seen] == [asked_for]


OPERATORS = (
    "/v1/load_lora_adapter",
    "/collective_rpc",
    "/v1/unload_lora_adapter",
    "/pause",
    "/tokenize",
    "/invocations",
)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, list[str]]]:
    """A proxy in front of a server that finds its routes as vLLM's does, and the routes that were reached."""
    app, reached = FastAPI(), list[str]()

    def endpoint(path: str) -> Callable[[Request], Awaitable[dict[str, str]]]:
        async def reach(_: Request) -> dict[str, str]:
            reached.append(path)
            return {}

        return reach

    for path in (*OPERATORS, "/v1/embeddings"):
        app.add_api_route(path, endpoint(path), methods=["POST", "GET"])
    with serving(app) as url:
        known = {"name": "u", "kind": "openai", "base_url": f"{url}/v1"}
        with in_this_process(tmp_path_factory.mktemp("routed"), upstreams=[known]) as proxy:
            yield proxy, reached


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=free_port(), loop="asyncio", log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.config.port}"
    server.should_exit = True
    thread.join()


def test_no_spelling_of_an_operators_route_reaches_it(routed: tuple[Proxy, list[str]]) -> None:
    proxy, reached = routed
    assert proxy.post("/v1/embeddings", {}).status == 200 and reached == ["/v1/embeddings"]
    for path in OPERATORS:
        for spelling in spellings(path, rounds=60):
            for prefix in ("", "/v1", "/rollouts/r/v1"):
                for method in METHODS if spelling.endswith(("%0a", "/")) else ("POST",):
                    send(proxy.url, f"{method} {prefix}{spelling} HTTP/1.1\r\n".encode() + JSON)
        assert {*reached} == {"/v1/embeddings"}, path


def test_other_routes_are_forwarded_and_logged_and_never_a_transition(
    keyed: Proxy, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_proxy")
    upstream.status, upstream.headers, upstream.pieces = 207, {"X-Up": "1"}, [b'{"input_tokens": 12}']
    for path in ("messages/count_tokens", "embeddings?a=b%20c", "images/generations", "audio/speech"):
        answer = keyed.post(f"/rollouts/other/v1/{path}", {"model": "m", "x": 2.5})
        assert (answer.status, answer.headers["x-up"], answer.body) == (207, "1", upstream.pieces[0])
        assert (upstream.seen[-1].target, upstream.seen[-1].body) == (f"/v1/{path}", b'{"model": "m", "x": 2.5}')
        name = path.partition("?")[0]
        assert [line for line in caplog.messages if f"POST /v1/{name}" in line and "207" in line], path
    assert keyed.call("GET", "/rollouts/other").status == 404
    assert KEY not in caplog.text


def test_the_alias_is_a_model_that_can_be_listed_looked_up_and_named_in_any_route(proxy: Proxy) -> None:
    assert [model["id"] for model in proxy.get("/v1/models")["data"]] == ["base", "policy"]
    assert proxy.get("/v1/models/policy")["id"] == "policy"
    answer = proxy.post("/v1/chat/completions/render", {"model": "policy", "messages": [], "max_tokens": 3})
    assert answer.json["sampling_params"] == {"max_tokens": 3}


def test_a_redirect_is_the_agents_to_follow(keyed: Proxy, upstream: Upstream) -> None:
    elsewhere = ("http://elsewhere/v1/x", "https://elsewhere/", "//elsewhere/v1/x", "y", "../y", "http://[")
    for status, to in zip((301, 302, 303, 307, 308, 302), elsewhere, strict=True):
        upstream.status, upstream.headers = status, {"Location": to}
        for path in ("/v1/files", "/v1/chat/completions"):
            upstream.seen.clear()
            answer = keyed.post(path, {"model": "m"})
            assert (answer.status, answer.headers["location"], len(upstream.seen)) == (status, to, 1)


def test_a_redirect_to_the_upstream_itself_does_not_lead_past_the_proxy(keyed: Proxy, upstream: Upstream) -> None:
    """As vLLM's server answers to a slash too many, with its own address."""
    keyed.post("/v1/files")
    host, path = upstream.seen[0].headers["host"], "/v1/files/a%20b?x=%2F&y"
    upstream.status = 307
    for to in (path, f"http://{host}{path}", f"https://{host}{path}"):  # whoever ends TLS did not tell the server
        upstream.headers = {"Location": to}
        answer = keyed.call("GET", "/rollouts/r/v1/files/a%20b/?x=%2F&y")
        led = httpx.URL(f"{keyed.url}/rollouts/r/v1/files/a%20b/").join(answer.headers["location"])
        assert (answer.status, str(led)) == (307, f"{keyed.url}/rollouts/r{path}")


def test_no_url_in_a_request_is_called(keyed: Proxy, upstream: Upstream) -> None:
    trap = Upstream()
    with played(trap) as root:
        url = f"{root}/v1"
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        body = {"model": url, "base_url": url, "api_base": url, "messages": [picture], "webhook": url}
        named = dict.fromkeys(("X_Upstream", "X_Forwarded_Host", "Referer", "X_Base_Url", "Forwarded"), url)
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/files"):
            assert keyed.post(path, body, **named).status == 200
        send(keyed.url, f"POST {url}/files HTTP/1.1\r\n".encode() + JSON)
    assert trap.seen == [] and len(upstream.seen) == 4


def test_a_browser_may_ask_beforehand_without_a_key_and_spends_none(tmp_path: Path) -> None:
    asks = {"Origin": "https://app.example", "Access_Control_Request_Method": "POST"}
    upstream = Upstream()
    with played(upstream) as url:
        known = {"name": "u", "kind": "openai", "base_url": f"{url}/v1", "api_key": KEY}
        with in_this_process(tmp_path, upstreams=[known], proxy={"api_keys": ["ours"]}) as proxy:
            assert proxy.call("OPTIONS", "/rollouts/r/v1/chat/completions", key="wrong", **asks).status == 200
            assert upstream.seen[0].headers["origin"] == asks["Origin"]
            assert "authorization" not in upstream.seen[0].headers
            assert proxy.call("OPTIONS", "/v1/load_lora_adapter", key="wrong", **asks).status == 404
            assert proxy.post("/v1/embeddings", {}, "wrong", **asks).status == 401
            assert proxy.call("OPTIONS", "/v1/embeddings", key="wrong", Origin=asks["Origin"]).status == 401
    assert len(upstream.seen) == 1
