"""CONTRACT.md, sections 1 and 4: upstreams that break or refuse, agents that leave, a store that is not written."""

from __future__ import annotations

import socket
import sqlite3
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from contract.raw import Connection, RawServer, connect, sends, serving_raw
from contract.system import Json, Proxy, free_port, in_this_process, wait_until

DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
ANSWER = JSON_HEAD + b'{"choices": []}     '
LAST = b"0\r\n\r\n"
HURRIED = dict.fromkeys(("connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s"), 0.3)
UPSTREAMS: dict[str, Json] = {
    "vllm": {"kind": "vllm"}, "openai": {}, "hurried": HURRIED,
    "limited": {"total_timeout_s": 0.3}, "again": {"retries": 2, "retry_wait_s": 1},
}  # fmt: skip
FAILURE = b'data: {"error": {"message": "boom"}}\n\n'


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


OF_A = chunk(event("a"))
LONG = pytest.mark.long


def upstreams(server: RawServer, **ports: int) -> list[Json]:
    """One of each kind, all at this server, which answers for a model of its name; and hurried ones at these ports."""
    policy = {"name": "policy", "kind": "vllm", "base_url": "http://127.0.0.1:1/v1"}
    known = UPSTREAMS | {n: HURRIED | {"base_url": f"http://127.0.0.1:{port}/v1"} for n, port in ports.items()}
    openai = {"kind": "openai", "base_url": server.url}
    return [policy, *(openai | {"name": name, "models": [name]} | keys for name, keys in known.items())]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with serving_raw() as server, ExitStack() as stack:
        deaf, full = (stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=n)) for n in (9, 0))
        for _ in range(3):  # more than fit into its queue
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        ports = {"deaf": deaf.getsockname()[1], "full": full.getsockname()[1], "down": free_port()}
        with in_this_process(tmp_path_factory.mktemp("proxy"), upstreams=upstreams(server, **ports)) as one:
            one.vllm = server
            yield one


@pytest.fixture
def server(proxy: Proxy) -> RawServer:
    proxy.vllm.asked = []
    return proxy.vllm


class Hangs:
    """Sends these bytes, then nothing until `goes_on`, or until it is left."""

    def __init__(self, *pieces: bytes, then: bytes = b"") -> None:
        self.pieces, self.then = pieces, then
        self.left, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, one: Connection, _: bytes) -> None:
        one.sendall(b"".join(self.pieces))
        one.settimeout(0.05)
        while not self.goes_on.is_set():
            with suppress(TimeoutError):
                if not one.recv(2**16):
                    self.left.set()
                    return
        one.settimeout(None)
        one.sendall(self.then)


def ask(proxy: Proxy, model: str, *, stream: bool = False, **more: Any) -> tuple[int, bytes, bool, Json]:
    """Status, body as far as it came, whether it was complete, and the call's record."""
    rollout, got, complete = uuid.uuid4().hex, bytearray(), True
    body = {"model": model, "messages": [], "stream": stream, **more}
    with proxy.client.stream("POST", f"{proxy.url}/rollouts/{rollout}/v1/chat/completions", json=body) as answer:
        try:
            for piece in answer.iter_raw():
                got += piece
        except httpx.RemoteProtocolError:
            complete = False
    return answer.status_code, bytes(got), complete, recorded(proxy, rollout)


def recorded(proxy: Proxy, rollout: str) -> Json:
    """The only call of a rollout, once it has ended."""
    wait_until(lambda: proxy.rollout(rollout)["calls"][0]["status"] != "incomplete", 20, "the call has ended")
    (call,) = proxy.rollout(rollout)["calls"]
    return call


def content(call: Json) -> Any:
    return call["response"]["choices"][0]["message"]["content"]


def test_an_upstream_that_fails_before_it_answers_is_502_or_504_and_not_shown(proxy: Proxy, server: RawServer) -> None:
    for model, answer, status in (
        ("openai", b"", 502),
        ("openai", b"SSH-2.0-nonsense\r\n", 502),
        ("openai", JSON_HEAD + b"{", 502),
        ("openai", b"HTTP/1.1 nonsense\r\n\r\n", 502),
        ("openai", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 502),
        ("openai", JSON_HEAD.replace(b"200 OK", b"999 What"), 502),
        ("openai", b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 502),
        ("down", b"", 502), ("hurried", b"", 504), ("full", b"", 504), ("deaf", b"", 504),
    ):  # fmt: skip
        server.answer = Hangs() if model == "hurried" else sends(answer)
        padding = "x" * 16_000_000 if model == "deaf" else ""  # of which it takes a part
        got, body, complete, call = ask(proxy, model, user=padding)
        assert (got, complete, b'"upstream_error"' in body) == (status, True, True), (model, answer)
        assert call["status"] == "error" and call["error"]
        assert b"127.0.0.1" not in body and "127.0.0.1" not in call["error"]


