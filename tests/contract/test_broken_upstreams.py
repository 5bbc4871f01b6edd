"""CONTRACT.md, sections 1 and 4: upstreams that break, stall or refuse, agents that leave, a store that is not written.

The agent sees what happened, and the record says it.
"""

from __future__ import annotations

import re
import socket
import socketserver
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from contract.raw import connect
from contract.system import Json, Proxy, free_port, in_this_process, wait_until

DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
ANSWER = JSON_HEAD + b'{"choices": []}     '
LARGE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LAST = b"0\r\n\r\n"

Connection = socket.socket
Answer = Callable[[Connection, bytes], bool | None]  # of a request; True: the connection stays open


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class RawServer(socketserver.ThreadingTCPServer):
    """Reads requests and leaves the bytes of the answer to `answer`."""

    daemon_threads = True
    answer: Answer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.asked: list[bytes] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):
            while asked := read_request(request):
                self.asked.append(asked)
                if not self.answer(request, asked):
                    return

    def bodies(self) -> list[Json]:
        return [orjson.loads(asked.partition(b"\r\n\r\n")[2]) for asked in self.asked]


def read_request(one: Connection) -> bytes:
    data = b""
    while not (head := re.search(rb"(?is)content-length: (\d+).*?\r\n\r\n", data)) or len(data) < head.end() + int(
        head[1]
    ):
        if not (piece := one.recv(2**20)):
            return b""
        data += piece
    return data


@contextmanager
def serving() -> Iterator[RawServer]:
    with RawServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


UPSTREAMS: dict[str, Json] = {
    "vllm": {"kind": "vllm"},
    "openai": {},
    "hurried": {"first_byte_timeout_s": 0.3, "idle_timeout_s": 0.3},
    "limited": {"total_timeout_s": 0.3},
    "again": {"retries": 2, "retry_wait_s": 1},
}


def upstreams(server: RawServer, **more: str) -> list[Json]:
    """One of each kind, all at this server, which answers for a model of its name. `more`: further ones by URL."""
    policy = {"name": "policy", "kind": "vllm", "base_url": "http://127.0.0.1:1/v1"}
    known: dict[str, Json] = {name: {"base_url": server.url} | keys for name, keys in UPSTREAMS.items()}
    known |= {name: {"base_url": url} | UPSTREAMS["hurried"] | {"connect_timeout_s": 0.3} for name, url in more.items()}
    return [policy, *({"name": name, "kind": "openai", "models": [name]} | keys for name, keys in known.items())]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, RawServer]]:
    with serving() as server, ExitStack() as stack:
        deaf, full = (stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=n)) for n in (9, 0))
        for _ in range(3):  # more than fit into its queue
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        more = {"deaf": deaf.getsockname()[1], "full": full.getsockname()[1], "down": free_port()}
        urls = {name: f"http://127.0.0.1:{port}/v1" for name, port in more.items()}
        with in_this_process(tmp_path_factory.mktemp("proxy"), upstreams=upstreams(server, **urls)) as proxy:
            yield proxy, server


@pytest.fixture
def proxy(served: tuple[Proxy, RawServer]) -> Proxy:
    return served[0]


@pytest.fixture
def server(served: tuple[Proxy, RawServer]) -> RawServer:
    served[1].asked = []
    return served[1]


def sends(*pieces: bytes) -> Answer:
    """Sends these bytes and closes the connection."""
    return lambda one, _: one.sendall(b"".join(pieces))


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
    rollout, got, complete = f"r{len(proxy.get('/rollouts?limit=1000')['data'])}", bytearray(), True
    body = {"model": model, "messages": [], **({"stream": True} if stream else {}), **more}
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


FAILS: list[tuple[str, bytes, int]] = [
    ("openai", b"", 502),
    ("openai", b"SSH-2.0-nonsense\r\n", 502),
    ("openai", b"HTTP/1.1 200", 502),
    ("openai", b"HTTP/1.1 nonsense\r\n\r\n", 502),
    ("openai", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 502),
    ("openai", JSON_HEAD + b"{", 502),
    ("openai", JSON_HEAD.replace(b"200 OK", b"999 What"), 502),
    ("openai", b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 502),
    ("hurried", b"", 504),
    ("down", b"", 502),
    ("full", b"", 504),
    ("deaf", b"", 504),
]


