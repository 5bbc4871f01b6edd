"""What an attacker sends over raw sockets, and what a bad upstream answers.

None of it may be more than one request, or another one, than was checked, or reach an operator's route; and the
upstream's key, which the proxy alone knows, may be nowhere.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from contract.raw import HOST, Upstream, send, sends, serving_raw, statuses
from contract.system import Proxy, free_port, in_a_thread, in_this_process, played, running
from support.fuzzing import METHODS, spellings

KEY = "sk-upstream-5c1dD0nTl3akM3pl34s3"
MASK = "*" * len(KEY)
SECRET = "sk-proj-Zx81kQpLmN0vBt7RyWc3HdJf5GsA2eUo9Ii6"
HEAD = b"HTTP/1.1 200 OK\r\n"
BODY = b'{"model":"m","messages":[]}'
AS_JSON = HOST + b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
POST = b"POST /v1/embeddings HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
CHAT = POST.replace(b"embeddings", b"chat/completions")
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
AMBIGUOUS = {
    "CL.TE": LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE.CL": b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n27\r\n" + SMUGGLED + b"\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 4\r\n" + LENGTH + b"\r\n" + BODY,
    "a list of lengths": b"Content-Length: 27, 27\r\n\r\n" + BODY,
    "a hexadecimal length": b"Content-Length: 0x1b\r\n\r\n" + BODY,
    "a negative length": b"Content-Length: -1\r\n\r\n" + BODY,
    "a length too large for 64 bits": b"Content-Length: 18446744073709551643\r\n\r\n" + BODY,
    "obs-fold": LENGTH + b"X-A: b\r\n c: d\r\n\r\n" + BODY,
    "a bare LF": LENGTH + b"X-A: b\nTransfer-Encoding: chunked\r\n\r\n" + BODY,
    "a bare CR": LENGTH + b"X-A: b\rTransfer-Encoding: chunked\r\n\r\n" + BODY,
    "NUL": LENGTH + b"X-A: b\x00c\r\n\r\n" + BODY,
    "a space before the colon": b"Content-Length : 27\r\n\r\n" + BODY,
    "no colon": LENGTH + b"foo\r\n\r\n" + BODY,
    "identity": LENGTH + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED,
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "an encoding like chunked": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "an encoding behind a tab": LENGTH + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + BODY,
    "a chunk's size in 0x": b"Transfer-Encoding: chunked\r\n\r\n0x1b\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk's extension with LF": b"Transfer-Encoding: chunked\r\n\r\n1b;\n" + BODY + b"\r\n0\r\n\r\n",
}
STRANGERS = rb"""
evil.example 127.0.0.1.evil.example 127.0.0.1@evil.example evil.example@127.0.0.1 localhost:80@evil.example
127.0.0.1:80/x 127.0.0.1\@evil.example 127.0.0.1#@evil.example 127.0.0.1?evil.example 127.1 2130706433 0.0.0.0
localhost.evil.example evil.localhost localhost. [::] [::ffff:8.8.8.8] 127.0.0.1,evil.example
""".split()
ECHO = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}.", "headers": [f"Bearer {KEY}"] * 2}})
DELTA = 'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "TEXT"}}]}\n\n'
STREAM = "".join(DELTA.replace("TEXT", text) for text in (f"key {KEY}", SECRET[:20], SECRET[20:])) + "data: [DONE]\n\n"
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


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with played(upstream := Upstream()) as url, in_front(tmp_path_factory.mktemp("attacks"), f"{url}/v1") as one:
        one.vllm = upstream
        yield one


@pytest.fixture
def upstream(proxy: Proxy) -> Upstream:
    """What is behind the proxy, as new."""
    proxy.vllm.reset()
    return proxy.vllm


def in_front(directory: Path, url: str, **access: Any) -> AbstractContextManager[Proxy]:
    known = {"name": "u", "kind": "openai", "base_url": url, "api_key": KEY}
    return in_this_process(directory, upstreams=[known], proxy=access, recording={"redact": {"secrets": True}})


def test_what_could_be_read_in_two_ways_is_refused(proxy: Proxy, upstream: Upstream) -> None:
    for name, rest in AMBIGUOUS.items():
        answer, *_ = send(proxy.url, POST + rest)
        assert statuses([answer]) == [400] and b"invalid_request_error" in answer and upstream.seen == [], name
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    assert statuses(send(proxy.url, old)) == [400] and upstream.seen == []
    for end in (b"\n", b"\r"):
        whole = (POST + LENGTH + b"Connection: close\r\n\r\n").replace(b"\r\n", end) + BODY + b"\r\n\r\n"
        assert statuses(send(proxy.url, whole)) in ([400], []) and upstream.seen == []


def test_chunks_arrive_as_one_body_and_trailers_are_no_headers(proxy: Proxy, upstream: Upstream) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    one = POST + chunked + CHUNKED
    assert statuses(send(proxy.url, one + one.replace(b"1b", b"1b;a=b"), answers=2)) == [200, 200]
    for seen in upstream.seen:
        assert (seen.body, seen.headers["content-length"]) == (BODY, "27") and "transfer-encoding" not in seen.headers
    trailers = b"X-Rollout-Id: evil\r\nX-Evil: 1\r\nAuthorization: Bearer evil\r\n\r\n"
    for more in (b"", b"\r\n"):
        (answer,) = send(proxy.url, CHAT + chunked + CHUNKED.removesuffix(b"\r\n") + trailers + more)
        assert statuses([answer]) == [200] and b"x-rollout-id: evil" not in answer
    assert not [seen for seen in upstream.seen if "x-evil" in seen.headers]


def test_a_request_that_asks_for_an_upgrade_is_answered_without_one(proxy: Proxy, upstream: Upstream) -> None:
    """As some clients ask with every request; the body counts, and so does what comes after it."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    one = POST + upgrade + LENGTH + b"\r\n" + BODY
    for cut in (0, 5, len(POST), -3):
        assert statuses(send(proxy.url, one[:cut], one[cut:] + one, answers=2)) == [200, 200]
    assert [seen.body for seen in upstream.seen] == [BODY] * 8
    assert all(not {"upgrade", "connection", "http2-settings"} & seen.headers.keys() for seen in upstream.seen)


