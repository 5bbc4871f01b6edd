"""What bodies and answers together may take, and that one key does not hold up the others."""

from __future__ import annotations

import gzip
import json
import select
import socket
import socketserver
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from contract.system import Served, served, wait_until

MB = 1_000_000
KEYS = {"api_keys": ["unread", "packed", "begins", "costs", "other"]}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A process with memory of its own, and keys; its second model is at a server that never answers."""
    with _silent_server() as port:
        silent = {"name": "silent", "kind": "openai", "base_url": f"http://127.0.0.1:{port}/v1", "models": ["silent"]}
        policy = {"name": "policy", "kind": "vllm", "base_url": "http://127.0.0.1:1/v1"}
        with served(tmp_path_factory.mktemp("proxy"), proxy=KEYS, upstreams=[policy, silent]) as one:
            yield one


@contextmanager
def _silent_server() -> Iterator[int]:
    class Reads(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(2**20):
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Reads) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Clients:
    """Raw connections, which are closed at the end. They read nothing by themselves."""

    def __init__(self, proxy: Served, stack: ExitStack) -> None:
        self.port, self.stack = int(proxy.url.rsplit(":", 1)[1]), stack

    def send(
        self, start: str, key: str, body: bytes = b"", *, length: int | None = None, more: str = ""
    ) -> socket.socket:
        one = self.stack.enter_context(socket.socket())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", self.port))
        head = (
            f"{start} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        )
        one.sendall(f"{head}{more}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
        return one


@pytest.fixture
def clients(proxy: Served) -> Iterator[Clients]:
    with ExitStack() as stack:
        yield Clients(proxy, stack)


def memory_of(proxy: Served) -> float:
    """The MB that the process has for itself."""
    assert proxy.server.process is not None
    status = Path(f"/proc/{proxy.server.process.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1000


def work_of(proxy: Served) -> int:
    """The processor time of the process so far, in the system's ticks."""
    assert proxy.server.process is not None
    stat = Path(f"/proc/{proxy.server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(stat[11]) + int(stat[12])


def most_until_it_rests(proxy: Served, seconds: float = 15) -> float:
    """The most MB that it has until it has worked for nobody for two seconds."""
    until, most, seen = time.monotonic() + seconds, 0.0, [work_of(proxy)]
    while time.monotonic() < until and (len(seen) < 40 or seen[-1] - seen[-40] > 4):
        time.sleep(0.05)
        most = max(most, memory_of(proxy))
        seen.append(work_of(proxy))
    return most


def a_rollout(proxy: Served, key: str, mb: int) -> tuple[str, str]:
    """The id and the key of a rollout with so much content."""
    (opened,) = proxy.post("/rollouts", {}, key).json
    notes = [{"kind": "note", "value": "x" * 20_000}] * (mb * 50)
    assert proxy.post(f"/rollouts/{opened['rollout_id']}/events", notes, key).status == 200
    return opened["rollout_id"], opened["api_key"]


def test_answers_that_nobody_reads_are_few(proxy: Served, clients: Clients) -> None:
    name, own = a_rollout(proxy, "unread", 20)
    assert len(proxy.get(f"/rollouts/{name}", own)["events"]) == 1000
    before = memory_of(proxy)
    unread = [clients.send(f"GET /rollouts/{name}?requests=whole", own) for _ in range(60)]
    assert most_until_it_rests(proxy) < before + 350
    assert proxy.call("GET", f"/rollouts/{name}", key="other").status == 200  # of 20 MB, too
    assert proxy.call("GET", "/status", key="unread").status == 200
    for one in unread:
        one.close()
    wait_until(lambda: proxy.call("GET", f"/rollouts/{name}", key=own).status == 200, 30, "the key's share is free")


def test_what_unpacks_to_much_takes_a_share(proxy: Served, clients: Clients) -> None:
    """The server has read all of it, and does not answer."""
    body = json.dumps({"model": "silent", "messages": [{"role": "user", "content": "x" * 30 * MB}]}).encode()
    packed, before = gzip.compress(body, 9), memory_of(proxy)
    assert len(packed) < 50_000
    for _ in range(24):
        clients.send("POST /v1/chat/completions", "packed", packed, more="Content-Encoding: gzip\r\n")
    assert most_until_it_rests(proxy) < before + 600  # 24 of them would be 1,400


def test_bodies_of_one_key_leave_room_for_others(proxy: Served, clients: Clients) -> None:
    notes = json.dumps([{"kind": "note", "value": "x" * 20_000}] * 1000).encode()

    def all_but_the_end(one: socket.socket) -> None:
        with suppress(OSError):
            one.sendall(notes[MB:-1])

    for _ in range(24):
        one = clients.send("POST /rollouts/r2/events", "begins", notes[:MB], length=len(notes))
        threading.Thread(target=all_but_the_end, args=[one], daemon=True).start()
    most_until_it_rests(proxy)
    assert proxy.call("POST", "/rollouts/r3/events", notes, "other").status == 200


@pytest.mark.sqlite
@pytest.mark.feature("costs")
def test_reads_of_one_key_hold_up_no_other_and_end_with_their_clients(proxy: Served, clients: Clients) -> None:
    assert proxy.chat("r9", key="other").status == 502
    with closing(sqlite3.connect(proxy.directory / "store.db")) as store, store:
        columns = [name for _, name, *_ in store.execute("PRAGMA table_info(calls)") if name != "rowid"]
        own = {"call_id": "'c' || n", "seq": "n"}
        copied = ", ".join(own.get(name, name) for name in columns)
        numbers = "WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 60000)"
        only = "FROM calls, i WHERE rollout_id = 'r9' AND seq = 0"
        store.execute(f"{numbers} INSERT INTO calls ({', '.join(columns)}) SELECT {copied} {only}")
    before = work_of(proxy)
    assert proxy.get("/costs", "other")["total"]["calls"] > 60_000
    one_answer = work_of(proxy) - before
    reads = [clients.send(f"GET /costs?since={n}", "costs") for n in range(30)]
    time.sleep(0.2)
    proxy.get("/costs", "other")
    assert len(select.select(reads, [], [], 0)[0]) < 15
    for one in reads:
        one.close()
    before = work_of(proxy)
    proxy.get("/costs", "costs")
    assert work_of(proxy) - before < 6 * one_answer + 10