def test_an_upstream_that_fails_before_the_answer_is_502_or_504_and_is_not_shown(
    proxy: Proxy, server: RawServer
) -> None:
    for model, answer, status in FAILS:
        server.answer = Hangs() if model == "hurried" else sends(answer)
        padding = "x" * 16_000_000 if model == "deaf" else ""  # of which it takes a part
        got, body, complete, call = ask(proxy, model, user=padding)
        assert (got, complete, orjson.loads(body)["error"]["type"]) == (status, True, "upstream_error"), (model, answer)
        assert call["status"] == "error" and call["error"]
        assert b"127.0.0.1" not in body and "127.0.0.1" not in call["error"]


FAILURE = b'data: {"error": {"message": "boom"}}\n\n'
OF_A = chunk(event("a"))


BREAKS: list[tuple[str, list[bytes], bytes, bool, str]] = [
    ("vllm", [OF_A], event("a"), False, "error"),
    ("vllm", [OF_A, LAST], event("a"), False, "error"),
    ("hurried", [OF_A, b""], event("a"), False, "error"),
    ("limited", [OF_A, b""], event("a"), False, "error"),
    ("openai", [OF_A, chunk(event("", "stop")), LAST], event("a") + event("", "stop"), True, "ok"),
    ("openai", [OF_A, chunk(event("", "stop"))], event("a") + event("", "stop"), False, "error"),
    ("openai", [OF_A, chunk(b"data: {\n\n" + DONE), LAST], event("a") + b"data: {\n\n" + DONE, True, "error"),
    ("openai", [OF_A, chunk(FAILURE + DONE), LAST], event("a") + FAILURE + DONE, True, "error"),
    ("vllm", [OF_A, chunk(FAILURE), LAST], event("a") + FAILURE, True, "error"),
]


def test_a_stream_that_breaks_or_fails_is_seen_so_and_what_came_is_recorded(proxy: Proxy, server: RawServer) -> None:
    for n, (model, answer, got, complete, status) in enumerate(BREAKS):
        stalls = model in ("hurried", "limited")
        server.answer = Hangs(STREAM_HEAD, *answer) if stalls else sends(STREAM_HEAD, *answer)
        *seen, call = ask(proxy, model, stream=True)
        assert seen == [200, got, complete], n
        assert (call["status"], call["trainable"]) == (status, False), n
        assert call["response"]["choices"][0]["message"]["content"] == "a"
        assert bool(call["error"]) == (status == "error")


def test_an_answer_that_stalls_when_the_agent_has_a_part_of_it_is_broken_off(proxy: Proxy, server: RawServer) -> None:
    server.answer = Hangs(JSON_HEAD, b"{1")
    status, got, complete, call = ask(proxy, "hurried")
    assert (status, complete, call["status"], call["response"]) == (200, False, "error", None) and got in (b"", b"{")


BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nRetry-After: %s\r\n\r\nbusy"


def test_an_upstream_that_is_busy_is_asked_again_if_so_configured(proxy: Proxy, server: RawServer) -> None:
    for model, wait, status, times in (
        ("openai", b"0", 503, 1),
        ("again", b"0", 200, 3),
        ("again", b"Wed, 21 Oct 2015 07:28:00 GMT", 200, 3),
        ("again", b"2", 503, 1),  # more patience than there is
    ):
        server.asked.clear()
        server.answer = lambda one, _, busy=BUSY % wait: one.sendall(busy if len(server.asked) < 3 else ANSWER)
        assert ask(proxy, model)[0] == status and len(server.asked) == times, wait


def test_a_request_that_meets_a_closed_idle_connection_is_sent_over_a_new_one(proxy: Proxy, server: RawServer) -> None:
    answered: list[Connection] = []

    def first_only(one: Connection, _: bytes) -> bool:
        is_first = one not in answered
        if is_first:
            answered.append(one)
            one.sendall(ANSWER)
        return is_first

    server.answer = first_only
    assert [ask(proxy, "openai")[0] for _ in range(4)] == [200] * 4 and len(server.asked) > 4


