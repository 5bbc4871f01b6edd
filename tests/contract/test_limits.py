"""Bodies that are malformed, too large, packed, slow or many: refused by name, or read like any other."""

from __future__ import annotations

import gzip
import json
import select
import socket
import socketserver
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.raw import HOST, connect, raw_deflate, send, statuses, zstd
from contract.scripted import calls, said, user
from contract.system import Json, Proxy, Served, in_this_process, served, wait_until
from support.paths import has

CHAT: Json = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
MB = 1_000_000
CONTROL = ("/reward", "/rollouts", "/rollouts/r1/events", "/rollouts/r1/end", "/policy/promote")
PATHS = ("/v1/chat/completions", *(["/otlp/v1/traces"] if has("otel") else []), *CONTROL)
FENCE = "```json" + " " * 3000 + "x"  # a pattern that went back and forth took minutes
Send = Callable[..., socket.socket]
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST
LARGE = b'"padding": "%s", ' % (b"x" * 200_000)  # of a size that is read in turns with others
TEXT = json.dumps(CHAT | {"user": "é" * 1000}, ensure_ascii=False)
CALL = TEXT.encode()
SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00note"  # a frame that decoders leave out: RFC 8878, section 3.1.2
PACK: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstd.compress, "gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress,
}  # fmt: skip


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with in_this_process(tmp_path_factory.mktemp("small"), proxy={"max_body_mb": 1, "max_bodies_mb": 1}) as one:
        yield one


def test_what_is_no_json_object_is_refused_in_openais_shape(proxy: Proxy) -> None:
    bad = [
        b"{",
        b"[5]",
        b"",
        b"1, 2",
        b'{%b"a": NaN}',
        b'{%b"a": "\xff"}',
        b'{%b"a": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    ]
    before = proxy.get("/rollouts")["data"]
    for body in {bad.replace(b"%b", padding) for bad in bad for padding in (b"", LARGE)}:
        answer = proxy.post("/v1/chat/completions", body)
        assert answer.status == 400 and answer.error["message"], body[:40]
    assert proxy.get("/rollouts")["data"] == before


def test_a_body_over_the_limit_is_refused_whether_it_says_so_or_not(proxy: Proxy) -> None:
    large = b'{"model": "policy", "pad": "%s"}' % (b"x" * MB)
    assert proxy.post("/v1/chat/completions", large).status == 413
    chunks = b"%x\r\n%s\r\n1\r\n}\r\n0\r\n\r\n" % (len(large) - 1, large[:-1])
    assert statuses(send(proxy.url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunks)) == [413]
    assert statuses(send(proxy.url, HEAD + b"Content-Length: 1000001\r\n\r\n")) == [413], "before it comes"


def without_a_size(data: bytes, window: int = 20) -> bytes:
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window})
    return bytes(packer.compress(data) + packer.flush())


