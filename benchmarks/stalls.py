"""How long one large request keeps all others waiting: `make bench-stalls`.

Each request is sent to a proxy of its own process while a second client asks for /healthz every two milliseconds. The
longest that it waited is the figure: the best of three tries, because other programs take the cores, too. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from results_page import Page, option
from servers import Server
from targets import start_proxy, start_upstream

PAUSE_S = 0.002
JSON = {"Content-Type": "application/json"}
REDACTED = {"LIGHTNING_RECORDING__REDACT__PATTERNS": r'["[0-9]{3}-[0-9]{2}-[0-9]{4}"]'}


class Watcher:
    """Asks for /healthz again and again in a process of its own, and keeps the longest wait."""

    def __init__(self, port: int) -> None:
        self.longest = 0.0
        self._port = port

    @contextmanager
    def watching(self) -> Iterator[None]:
        ours, theirs = Pipe()
        process = Process(target=_watch, args=(self._port, theirs))
        process.start()
        ours.recv()  # it has begun
        try:
            yield
        finally:
            ours.send(None)
            self.longest = ours.recv()
            process.join()


def _watch(port: int, pipe: Connection) -> None:
    connection, longest = http.client.HTTPConnection("127.0.0.1", port, timeout=120), 0.0
    connection.connect()
    pipe.send(None)
    while not pipe.poll(PAUSE_S):
        began = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        longest = max(longest, time.perf_counter() - began)
    pipe.send(longest)
    connection.close()


class Client:
    """Sends the large requests. A wrong status ends the program."""

    def __init__(self, server: Server) -> None:
        self._port = server.port
        self._runs = 0

    def name(self) -> str:
        self._runs += 1
        return f"r{self._runs}"

    def send(self, method: str, path: str, body: bytes | None = None, status: int = 200, **headers: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        connection.request(method, path, body, JSON | {n.replace("_", "-"): value for n, value in headers.items()})
        answer = connection.getresponse()
        read = answer.read()
        connection.close()
        if answer.status != status:
            raise SystemExit(f"{method} {path}: {answer.status} {read[:300]!r}")
        return read

    def chat(self, body: bytes, rollout: str | None = None, **headers: str) -> None:
        where = f"/rollouts/{rollout}" if rollout else ""
        self.send("POST", f"{where}/v1/chat/completions", body, **headers)


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def messages(n: int, text: str = "") -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": f"{i}{text}"} for i in range(n)]


def chat_body(said: list[dict[str, str]]) -> bytes:
    return compact({"model": "policy", "messages": said})


# A case prepares what it needs and returns the request that is watched.
Case = Callable[[Client], Callable[[], object]]


def _unnamed(client: Client) -> Callable[[], object]:
    body = chat_body(messages(200_000))
    return lambda: client.chat(body)


def _named(client: Client) -> Callable[[], object]:
    body, rollout = chat_body(messages(200_000)), client.name()
    return lambda: client.chat(body, rollout)


def _continued(client: Client) -> Callable[[], object]:
    said, rollout = messages(200_000), client.name()
    client.chat(chat_body(said[:-2]), rollout)
    body = chat_body(said)
    return lambda: client.chat(body, rollout)


def _long_text(client: Client) -> Callable[[], object]:
    body = chat_body([{"role": "user", "content": "all in one message. " * 400_000}])
    return lambda: client.chat(body)


def _gzipped(client: Client) -> Callable[[], object]:
    body = gzip.compress(chat_body(messages(200_000)), 1)
    return lambda: client.chat(body, client.name(), Content_Encoding="gzip")


def _messages(client: Client) -> Callable[[], object]:
    body = compact({"model": "policy", "max_tokens": 9, "messages": messages(199_999)})
    return lambda: client.send("POST", f"/rollouts/{client.name()}/v1/messages", body)


def _responses_by_id(client: Client) -> Callable[[], object]:
    path = f"/rollouts/{client.name()}/v1/responses"
    items = [{"role": "user", "content": str(i)} for i in range(100_000)]
    first = json.loads(client.send("POST", path, compact({"model": "policy", "input": items})))["id"]
    body = compact({"model": "policy", "input": "and?", "previous_response_id": first})
    return lambda: client.send("POST", path, body)


def _rewards(client: Client) -> Callable[[], object]:
    rollout = client.name()
    client.chat(chat_body(messages(1)), rollout)
    body = compact([{"rollout_id": rollout, "reward": i / 7, "comment": "c" * 700} for i in range(10_000)])
    return lambda: client.send("POST", "/reward", body)


def _too_many_rewards(client: Client) -> Callable[[], object]:
    body = compact([{"rollout_id": "r", "reward": i} for i in range(200_000)])
    return lambda: client.send("POST", "/reward", body, status=413)


def _wrong_rewards(client: Client) -> Callable[[], object]:
    body = compact([{"rollout_id": "r", "reward": "x"} for _ in range(10_000)])
    return lambda: client.send("POST", "/reward", body, status=422)


def _events(client: Client) -> Callable[[], object]:
    rollout = client.name()
    body = compact([{"kind": "note", "value": list(range(1_500))}] * 1_000)
    return lambda: client.send("POST", f"/rollouts/{rollout}/events", body)


def _many_rollouts(client: Client) -> Callable[[], object]:
    body = compact({"n": 1_000, "metadata": {"text": "x" * 8_000}})
    return lambda: client.send("POST", "/rollouts", body)


def _metadata(client: Client) -> Callable[[], object]:
    body = compact({"metadata": {str(i): [i, {"a": i}] for i in range(250_000)}})
    return lambda: client.send("POST", "/rollouts", body)


def _no_json(client: Client) -> Callable[[], object]:
    body = chat_body(messages(200_000))[:-1]
    return lambda: client.send("POST", "/reward", body, status=400)


def _spans(client: Client) -> Callable[[], object]:
    attribute = {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}
    span = {"startTimeUnixNano": "1", "endTimeUnixNano": "2", "name": "x", "attributes": [attribute]}
    trace = client.name().encode().hex().zfill(32)
    spans = [span | {"traceId": trace, "spanId": f"{i + 1:016x}"} for i in range(2_000)]
    body = compact({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}], "padding": list(range(1_000_000))})
    return lambda: client.send("POST", "/otlp/v1/traces", body)


def _read(path: str) -> Case:
    def case(client: Client) -> Callable[[], object]:
        rollout, said = client.name(), messages(400, "x" * 500)
        for turn in range(1, 200):
            client.chat(chat_body(said[: 2 * turn]), rollout)
        return lambda: client.send("GET", path.format(rollout))

    return case


def _read_large(client: Client) -> Callable[[], object]:
    rollout = client.name()
    client.chat(chat_body(messages(200_000)), rollout)
    return lambda: client.send("GET", f"/rollouts/{rollout}")


def _page(client: Client) -> Callable[[], object]:
    metadata = {str(i): [i, {"a": i}] for i in range(500)}
    client.send("POST", "/rollouts", compact({"n": 1_000, "metadata": metadata}))
    return lambda: client.send("GET", "/rollouts?limit=1000")


CASES: dict[str, Case] = {
    "chat, unnamed, 200,000 messages": _unnamed,
    "chat, named, 200,000 messages": _named,
    "chat that continues such a one": _continued,
    "chat, one message of 8 MB": _long_text,
    "chat, 200,000 messages, gzip": _gzipped,
    "Messages, 200,000 messages": _messages,
    "response that goes on with 100,000 items": _responses_by_id,
    "10,000 rewards": _rewards,
    "200,000 rewards (413)": _too_many_rewards,
    "10,000 wrong rewards (422)": _wrong_rewards,
    "1,000 events, 8 MB": _events,
    "1,000 rollouts, metadata of 8 KB each": _many_rollouts,
    "metadata of 250,000 entries": _metadata,
    "8 MB that are no JSON (400)": _no_json,
    "OTLP, 2,000 spans, 8 MB": _spans,
    "read a rollout of 200 calls": _read("/rollouts/{}"),
    "read its transitions": _read("/rollouts/{}/transitions"),
    "read a rollout of 200,000 messages": _read_large,
    "list 1,000 rollouts, metadata of 8 KB each": _page,
}


def measure(server: Server, case: Case, tries: int) -> tuple[float, float]:
    """The longest wait of others and the request's own time in milliseconds, each the best of some tries."""
    found = []
    for _ in range(tries):
        request = case(Client(server))
        server.settle()
        watcher = Watcher(server.port)
        with watcher.watching():
            time.sleep(0.05)
            began = time.perf_counter()
            request()
            took = time.perf_counter() - began
            server.settle(2.0)  # what follows the answer is waited for, too
        found.append((watcher.longest * 1000, took * 1000))
    return min(longest for longest, _ in found), min(took for _, took in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--redact", action="store_true", help="with a pattern to redact")
    option(parser, "stalls")
    args = parser.parse_args()
    page = Page("How long a large request keeps others waiting")
    upstream = start_upstream()
    try:
        with tempfile.TemporaryDirectory() as name:
            server = start_proxy(Path(name) / "proxy", upstream.url, env=REDACTED if args.redact else {})
            try:
                cases = {title: case for title, case in CASES.items() if args.only in title}
                page.table(
                    f"The best of {args.tries} tries:",
                    ("request", "others waited, ms", "it took, ms"),
                    (
                        (title, *(f"{ms:.0f}" for ms in measure(server, case, args.tries)))
                        for title, case in cases.items()
                    ),
                )
                page.save(args.page)
            finally:
                server.stop()
    finally:
        upstream.stop()


if __name__ == "__main__":
    main()