def test_a_request_that_a_server_worked_on_before_it_ended_is_not_sent_again(proxy: Proxy, server: RawServer) -> None:
    def works(one: Connection, _: bytes) -> bool:
        if len(server.asked) == 1:
            one.sendall(ANSWER)
            return True
        threading.Event().wait(3)
        return False

    server.answer = works
    assert [ask(proxy, "openai")[0] for _ in range(2)] == [200, 502] and len(server.asked) == 2


def test_a_request_whose_answer_has_begun_is_not_sent_again(proxy: Proxy, server: RawServer) -> None:
    def begins(one: Connection, _: bytes) -> bool:
        if len(server.asked) == 1:
            one.sendall(ANSWER)
            return True
        one.sendall(b"HTTP/1.1 2")
        threading.Event().wait(0.2)  # until it is there: a reset drops what is not
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
        one.close()
        return False

    server.answer = begins
    for reset in (0, 1):  # noqa: B007
        server.asked.clear()
        assert [ask(proxy, "openai")[0] for _ in range(2)] == [200, 502] and len(server.asked) == 2


def refuses(why: bytes) -> bytes:
    body = b'{"error":{"message":"%s"}}' % why
    return b"HTTP/1.1 400 No\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_upstream_refuses_for_our_additions_is_asked_again_without_them(
    proxy: Proxy, server: RawServer, stream: bool
) -> None:
    refused = refuses(b"unknown: return_token_ids")
    server.answer = lambda one, asked: one.sendall(refused if b"return_token_ids" in asked else ANSWER)
    status, _, complete, call = ask(proxy, "vllm", stream=stream)
    assert (status, complete, call["status"]) == (200, True, "ok")
    assert server.bodies()[1:] == [{"model": "vllm", "messages": []} | ({"stream": True} if stream else {})]
    server.asked, server.answer = [], sends(ANSWER)
    assert ask(proxy, "vllm", stream=stream)[0] == 200
    server.asked, server.answer = [], sends(refuses(b"the maximum context length is 8"))
    assert ask(proxy, "vllm", stream=stream)[0] == 400
    assert len(server.asked) == 1, "what it took before, and does not name, it does not refuse"


def chat(rollout: str, body: bytes) -> bytes:
    head = f"POST /rollouts/{rollout}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def leaving(proxy: Proxy, server: RawServer, rollout: str, stream: bool, hangs: Hangs) -> Iterator[None]:
    """An agent that leaves when the upstream was asked, and, for a stream, when it has the first event."""
    server.answer, body = hangs, orjson.dumps({"model": "openai", "messages": [], "stream": stream})
    before = len(server.asked)
    with connect(proxy.url) as one:
        head = (
            f"POST /rollouts/{rollout}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
        )
        one.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: len(server.asked) > before, 20, "the upstream is asked")
        while stream and event("a") not in one.recv(2**16):
            pass
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    yield


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_leaves_stops_the_upstreams_work_and_is_recorded(
    proxy: Proxy, server: RawServer, stream: bool
) -> None:
    hangs = Hangs(*([STREAM_HEAD, OF_A] if stream else []))
    with leaving(proxy, server, f"leaves-{stream}", stream, hangs):
        assert hangs.left.wait(20)
    call = recorded(proxy, f"leaves-{stream}")
    assert (call["status"], call["trainable"]) == ("cancelled", False)
    if stream:
        assert call["response"]["choices"][0]["message"]["content"] == "a"


