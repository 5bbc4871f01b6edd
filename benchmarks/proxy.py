"""How fast the proxy is, with durable recording on: `make bench-proxy`, or `python benchmarks/proxy.py --help`.

Compared in one run, in random order: the model server itself; a bare forwarder that records nothing (the floor); the
same when it commits each request and each answer and does nothing else with them; the proxy, also with two workers; and
the peers that `make bench-peers` has installed. Small prompts come first. All on this machine's loopback, each a
process of its own; every run ends by itself. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from peers import PEERS
from report import Page, machine, of_proxy, option
from rich.console import Console
from rich.progress import track
from servers import Server, Unavailable
from targets import (
    COMMITTING,
    HERE,
    Target,
    committing,
    ours,
    start_forwarder,
    start_proxy,
    start_upstream,
)

KINDS = {
    "JSON": {"stream": False},
    "40 chunks": {"stream": True},
    "40 chunks, 1 ms apart": {"stream": True, "paced": True},
}
MAIN = ("direct", "forwarder", COMMITTING, "ours")


class Case(NamedTuple):
    kind: str
    prompt: int  # bytes
    connections: int


def cases(quick: bool) -> list[Case]:
    prompts, connections = ((1_000, 50_000), (1, 16)) if quick else ((1_000, 50_000, 1_000_000), (1, 16, 256))
    found = [Case(*case) for case in product(("JSON", "40 chunks"), prompts, connections)]
    return found if quick else [*found, Case("40 chunks, 1 ms apart", 1_000, 256)]


def is_measured(target: Target, case: Case) -> bool:
    if not target.streams and case.kind != "JSON":
        return False
    if target.is_peer:  # they would take minutes
        return case.kind in ("JSON", "40 chunks") and (case.prompt < 1_000_000 or case.connections <= 16)
    return target.name in MAIN or case.prompt < 1_000_000


def load(target: Target, case: Case, run: str, seconds: float) -> dict[str, Any]:
    """What load.py found, and `cpu_s`: the processor time that the target took, for what it did afterwards as well."""
    options = {
        "port": target.server.port, "connections": case.connections, "seconds": seconds, "prompt": case.prompt,
        "options": KINDS[case.kind], "path": target.path.replace("{run}", run), "ids": target.ids, "key": target.key,
    }  # fmt: skip
    before = target.server.cpu_s()
    argv = [sys.executable, HERE / "load.py", json.dumps(options)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    target.server.settle()
    return json.loads(done.stdout) | {"cpu_s": target.server.cpu_s() - before}


def check(target: Target) -> str | None:
    """What is wrong with the target's answers, or with its record of them; None if nothing is."""
    for n, kind in enumerate(("JSON", "40 chunks") if target.streams else ("JSON",), 1):
        result = load(target, Case(kind, 1_000, 1), "check", 0)
        if result["failed"] or not result["answers"]:
            return f"{kind}: {result['example']}"
        if target.recorded and (found := target.recorded()) != n:
            return f"{kind}: {found} calls recorded in place of {n}"
    return None


