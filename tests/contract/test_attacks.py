"""What an attacker sends over raw sockets, and what a bad upstream answers.

None of it may be more than one request, or another one, than was checked; and the upstream's key, which the proxy alone
knows, may be nowhere.
"""

from __future__ import annotations

import itertools
import json
import logging
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.raw import HOST, Upstream, send, statuses
from contract.system import Proxy, in_this_process, played

KEY = "sk-upstream-5c1dD0nTl3akM3pl34s3"
MASK = "*" * len(KEY)
SECRET = "sk-proj-Zx81kQpLmN0vBt7RyWc3HdJf5GsA2eUo9Ii6"
BODY = b'{"model":"m","messages":[]}'
TYPE = b"Content-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
POST = b"POST /v1/embeddings HTTP/1.1\r\n" + HOST + TYPE
CHAT = POST.replace(b"embeddings", b"chat/completions")
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
AS_STREAM = b'{"model": "m", "stream": true, "messages": []}'


@pytest.fixture(scope="module")
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture(scope="module")
def proxy(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with played(upstream) as url, in_front(tmp_path_factory.mktemp("attacks"), f"{url}/v1") as one:
        yield one


def in_front(directory: Path, url: str):  # type: ignore[no-untyped-def]
    known = {"name": "u", "kind": "openai", "base_url": url, "api_key": KEY}
    return in_this_process(directory, upstreams=[known], recording={"redact": {"secrets": True}})


@pytest.fixture(autouse=True)
def as_new(upstream: Upstream) -> None:
    upstream.reset()


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


def test_what_could_be_read_in_two_ways_is_refused(proxy: Proxy, upstream: Upstream) -> None:
    for name, rest in AMBIGUOUS.items():
        answers = send(proxy.url, POST + rest)
        assert statuses(answers)[:1] == [400] and upstream.seen == [], name
        assert json.loads(answers[0].partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error", name
    data = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    assert statuses(send(proxy.url, data)) == [400] and upstream.seen == []
    whole = POST + LENGTH + b"Connection: close\r\n\r\n"
    for line_end in (b"\n", b"\r"):
        answers = send(proxy.url, whole.replace(b"\r\n", line_end) + BODY + b"\r\n\r\n")
        assert statuses(answers) in ([400], []) and upstream.seen == []


def test_what_is_chunked_arrives_as_one_body_of_one_length(proxy: Proxy, upstream: Upstream) -> None:
    one = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    data = one + CHUNKED + one + b"1b;a=b\r\n" + BODY + b"\r\n0\r\n\r\n"
    assert statuses(send(proxy.url, data, answers=2)) == [200, 200]
    for seen in upstream.seen:
        assert (seen.body, seen.headers["content-length"]) == (BODY, "27") and "transfer-encoding" not in seen.headers


def test_trailers_are_no_headers(proxy: Proxy, upstream: Upstream) -> None:
    trailers = b"X-Rollout-Id: evil\r\nX-Evil: 1\r\nAuthorization: Bearer evil\r\n\r\n"
    for piece in (b"", b"\r\n"):
        data = CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED.removesuffix(b"\r\n") + trailers + piece
        answers = send(proxy.url, data)
        assert statuses(answers) == [200] and b"x-rollout-id: evil" not in answers[0]
    assert all("x-evil" not in seen.headers for seen in upstream.seen)


def test_a_request_that_asks_for_an_upgrade_is_answered_without_one(proxy: Proxy, upstream: Upstream) -> None:
    """As some clients ask with every request; the body counts, and so does what comes after it."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    one = POST + upgrade + LENGTH + b"\r\n" + BODY
    for cut in (0, 5, len(POST), -3):
        assert statuses(send(proxy.url, one[:cut], one[cut:] + one, answers=2)) == [200, 200]
    assert [seen.body for seen in upstream.seen] == [BODY] * 8
    assert all(not {"upgrade", "connection", "http2-settings"} & seen.headers.keys() for seen in upstream.seen)


STRANGERS = rb"""
evil.example 127.0.0.1.evil.example 127.0.0.1@evil.example evil.example@127.0.0.1 localhost:80@evil.example
127.0.0.1:80/x 127.0.0.1\@evil.example 127.0.0.1#@evil.example 127.0.0.1?evil.example 127.1 2130706433 0.0.0.0
localhost.evil.example evil.localhost localhost. [::] [::ffff:8.8.8.8] 127.0.0.1,evil.example
""".split()


def get(path: bytes, headers: bytes) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + headers + b"Connection: close\r\n\r\n"


def test_without_keys_no_other_host_is_served(proxy: Proxy, upstream: Upstream) -> None:
    for host in (*STRANGERS, b""):
        for path in (b"/v1/files", b"/rollouts"):
            assert statuses(send(proxy.url, get(path, b"Host: %b\r\n" % host))) == [403], host
    assert upstream.seen == []
    for host in (b"127.0.0.1", b"localhost", b"LOCALHOST:8080", b"[::1]:80", b"127.9.9.9"):
        assert statuses(send(proxy.url, get(b"/v1/files", b"Host: %b\r\n" % host))) == [200], host


def test_a_header_that_decides_something_is_there_once(proxy: Proxy, upstream: Upstream) -> None:
    names = ("Host", "Authorization", "X-Api-Key", "X-Rollout-Id", "X-Task-Id", "X-Recording", "Idempotency-Key")
    for name, path in itertools.product(names, (b"/v1/files", b"/rollouts")):
        values = ("127.0.0.1", "localhost") if name == "Host" else ("on", "off")
        twice = "".join(f"{name}: {value}\r\n" for value in values).encode()
        (answer,) = send(proxy.url, get(path, (b"" if name == "Host" else HOST) + twice))
        assert statuses([answer]) == [400] and f"{name.lower()} is there more than once".encode() in answer, name
    assert upstream.seen == []


def test_no_header_gets_in_by_an_id(proxy: Proxy, upstream: Upstream) -> None:
    for name in ("X-Rollout-Id", "X-Task-Id", "X-Agent-Name", "X-Rollout-Mode"):
        for value in ("a%0d%0aX-Evil: 1", "a\x0bX-Evil: 1"):
            (answer,) = send(proxy.url, CHAT + f"{name}: {value}\r\n".encode("latin-1") + LENGTH + b"\r\n" + BODY)
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


ECHO = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}.", "headers": [f"Bearer {KEY}"] * 2}})
EVENTS = [f"key {KEY}", SECRET[:20], SECRET[20:]]
CHUNK = {"id": "c", "object": "chat.completion.chunk"}
STREAM = "".join(
    f"data: {json.dumps(CHUNK | {'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n" for text in EVENTS
)
STREAM += "data: [DONE]\n\n"


def in_pieces(text: str, size: int) -> list[bytes]:
    return [text[i : i + size].encode() for i in range(0, len(text), size)] if size else [text.encode()]


def assert_the_key_is_nowhere(proxy: Proxy, caplog: pytest.LogCaptureFixture, answered: bytes) -> None:
    places = {"answer": answered, "store": b"".join(path.read_bytes() for path in proxy.directory.glob("*.db*"))}
    places["log"] = "".join(f"{one.getMessage()} {one.exc_text} {one.args}" for one in caplog.records).encode()
    for route in ("/metrics", "/rollouts", "/readyz", "/openapi.json", "/policy"):
        places[route] = proxy.call("GET", route).body
    assert [name for name, data in places.items() if KEY.encode() in data] == []


def test_an_upstream_that_echoes_its_key_is_masked_everywhere(
    proxy: Proxy, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    upstream.headers = {"WWW-Authenticate": f"Bearer {KEY}", "X-Key": KEY, "Content-Length": str(len(ECHO))}
    paths, answered = ("/v1/chat/completions", "/v1/messages", "/v1/files", "/v1/models"), b""
    for path, size, status in itertools.product(paths, (0, 1), (200, 401)):
        upstream.status, upstream.pieces = status, in_pieces(ECHO, size)
        answer = proxy.post(path, BODY, Accept_Encoding="gzip")
        assert (answer.status, answer.body) == (status, ECHO.replace(KEY, MASK).encode()), (path, size)
        assert answer.headers["x-key"] == MASK
        answered += str(answer.headers).encode() + answer.body
    for seen in upstream.seen:
        assert seen.headers["authorization"] == f"Bearer {KEY}"
        assert seen.headers["accept-encoding"] == "identity", "compressed, the key could not be found"
    assert_the_key_is_nowhere(proxy, caplog, answered)


def test_a_stream_is_masked_for_the_agent_and_redacted_for_the_record(
    proxy: Proxy, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.headers = {"Content-Type": "text/event-stream"}
    for size in (0, 7):
        upstream.pieces = in_pieces(STREAM, size)
        answer = proxy.post("/v1/chat/completions", AS_STREAM)
        assert answer.body == STREAM.replace(KEY, MASK).encode(), "the agent has its own secret; only the key is masked"
        (call,) = proxy.rollout(answer.headers["x-rollout-id"])["calls"]
        assert call["response"]["choices"][0]["message"]["content"] == f"key {MASK}[redacted]"
        assert all(SECRET.encode() not in path.read_bytes() for path in proxy.directory.glob("*.db*"))
        assert_the_key_is_nowhere(proxy, caplog, answer.body)


HEAD = b"HTTP/1.1 200 OK\r\n"
GARBAGE = [
    HEAD + b"Bearer %s\r\n\r\n",
    b"Bearer %s\r\n\r\n",
    HEAD + b"Content-Length: %s\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n%s\r\n",
    HEAD + b"Content-Type: text/event-stream\r\n\r\ndata: %s\n\n",
    HEAD + b'Content-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\ndata: {"a": "%s',
]


def test_our_errors_about_an_upstream_do_not_quote_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = [*GARBAGE]

    class Answers(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(2**16)
            self.request.sendall(left[0] % KEY.encode())

    caplog.set_level(logging.DEBUG)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        with in_front(tmp_path, f"http://127.0.0.1:{server.server_address[1]}/v1") as proxy:
            while left:
                answers = send(proxy.url, CHAT + LENGTH + b"\r\n" + BODY)
                assert answers, "the agent hears of it"
                assert_the_key_is_nowhere(proxy, caplog, b"".join(answers))
                del left[0]
        server.shutdown()
        thread.join()