def test_a_stream_that_breaks_or_fails_is_seen_so_and_what_came_is_recorded(proxy: Proxy, server: RawServer) -> None:
    a, stop = event("a"), event("", "stop")
    breaks = [
        ("vllm", a, b"", False, "error"),
        ("vllm", a, LAST, False, "error"),
        ("hurried", a, b"", False, "error"),
        ("limited", a, b"", False, "error"),
        ("openai", a + stop, LAST, True, "ok"),
        ("openai", a + stop, b"", False, "error"),
        ("openai", a + b"data: {\n\n" + DONE, LAST, True, "error"),
        ("openai", a + FAILURE + DONE, LAST, True, "error"),
        ("vllm", a + FAILURE, LAST, True, "error"),
    ]
    for n, (model, sent, last, complete, status) in enumerate(breaks):
        answers = Hangs if model in ("hurried", "limited") else sends
        server.answer = answers(STREAM_HEAD, chunk(sent), last)
        *seen, call = ask(proxy, model, stream=True)
        assert seen == [200, sent, complete], n
        found = (call["status"], call["trainable"], bool(call["error"]), content(call))
        assert found == (status, False, status == "error", "a"), n
    server.answer = Hangs(JSON_HEAD, b"{1")
    got, body, complete, call = ask(proxy, "hurried")
    assert (got, complete, call["status"], call["response"]) == (200, False, "error", None) and body in (b"", b"{")


def test_an_upstream_that_is_busy_is_asked_again_if_so_configured(proxy: Proxy, server: RawServer) -> None:
    busy = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nRetry-After: %s\r\n\r\nbusy"
    for model, wait, status, times in (
        ("openai", b"0", 503, 1), ("again", b"0", 200, 3), ("again", b"Wed, 21 Oct 2015 07:28:00 GMT", 200, 3),
        ("again", b"2", 503, 1),  # more patience than there is
    ):  # fmt: skip
        server.asked.clear()
        server.answer = lambda one, _, busy=busy % wait: one.sendall(busy if len(server.asked) < 3 else ANSWER)
        got, body, _, call = ask(proxy, model)
        assert (got, len(server.asked)) == (status, times), wait
        assert call["response"] == ("busy" if status == 503 else orjson.loads(body)), wait


def test_a_request_is_sent_again_only_where_its_idle_connection_was_closed(proxy: Proxy, server: RawServer) -> None:
    for begun, seconds, reset, status in (
        (b"", 0, 0, 200),
        (b"", 3, 0, 502),  # the server worked on it
        (b"HTTP/1.1 2", 0.2, 0, 502),  # until it is there: a reset drops what is not
        (b"HTTP/1.1 2", 0.2, 1, 502),
    ):

        def answers(one: Connection, _: bytes, then: tuple[bytes, float, int] = (begun, seconds, reset)) -> bool:
            if len(server.asked) == 2:
                one.sendall(then[0])
                threading.Event().wait(then[1])
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", then[2], 0))
                one.close()
                return False
            one.sendall(ANSWER)
            return True

        server.asked, server.answer = [], answers
        assert [ask(proxy, "openai")[0] for _ in range(2)] == [200, status]
        assert len(server.asked) == (3 if status == 200 else 2)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_for_our_additions_is_asked_without_them(proxy: Proxy, server: RawServer, stream: bool) -> None:
    refused, added = b'HTTP/1.1 400 No\r\nConnection: close\r\n\r\n{"error":{"message":"%s"}}', b"return_token_ids"
    server.answer = lambda one, asked: one.sendall(refused % added if added in asked else ANSWER)
    status, _, complete, call = ask(proxy, "vllm", stream=stream)
    assert (status, complete, call["status"], len(server.asked)) == (200, True, "ok", 2)
    for answer, status in ((ANSWER, 200), (refused % b"the maximum context length is 8", 400)):
        server.asked, server.answer = [], sends(answer)
        assert ask(proxy, "vllm", stream=stream)[0] == status
    assert len(server.asked) == 1, "what it took before, and does not name, it does not refuse"


@contextmanager
def begun(proxy: Proxy, server: RawServer, rollout: str, stream: bool, hangs: Hangs) -> Iterator[Connection]:
    """A call of which the record and the upstream's answer have begun."""
    server.asked, server.answer = [], hangs
    body = orjson.dumps({"model": "openai", "messages": [], "stream": stream})
    head = f"POST /rollouts/{rollout}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    with connect(proxy.url) as one:
        one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.asked and proxy.call("GET", f"/rollouts/{rollout}").status == 200, 20, "it began")
        yield one