def get(path: bytes, headers: bytes) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + headers + b"Connection: close\r\n\r\n"


def test_without_keys_no_other_host_and_no_web_page_of_others_is_served(proxy: Proxy, upstream: Upstream) -> None:
    hosts = [(host, 403) for host in (*STRANGERS, b"")]
    hosts += [(host, 200) for host in (b"127.0.0.1", b"localhost", b"LOCALHOST:8080", b"[::1]:80", b"127.9.9.9")]
    for (host, status), path in itertools.product(hosts, (b"/v1/files", b"/rollouts")):
        assert statuses(send(proxy.url, get(path, b"Host: %b\r\n" % host))) == [status], host
    assert len(upstream.seen) == 5
    for named, origin, status in (
        ("[::1]:8080", "http://127.0.0.1:3000", 200),
        ("localhost", "vscode-file://vscode-app", 200),
        ("http://[", "http://localhost", 403),
        ("localhost", "https://evil.example", 403),
        ("localhost", "null", 403),
    ):
        for method, path in (("GET", "/rollouts"), ("POST", "/v1/chat/completions")):
            assert proxy.call(method, path, BODY, Host=named, Origin=origin).status == status, (named, origin)


def test_a_header_that_decides_is_there_once_and_none_gets_in_by_an_id(proxy: Proxy, upstream: Upstream) -> None:
    names = b"Host Authorization X-Api-Key X-Rollout-Id X-Task-Id X-Recording Idempotency-Key".split()
    for name, path in itertools.product(names, (b"/v1/files", b"/rollouts")):
        twice = b"%b: 127.0.0.1\r\n%b: localhost\r\n" % (name, name)
        (answer,) = send(proxy.url, get(path, twice if name == b"Host" else HOST + twice))
        assert statuses([answer]) == [400] and name.lower() + b" is sent more than once" in answer, name
    names = b"X-Rollout-Id X-Task-Id X-Agent-Name X-Rollout-Mode".split()
    for name, value in itertools.product(names, (b"a%0d%0aX-Evil: 1", b"a\x0bX-Evil: 1")):
        (answer,) = send(proxy.url, CHAT + name + b": " + value + b"\r\n" + LENGTH + b"\r\n" + BODY)
        assert statuses([answer]) == [400] and b"\nx-evil" not in answer.lower() and upstream.seen == [], name


def test_headers_of_the_connection_end_here(proxy: Proxy, upstream: Upstream) -> None:
    upstream.headers = {"Connection": "keep-alive, X-Private", "X-Private": "1", "X-Public": "1"}
    sent = {
        "Connection": "keep-alive, X-Secret, Authorization, X-Rollout-Id", "X-Secret": "1", "TE": "trailers",
        "Proxy-Authorization": "Basic eDp5", "Keep-Alive": "timeout=5", "X-Forwarded-For": "1.2.3.4",
        "X-Rollout-Id": "r1", "X-Recording": "on", "Authorization": "Bearer agent-key",
    }  # fmt: skip
    answer = proxy.client.post(f"{proxy.url}/v1/files", content=BODY, headers=sent)
    assert (answer.status_code, "x-private" in answer.headers, answer.headers["x-public"]) == (200, False, "1")
    (seen,) = upstream.seen
    gone = {"x-secret", "te", "proxy-authorization", "keep-alive", "x-rollout-id", "x-recording", "connection"}
    assert not gone & seen.headers.keys()
    assert seen.headers["authorization"] == f"Bearer {KEY}", "in the place of the agent's; naming it takes none away"
    assert seen.headers["x-forwarded-for"] == "1.2.3.4", "what is no concern of ours is passed on"