def measure(targets: list[Target], options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Figures by case and target, each the median of its rounds, and what failed."""
    jobs = [
        (case, target)
        for case, target in product(cases(options.quick), targets)
        if is_measured(target, case)
        for _ in range(1 if target.is_peer else options.rounds)
    ]
    random.Random(options.seed).shuffle(jobs)
    jobs.sort(key=lambda job: job[0].prompt)  # or small calls would pay for writing what large ones have left behind
    found, failed = defaultdict(list), []
    for n, (case, target) in enumerate(track(jobs, "measuring", console=Console(stderr=True))):
        seconds = max(2 * options.seconds, 2.0) if target.is_peer else options.seconds
        result = load(target, case, f"b{n}", seconds)
        target.clean()
        if result["failed"] or not result["answers"]:
            failed.append(f"{target.name}, {', '.join(map(str, case))}: {result['failed']} failed, {result['example']}")
        else:
            found[case, target.name].append(result)
    return [{**case._asdict(), "target": name, **figures(results)} for (case, name), results in found.items()], failed


def figures(results: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "per_s": median(r["answers"] / r["seconds"] for r in results),
        "p50_ms": median(r["latency_ms"][0] for r in results),
        "p99_ms": median(r["latency_ms"][-1] for r in results),
        "first_ms": median(r["first_ms"][0] for r in results),
        "cpu_ms": median(1000 * r["cpu_s"] / r["answers"] for r in results),
        "client_cpu_ms": median(1000 * r["client_cpu_s"] / r["answers"] for r in results),
    }


def open_streams(proxy: Server, n: int) -> dict[str, float]:
    """The proxy's memory with `n` streams open that wait for their next chunk, and how long it took to open them."""
    body = b'{"model":"base","messages":[{"role":"user","content":"hi"}],"slow":true,"stream":true}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    before, began = proxy.rss_mib(), time.monotonic()
    sockets = [socket.create_connection(("127.0.0.1", proxy.port), timeout=20) for _ in range(n)]
    for one in sockets:
        one.sendall(head + body)
    for one in sockets:
        if b"200" not in one.recv(4096)[:20]:
            raise SystemExit("a stream was refused")
    found = {"n": n, "seconds": time.monotonic() - began, "mib": proxy.rss_mib(), "mib_before": before}
    for one in sockets:
        one.close()
    proxy.settle()
    return found


@contextmanager
def started(directory: Path, only: list[str]) -> Iterator[tuple[list[Target], list[str]]]:
    """The targets that answer and record as they should, and why others were left out; of what can be, `only` these."""
    with ExitStack() as stack:
        targets: list[Target] = []
        left_out: list[str] = []

        def add(name: str, start: Callable[[], Target]) -> None:
            try:
                target = start()
            except Unavailable as reason:
                left_out.append(f"{name}: {reason}")
                return
            stack.callback(target.server.stop)
            if wrong := check(target):
                left_out.append(f"{name}: {wrong}")
            else:
                targets.append(target)

        upstream = start_upstream()
        url = upstream.url
        add("direct", lambda: Target("direct", upstream))
        add("forwarder", lambda: Target("forwarder", start_forwarder(url)))
        add(COMMITTING, lambda: committing(url, directory / "journal.db"))
        add("ours", lambda: ours("ours", start_proxy(directory / "ours", url)))
        if "workers" in only:
            add("2 workers", lambda: ours("ours, 2 workers", start_proxy(directory / "workers", url, workers=2)))
        for peer in PEERS:
            if peer.name in only:
                own = directory / peer.name
                own.mkdir()
                add(peer.title, partial(peer.start, peer, own, url))
        yield targets, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of each run; of a peer's, which are slow, twice that"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, but for the peers, which have one")
    parser.add_argument("--quick", action="store_true", help="two minutes: up to 50 KB and 16 connections, one round")
    others = ["workers", *(peer.name for peer in PEERS)]
    parser.add_argument(
        "--only", nargs="*", choices=others, default=others, help="in addition to upstream, forwarder and proxy"
    )
    parser.add_argument("--streams", type=int, default=1000, help="streams open at once for the memory figure; 0: skip")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    option(parser)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped as well
    options.rounds = 1 if options.quick else options.rounds
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as directory, started(Path(directory), options.only) as (targets, left_out):
        for reason in left_out:
            print(f"left out: {reason}", file=sys.stderr)
        if not {target.name for target in targets}.issuperset(MAIN):
            raise SystemExit("without these there is nothing to compare")
        before = {target.name: target.server.rss_mib() for target in targets}
        proxy = next(target.server for target in targets if target.name == "ours")
        streams = open_streams(proxy, options.streams) if options.streams else None
        rows, failed = measure(targets, options)
        memory = {t.name: [before[t.name], t.server.rss_mib(), t.server.peak_mib()] for t in targets}
    command = shlex.join(["python", "benchmarks/proxy.py", *sys.argv[1:]])
    found = {"machine": machine(), "command": command, "rows": rows, "memory_mib": memory, "streams": streams}
    found |= {"left_out": left_out, "failed": failed}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    page = Page("What a call costs")
    page.text([of_proxy(found)])
    page.save(options.page)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