def leave(proxy: Proxy, server: RawServer, rollout: str, stream: bool, hangs: Hangs) -> None:
    """Be an agent that leaves when the upstream was asked, and, for a stream, when it has the first event."""
    with begun(proxy, server, rollout, stream, hangs) as one:
        while stream and event("a") not in one.recv(2**16):
            pass
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_leaves_stops_the_upstream_and_is_recorded(proxy: Proxy, server: RawServer, stream: bool) -> None:
    hangs = Hangs(*([STREAM_HEAD, OF_A] if stream else []))
    leave(proxy, server, f"leaves-{stream}", stream, hangs)
    assert hangs.left.wait(20)
    call = recorded(proxy, f"leaves-{stream}")
    assert (call["status"], call["trainable"]) == ("cancelled", False)
    assert not stream or content(call) == "a"


def test_the_upstream_may_finish_for_the_record_when_the_agent_leaves_but_not_for_ever(tmp_path: Path) -> None:
    finish = {"on_disconnect": "finish", "finish_timeout_s": 3}
    with serving_raw() as server, in_this_process(tmp_path, upstreams=upstreams(server), recording=finish) as proxy:
        for name, said, why in (("goes-on", "ab", "finished for the record"), ("hangs", "a", "not finished within 3")):
            hangs = Hangs(STREAM_HEAD, OF_A, then=chunk(event("b") + DONE) + LAST)
            leave(proxy, server, name, True, hangs)
            assert proxy.rollout(name)["calls"][0]["status"] == "incomplete"
            if name == "goes-on":
                hangs.goes_on.set()
            call = recorded(proxy, name)
            found = (call["status"], call["trainable"], why in call["error"], content(call))
            assert found == ("cancelled", False, True, said)


@contextmanager
def locked(proxy: Proxy) -> Iterator[None]:
    """Nothing can be written into the store meanwhile."""
    with closing(sqlite3.connect(proxy.directory / "store.db", isolation_level=None, timeout=20)) as store:
        store.execute("BEGIN IMMEDIATE")
        yield
        store.execute("ROLLBACK")


WAYS = [
    (True, [STREAM_HEAD, OF_A], chunk(DONE) + LAST, DONE),
    (False, [JSON_HEAD, b'{"choices":'], b" []}     ", b"     "),
]


@pytest.mark.sqlite
def test_the_last_bytes_of_an_answer_wait_for_the_record(proxy: Proxy, server: RawServer) -> None:
    for stream, first, then, last in WAYS:
        hangs, name = Hangs(*first, then=then), f"waits-{stream:d}"
        with begun(proxy, server, name, stream, hangs) as one:
            with locked(proxy):
                hangs.goes_on.set()
                one.settimeout(1)
                got = b""
                with pytest.raises(TimeoutError):
                    while piece := one.recv(2**16):
                        got += piece
                assert last not in got
                assert proxy.rollout(name)["calls"][0]["status"] == "incomplete"
            one.settimeout(20)
            while last not in got:
                got += one.recv(2**16)
        assert recorded(proxy, name)["status"] == "ok"


@pytest.mark.sqlite
def test_where_the_store_cannot_be_written_no_call_begins_and_no_answer_is_given_out(tmp_path: Path) -> None:
    store = {"busy_timeout_s": 0.3}
    with serving_raw() as server, in_this_process(tmp_path, upstreams=upstreams(server), store=store) as proxy:
        server.answer = Hangs()
        with locked(proxy):
            refused = proxy.post("/v1/chat/completions", {"model": "openai", "messages": []})
            assert refused.status == 503 and refused.error["message"]
        for stream, first, then, _ in WAYS:
            hangs, got = Hangs(*first, then=then), b""
            with begun(proxy, server, f"s{stream:d}", stream, hangs) as one, locked(proxy):
                hangs.goes_on.set()
                with suppress(ConnectionError):
                    while piece := one.recv(2**16):
                        got += piece
            assert DONE not in got and b"[]}" not in got


@pytest.mark.parametrize(
    ("model", "unended"),
    [pytest.param("vllm", False, marks=LONG), pytest.param("openai", False, marks=LONG), ("openai", True)],
)
def test_an_answer_too_large_to_keep_reaches_the_agent_whole(
    proxy: Proxy, server: RawServer, model: str, unended: bool
) -> None:
    text = "x" * 68_000_000
    large = orjson.dumps({"choices": [{"index": 0, "message": {"content": text}}], "usage": {}})
    streams = event("x" * 2**18) * 260 + DONE, event(text) + event("y") + DONE
    for sent in (event(text),) if unended else (large, *streams):
        stream = sent is not large
        pieces = (chunk(sent[at : at + 500_000]) for at in range(0, len(sent), 500_000))
        head = STREAM_HEAD if stream else JSON_HEAD.replace(b"Content-Length: 20", b"Transfer-Encoding: chunked")
        server.answer = sends(head, *pieces, LAST)
        status, got, complete, call = ask(proxy, model, stream=stream)
        assert (status, got == sent, complete, call["status"]) == (200, True, True, "ok")
        assert (call["trainable"], call["response"]) == (False, None)