def stored(proxy: Proxy) -> bytes:
    return b"".join(path.read_bytes() for path in proxy.directory.glob("*.db*"))


def assert_the_key_is_nowhere(proxy: Proxy, caplog: pytest.LogCaptureFixture, answered: bytes) -> None:
    assert KEY.encode() not in answered + stored(proxy)
    assert not [one for one in caplog.records if KEY in f"{one.getMessage()} {one.exc_text} {one.args}"]
    for route in ("/metrics", "/rollouts", "/readyz", "/openapi.json", "/policy"):
        assert KEY.encode() not in proxy.call("GET", route).body, route


def in_pieces(text: str, size: int) -> list[bytes]:
    return [text[i : i + size].encode() for i in range(0, len(text), size)]


def test_an_echoed_key_is_masked(proxy: Proxy, upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    upstream.headers = {"WWW-Authenticate": f"Bearer {KEY}", "X-Key": KEY, "Content-Length": str(len(ECHO))}
    paths, answered = ("/v1/chat/completions", "/v1/messages", "/v1/files", "/v1/models"), b""
    sizes = [*itertools.product(paths, (7, 10_000)), (paths[0], 1)]
    for (path, size), status in itertools.product(sizes, (200, 401)):
        upstream.status, upstream.pieces = status, in_pieces(ECHO, size)
        answer = proxy.post(path, BODY, Accept_Encoding="gzip")
        assert (answer.status, answer.body) == (status, ECHO.replace(KEY, MASK).encode()), (path, size)
        assert answer.headers["x-key"] == MASK
        answered += str(answer.headers).encode() + answer.body
    for seen in upstream.seen:
        assert seen.headers["authorization"] == f"Bearer {KEY}"
        assert seen.headers["accept-encoding"] == "identity", "compressed, the key could not be found"
    assert_the_key_is_nowhere(proxy, caplog, answered)
    upstream.status, upstream.headers = 200, {"Content-Type": "text/event-stream"}
    for size in (7, 10_000):
        upstream.pieces = in_pieces(STREAM, size)
        answer = proxy.post("/v1/chat/completions", {"model": "m", "stream": True, "messages": []})
        assert answer.body == STREAM.replace(KEY, MASK).encode(), "the agent has its own secret; only the key is masked"
        (call,) = proxy.rollout(answer.headers["x-rollout-id"])["calls"]
        assert call["response"]["choices"][0]["message"]["content"] == f"key {MASK}[redacted]"
        assert SECRET.encode() not in stored(proxy)
        assert_the_key_is_nowhere(proxy, caplog, answer.body)


def test_our_errors_about_an_upstream_do_not_quote_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving_raw() as server, in_front(tmp_path, server.url) as proxy:
        for garbage in (
            HEAD + b"Bearer %s\r\n\r\n",
            b"Bearer %s\r\n\r\n",
            HEAD + b"Content-Length: %s\r\n\r\n",
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n%s\r\n",
            HEAD + b"Content-Type: text/event-stream\r\n\r\ndata: %s\n\n",
            HEAD + b'Content-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\ndata: {"a": "%s',
        ):
            server.answer = sends(garbage % KEY.encode())
            answers = send(proxy.url, CHAT + LENGTH + b"\r\n" + BODY)
            assert answers, "the agent hears of it"
            assert_the_key_is_nowhere(proxy, caplog, b"".join(answers))


def test_no_path_or_method_leads_to_an_operators_route_or_out_of_v1(proxy: Proxy, upstream: Upstream) -> None:
    for target in HIDDEN:
        (answer,) = send(proxy.url, b"POST " + target + b" HTTP/1.1\r\n" + AS_JSON)
        assert statuses([answer]) in ([404], [400], [405]) and b"\nx-evil" not in answer.lower(), target
        assert upstream.seen == [], target
    for start in ("CONNECT evil.example:443", "CONNECT /v1/files", "OPTIONS *", "TRACE /v1/files", "post /v1/files"):
        answers = send(proxy.url, f"{start} HTTP/1.1\r\n".encode() + HOST + b"\r\n")
        assert statuses(answers) in ([400], [404], [405]) and upstream.seen == [], start


def test_what_was_checked_is_what_is_asked_for(proxy: Proxy, upstream: Upstream) -> None:
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
        assert statuses(send(proxy.url, b"POST " + target.encode() + b" HTTP/1.1\r\n" + AS_JSON)) == [200], target
        assert [seen.target for seen in upstream.seen] == [asked_for]


def test_no_spelling_of_an_operators_route_reaches_it(tmp_path: Path) -> None:
    """The server finds its routes as vLLM's does."""
    operators = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc",
                 "/pause", "/tokenize", "/invocations")  # fmt: skip
    app, reached = FastAPI(), list[str]()
    for path in (*operators, "/v1/embeddings"):
        app.add_api_route(path, lambda path=path: reached.append(path), methods=["POST", "GET"])
    with in_a_thread(running(app, port=free_port(), loop="asyncio", log_level="error")) as url:
        known = {"name": "u", "kind": "openai", "base_url": f"{url}/v1"}
        with in_this_process(tmp_path, upstreams=[known]) as proxy:
            assert proxy.post("/v1/embeddings", {}).status == 200 and reached == ["/v1/embeddings"]
            for path in operators:
                for spelling in spellings(path, rounds=60):
                    for prefix in ("", "/v1", "/rollouts/r/v1"):
                        for method in METHODS if spelling.endswith(("%0a", "/")) else ("POST",):
                            send(proxy.url, f"{method} {prefix}{spelling} HTTP/1.1\r\n".encode() + AS_JSON)
                assert {*reached} == {"/v1/embeddings"}, path