def test_a_packed_body_is_unpacked_within_bounds_or_refused_and_encodings_are_read(proxy: Proxy) -> None:
    packed = [
        *((name, pack(CALL), 200) for name, pack in PACK.items()),
        ("deflate", raw_deflate(CALL), 200),
        ("utf-8", CALL, 200),  # servers do not look at it
        *(("identity", TEXT.encode(said), 200) for said in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32-be")),
        ("ZSTD", without_a_size(CALL), 200),
        ("zstd", zstd.compress(CALL[:9]) + SKIPPED + zstd.compress(CALL[9:]), 200),
        ("gzip", gzip.compress(CALL[:9]) + gzip.compress(CALL[9:]), 200),
        ("gzip, zstd", zstd.compress(gzip.compress(CALL)), 200),
        ("deflate,identity , gzip,", gzip.compress(raw_deflate(CALL)), 200),
        *((name, b"x", 415) for name in ("br", "gzip, br", "compress", "gzip;q=1", ", ".join(["gzip"] * 5))),
        *((name, data, 400) for name, pack in PACK.items()
          for data in (b"not packed at all", pack(CALL)[:-3], pack(CALL) + b"more", b"")),
        *((name, pack(b" " * (MB + 1)), 413) for name, pack in PACK.items()),
        ("deflate", raw_deflate(b" " * (MB + 1)), 413),
        ("zstd", zstd.compress(b" " * (MB // 2 + 1)) * 2, 413),
        ("gzip, zstd", zstd.compress(gzip.compress(b" " * (MB + 1))), 413),
        ("zstd, gzip", gzip.compress(b"".join(zstd.compress(CALL[i : i + 9]) for i in range(0, len(CALL), 9))), 400),
        ("zstd", SKIPPED * 10_000 + zstd.compress(CALL), 400),
        ("zstd", without_a_size(CALL, window=27), 400),
    ]  # fmt: skip
    for n, (encoding, body, status) in enumerate(packed):
        answer = proxy.post(f"/rollouts/packed-{n}/v1/chat/completions", body, Content_Encoding=encoding)
        assert answer.status == status, (n, encoding, body[:40])
        if status == 200:
            assert proxy.rollout(f"packed-{n}")["calls"][0]["request"] == json.loads(CALL)
            assert encoding in ("utf-8", "identity") or "Content-Encoding" not in proxy.vllm.requests[-1]["headers"]
        else:
            assert answer.error["message"] and proxy.call("GET", f"/rollouts/packed-{n}").status == 404
    twice = zstd.compress(gzip.compress(CALL))  # two headers are read as one
    rest = b"Content-Encoding: gzip\r\nContent-Encoding: zstd\r\nContent-Length: %d\r\n\r\n%s" % (len(twice), twice)
    assert statuses(send(proxy.url, HEAD + rest)) == [200]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    keys = {"api_keys": ["agent"], "admin_keys": ["admin"], "max_body_mb": 1, "body_timeout_s": 1}
    with in_this_process(tmp_path_factory.mktemp("keyed"), proxy=keys) as one:
        yield one


def begun(path: str, length: int, body: bytes = b"", key: str = "agent", method: str = "POST", more: str = "") -> bytes:
    """A request that declares more than it sends."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n{more}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode() + body


def test_the_key_is_judged_before_the_body_has_come_and_one_that_does_not_come_is_given_up(keyed: Proxy) -> None:
    for path in PATHS:
        (answer,) = send(keyed.url, begun(path, 30 * MB, key="nobody"))
        assert (statuses([answer]) == [401] and b"invalid_api_key" in answer) or path.startswith("/otlp"), path
        for body in (b"{", b"{}", b"x" * 2 * MB):
            assert keyed.post(path, body, "nobody").status == 401, path
    promote = "/policy/promote"
    assert keyed.post(promote, b"{", "agent").status == 401 and keyed.post(promote, b"{}", "admin").status == 422
    requests = [begun(path, 900_000, body) for path in PATHS[:3] for body in (b"", b"{" * 100_000)]
    with ThreadPoolExecutor(len(requests)) as pool:
        for (answer,) in pool.map(lambda request: send(keyed.url, request), requests):
            assert statuses([answer]) == [408] and b"connection: close" in answer.lower()
            assert b"body_timeout_s" in answer


def test_while_large_bodies_come_others_wait_and_small_ones_do_not(proxy: Proxy) -> None:
    assert proxy.chat("r1").status == 200
    reward = b'{"rollout_id": "r1", "reward": 1, "comment": "%s"}' % (b"x" * 9_000)
    with connect(proxy.url) as slow:
        slow.sendall(begun("/reward", 900_000, b"[" + b" " * 400_000))
        time.sleep(0.5)
        assert proxy.post("/reward", reward).status == 200
        (refused,) = send(proxy.url, begun("/rollouts", 900_000, b" " * 600_000))
        assert statuses([refused]) == [503] and b"retry-after: 1\r\n" in refused
        slow.sendall((reward + b"]").rjust(900_000 - 400_001))
        assert statuses([slow.recv(2**16)]) == [200]
    many = b"[%s%s]" % (b" " * 900_000, reward)  # all there is, again
    assert [proxy.post("/reward", many).status for _ in range(2)] == [200, 200]


def test_no_text_of_a_call_takes_long(tmp_path: Path) -> None:
    """Nor do others wait for it."""

    def called(arguments: str) -> Json:
        message = calls(("call_abcdefghij", None))
        message["tool_calls"][0]["function"]["arguments"] = arguments
        return message

    with in_this_process(tmp_path, recording={"redact": {"secrets": True}}) as proxy, ThreadPoolExecutor(1) as pool:
        for text, message in (
            ("go", said(FENCE)),
            ("and go", called(FENCE)),
            ("sk-" * 60_000, said("sk-" * 200_000)),
            ("word " * 120_000, called(json.dumps({"a": [f"order number {i:06} is here" for i in range(8_000)]}))),
        ):
            proxy.vllm.answer = lambda _, message=message: message
            messages, rollouts = [user(text)], set()
            for more in ([], [message, user("and?")]):
                packed = gzip.compress(json.dumps(CHAT | {"messages": messages + more}).encode(), 1)
                asked = pool.submit(proxy.post, "/v1/chat/completions", packed, Content_Encoding="gzip")
                while not asked.done():
                    began = time.monotonic()
                    proxy.get("/healthz")
                    assert time.monotonic() - began < 5
                answer = asked.result()
                assert answer.status == 200 and message.items() <= answer.json["choices"][0]["message"].items()
                rollouts.add(answer.headers["x-rollout-id"])
            assert len(rollouts) == 1, "it is one conversation"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A process with memory of its own, and keys; its second model is at a server that never answers."""

    class Reads(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(2**20):
                pass

    keys = {"api_keys": ["unread", "packed", "begins", "costs", "other"]}
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Reads) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        silent = {"name": "silent", "kind": "openai", "models": ["silent"]}
        silent["base_url"] = f"http://127.0.0.1:{server.server_address[1]}/v1"
        policy = {"name": "policy", "kind": "vllm", "base_url": "http://127.0.0.1:1/v1"}
        with served(tmp_path_factory.mktemp("process"), proxy=keys, upstreams=[policy, silent]) as one:
            yield one
        server.shutdown()


@pytest.fixture
def begin(process: Served) -> Iterator[Send]:
    """Sends a request, whole or not, and reads nothing of its answer; connections are closed at the end."""
    with ExitStack() as stack:

        def send(start: str, key: str, body: bytes = b"", **more: Any) -> socket.socket:
            one = stack.enter_context(connect(process.url, 4096))
            method, path = start.split()
            one.sendall(begun(path, more.pop("length", len(body)), body, key, method, **more))
            return one

        yield send


def memory_of(proxy: Served) -> float:
    return float(psutil.Process(proxy.server.process.pid).memory_info().rss / MB)


def work_of(proxy: Served) -> float:
    """The processor time of the process so far."""
    return sum(psutil.Process(proxy.server.process.pid).cpu_times()[:2])


def most_until_it_rests(proxy: Served) -> float:
    """The most MB that it has until it has worked for nobody for two seconds."""
    until, most, seen = time.monotonic() + 15, 0.0, [work_of(proxy)]
    while time.monotonic() < until and (len(seen) < 40 or seen[-1] - seen[-40] > 0.04):
        time.sleep(0.05)
        most = max(most, memory_of(proxy))
        seen.append(work_of(proxy))
    return most


def test_answers_that_nobody_reads_are_few(process: Served, begin: Send) -> None:
    (opened,) = process.post("/rollouts", {}, "unread").json
    name, own = opened["rollout_id"], opened["api_key"]
    notes = [{"kind": "note", "value": "x" * 20_000}] * 1000  # 20 MB
    assert process.post(f"/rollouts/{name}/events", notes, "unread").status == 200
    assert len(process.get(f"/rollouts/{name}", own)["events"]) == 1000
    before = memory_of(process)
    unread = [begin(f"GET /rollouts/{name}?requests=whole", own) for _ in range(60)]
    assert most_until_it_rests(process) < before + 350
    assert process.call("GET", f"/rollouts/{name}", key="other").status == 200  # of 20 MB, too
    assert process.call("GET", "/status", key="unread").status == 200
    for one in unread:
        one.close()
    wait_until(lambda: process.call("GET", f"/rollouts/{name}", key=own).status == 200, 30, "the key's share is free")


def test_bodies_of_one_key_leave_room_for_others(tmp_path: Path) -> None:
    keys = {"api_keys": ["slow", "other"], "max_body_mb": 1, "max_bodies_mb": 4}
    with in_this_process(tmp_path, proxy=keys) as proxy, ExitStack() as stack:
        for _ in range(20):
            one = stack.enter_context(connect(proxy.url))
            one.sendall(begun("/rollouts", 900_000, b" " * 400_000, "slow"))
        time.sleep(0.5)
        began = time.monotonic()
        assert proxy.post("/rollouts", b"{%s}" % (b" " * 900_000), "other").status == 200
        assert time.monotonic() - began < 5, "until the slow ones are given up"


def test_what_unpacks_to_much_takes_a_share(process: Served, begin: Send) -> None:
    """The server has read all of it, and does not answer."""
    body = json.dumps({"model": "silent", "messages": [{"role": "user", "content": "x" * 30 * MB}]}).encode()
    packed, before = gzip.compress(body, 9), memory_of(process)
    assert len(packed) < 50_000
    for _ in range(24):
        begin("POST /v1/chat/completions", "packed", packed, more="Content-Encoding: gzip\r\n")
    assert most_until_it_rests(process) < before + 600  # 24 of them would be 1,400


@pytest.mark.sqlite
@pytest.mark.feature("costs")
def test_reads_of_one_key_hold_up_no_other_and_end_with_their_clients(process: Served, begin: Send) -> None:
    assert process.chat("r9", key="other").status == 502
    with closing(sqlite3.connect(process.directory / "store.db")) as store:
        doubled = "INSERT INTO t SELECT * FROM t;" * 16
        store.executescript(f"""
            CREATE TEMP TABLE t AS SELECT * FROM calls WHERE rollout_id = 'r9';
            {doubled}
            UPDATE t SET call_id = 'c' || oid, seq = oid, rowid = NULL;
            INSERT INTO calls SELECT * FROM t;
        """)
    before = work_of(process)
    assert process.get("/costs", "other")["total"]["calls"] > 60_000
    one_answer = work_of(process) - before
    reads = [begin(f"GET /costs?since={n}", "costs") for n in range(30)]
    time.sleep(0.2)
    process.get("/costs", "other")
    assert len(select.select(reads, [], [], 0)[0]) < 15
    for one in reads:
        one.close()
    before = work_of(process)
    process.get("/costs", "costs")
    assert work_of(process) - before < 6 * one_answer + 0.1