def test_the_upstream_may_finish_for_the_record_when_the_agent_leaves_but_not_for_ever(tmp_path: Path) -> None:
    finish = {"on_disconnect": "finish", "finish_timeout_s": 3}
    with serving() as server, in_this_process(tmp_path, upstreams=upstreams(server), recording=finish) as proxy:
        for name, said, why in (
            ("goes-on", "ab", "finished for the record"),
            ("hangs", "a", "not finished within 3 s"),
        ):
            hangs = Hangs(STREAM_HEAD, OF_A, then=chunk(event("b") + DONE) + LAST)
            with leaving(proxy, server, name, True, hangs):
                assert proxy.rollout(name)["calls"][0]["status"] == "incomplete"
                if name == "goes-on":
                    hangs.goes_on.set()
                call = recorded(proxy, name)
            assert (call["status"], call["trainable"], why in call["error"]) == ("cancelled", False, True)
            assert call["response"]["choices"][0]["message"]["content"] == said


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
@pytest.mark.parametrize(("stream", "first", "then", "last"), WAYS)
def test_the_last_bytes_of_an_answer_wait_for_the_record(
    proxy: Proxy, server: RawServer, stream: bool, first: list[bytes], then: bytes, last: bytes
) -> None:
    server.answer = hangs = Hangs(*first, then=then)
    body = orjson.dumps({"model": "openai", "messages": [], "stream": stream})
    with connect(proxy.url) as one:
        one.sendall(chat(f"waits-{stream:d}", body))
        wait_until(lambda: proxy.call("GET", f"/rollouts/waits-{stream:d}").status == 200, 20, "the call began")
        wait_until(lambda: server.asked != [], 20, "the upstream was asked")
        with locked(proxy):
            hangs.goes_on.set()
            one.settimeout(1)
            got = b""
            with pytest.raises(TimeoutError):
                while piece := one.recv(2**16):
                    got += piece
            assert last not in got
            assert proxy.rollout(f"waits-{stream:d}")["calls"][0]["status"] == "incomplete"
        one.settimeout(20)
        while last not in got:
            got += one.recv(2**16)
    assert recorded(proxy, f"waits-{stream:d}")["status"] == "ok"


@pytest.mark.sqlite
def test_where_the_store_cannot_be_written_no_call_begins_and_no_answer_is_given_out(tmp_path: Path) -> None:
    store = {"busy_timeout_s": 0.3}
    with serving() as server, in_this_process(tmp_path, upstreams=upstreams(server), store=store) as proxy:
        server.answer = Hangs()
        with locked(proxy):
            refused = proxy.post("/v1/chat/completions", {"model": "openai", "messages": []})
            assert refused.status == 503 and refused.error["message"]
        for stream, first, then, _ in WAYS:
            server.answer = hangs = Hangs(*first, then=then)
            name, ended = f"s{stream:d}", threading.Event()
            other = threading.Thread(target=locked_at_the_end, args=[proxy, name, hangs, ended])
            other.start()
            body, got = {"model": "openai", "messages": [], "stream": stream}, b""
            url = f"{proxy.url}/rollouts/{name}/v1/chat/completions"
            with suppress(httpx.RemoteProtocolError), httpx.stream("POST", url, json=body, timeout=60) as answer:
                for piece in answer.iter_raw():
                    got += piece
            ended.set()
            other.join()
            assert DONE not in got and b"[]}" not in got


def locked_at_the_end(proxy: Proxy, rollout: str, hangs: Hangs, ended: threading.Event) -> None:
    """Lock the store once the call has begun, and let the upstream finish."""
    wait_until(lambda: proxy.call("GET", f"/rollouts/{rollout}").status == 200, 20, "the call began")
    with locked(proxy):
        hangs.goes_on.set()
        ended.wait(20)


@pytest.mark.long
@pytest.mark.parametrize("model", ["vllm", "openai"])
def test_an_answer_too_large_to_keep_reaches_the_agent_whole(proxy: Proxy, server: RawServer, model: str) -> None:
    large = orjson.dumps({"choices": [{"index": 0, "message": {"content": "x" * 68_000_000}}], "usage": {}})
    events = [event("x" * 2**18)] * 260
    for stream, sent, head in (
        (False, large, LARGE_HEAD % len(large)),
        (True, b"".join(events) + DONE, STREAM_HEAD),
        (True, event("x" * 68_000_000) + event("y") + DONE, STREAM_HEAD),
    ):
        pieces = map(chunk, (sent[at : at + 500_000] for at in range(0, len(sent), 500_000)))
        server.answer = sends(head, *pieces, LAST) if stream else sends(head, sent)
        status, got, complete, call = ask(proxy, model, stream=stream)
        assert (status, complete, got == sent) == (200, True, True)
        assert (call["status"], call["trainable"], call["response"]) == ("ok", False, None)