def test_other_routes_are_only_forwarded(proxy: Proxy, upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning_proxy")
    upstream.status = 207
    for path in ("messages/count_tokens", "images/generations", "audio/speech"):
        answer = proxy.post(f"/rollouts/other/v1/{path}", BODY)
        seen = upstream.seen[-1]
        assert (answer.status, answer.body, seen.target, seen.body) == (207, b"{}", f"/v1/{path}", BODY)
        assert [line for line in caplog.messages if f"POST /v1/{path}" in line and "207" in line], path
    assert proxy.call("GET", "/rollouts/other").status == 404


def test_a_redirect_is_the_agents_to_follow_and_does_not_lead_past_the_proxy(proxy: Proxy, upstream: Upstream) -> None:
    """vLLM's server answers to a slash too many with its own address."""
    elsewhere = ("http://elsewhere/v1/x", "https://elsewhere/", "//elsewhere/v1/x", "y", "../y", "http://[")
    for upstream.status, to in zip((301, 302, 303, 307, 308, 302), elsewhere, strict=True):
        upstream.headers = {"Location": to}
        for path in ("/v1/files", "/v1/chat/completions"):
            upstream.seen = []
            answer = proxy.post(path, {"model": "m"})
            assert (answer.status, answer.headers["location"], len(upstream.seen)) == (upstream.status, to, 1)
    host, path = upstream.seen[0].headers["host"], "/v1/files/a%20b?x=%2F&y"
    for to in (path, f"http://{host}{path}", f"https://{host}{path}"):  # whoever ends TLS did not tell the server
        upstream.status, upstream.headers = 307, {"Location": to}
        answer = proxy.call("GET", "/rollouts/r/v1/files/a%20b/?x=%2F&y")
        led = httpx.URL(f"{proxy.url}/rollouts/r/v1/files/a%20b/").join(answer.headers["location"])
        assert (answer.status, str(led)) == (307, f"{proxy.url}/rollouts/r{path}")


def test_no_url_in_a_request_is_called(proxy: Proxy, upstream: Upstream) -> None:
    with played(trap := Upstream()) as root:
        url = f"{root}/v1"
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        body = {"model": url, "base_url": url, "api_base": url, "messages": [picture], "webhook": url}
        named = dict.fromkeys(("X_Upstream", "X_Forwarded_Host", "Referer", "X_Base_Url", "Forwarded"), url)
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/files"):
            assert proxy.post(path, body, **named).status == 200
        send(proxy.url, f"POST {url}/files HTTP/1.1\r\n".encode() + AS_JSON)
    assert trap.seen == [] and len(upstream.seen) == 4


def test_a_browser_may_ask_beforehand_without_a_key_and_spends_none(tmp_path: Path) -> None:
    origin, asks = {"Origin": "https://app.example"}, {"Access_Control_Request_Method": "POST"}
    with played(upstream := Upstream()) as url, in_front(tmp_path, f"{url}/v1", api_keys=["ours"]) as proxy:
        for method, path, more, status in (
            ("OPTIONS", "/rollouts/r/v1/chat/completions", asks, 200),
            ("OPTIONS", "/v1/load_lora_adapter", asks, 404),
            ("POST", "/v1/embeddings", asks, 401),
            ("OPTIONS", "/v1/embeddings", {}, 401),
        ):
            assert proxy.call(method, path, key="wrong", **origin, **more).status == status, path
    (seen,) = upstream.seen
    assert seen.headers["origin"] == origin["Origin"] and "authorization" not in seen.headers
