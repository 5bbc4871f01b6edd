"""Several proxies over one PostgreSQL beside workers over one SQLite file: `make bench-several`, about three minutes.

Each way is loaded by as many connections in all; several proxies get equal shares. A server of PostgreSQL is started
for it, with `fsync` on. All parts share this machine's cores, so each part's processor time is shown: where they sum
up to all cores, the machine is the limit, and not the store. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from report import Page, option
from servers import TICKS, Server
from targets import HERE, start_proxy, start_upstream

sys.path.insert(0, str(HERE.parent / "tests"))

from support.stores import Server as PostgresServer
from support.stores import postgres_server

PATH = "/rollouts/{run}-{}/v1/chat/completions"


@dataclass(frozen=True)
class Way:
    """A way to serve calls: its proxies, each with some workers, and what has their store, if it is a server."""

    store: str
    processes: int
    proxies: Sequence[Server]
    database: PostgresServer | None = None

    def cpu_s(self, upstream: Server) -> dict[str, float]:
        """The processor time that each part has taken so far."""
        server = 0.0 if self.database is None else database_cpu_s(self.database)
        return {"proxies": sum(p.cpu_s() for p in self.proxies), "server": server, "model server": upstream.cpu_s()}


def database_cpu_s(server: PostgresServer) -> float:
    """Of the server's processes, those that have ended included."""
    return sum(map(_process_cpu_s, server.pids()))


def _process_cpu_s(pid: int) -> float:
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, values[11:15])) / TICKS


def load(way: Way, upstream: Server, prompt: int, run: str, options: argparse.Namespace) -> dict[str, Any]:
    """Load all proxies at once; the answers, the seconds, and each part's processor time."""
    before = way.cpu_s(upstream)
    clients = []
    for n, proxy in enumerate(way.proxies):
        given = {
            "port": proxy.port, "connections": options.connections // len(way.proxies), "seconds": options.seconds,
            "prompt": prompt, "options": {}, "path": PATH.replace("{run}", f"{run}.{n}"),
        }  # fmt: skip
        argv = [sys.executable, HERE / "load.py", json.dumps(given)]
        clients.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
    results = [json.loads(client.communicate()[0]) for client in clients]
    for proxy in way.proxies:
        proxy.settle()
    if failed := [result["example"] for result in results if result["failed"]]:
        raise SystemExit(f"{way.store}, {way.processes}: {failed[0]}")
    cpu = {name: after - before[name] for name, after in way.cpu_s(upstream).items()}
    cpu["clients"] = sum(result["client_cpu_s"] for result in results)
    return {
        "answers": sum(result["answers"] for result in results),
        "seconds": max(result["seconds"] for result in results),
        "p50_ms": median(result["latency_ms"][0] for result in results),
        "cpu": cpu,
    }


@contextmanager
def ways(directory: Path, upstream: Server) -> Iterator[list[Way]]:
    with ExitStack() as stack:

        def proxy(name: str, **how: Any) -> Server:
            server = start_proxy(directory / name, upstream.url, **how)
            stack.callback(server.stop)
            return server

        database = stack.enter_context(postgres_server(fsync="on", shared_buffers="256MB", max_connections="100"))
        url = database.new_database()
        proxies = [proxy(f"postgres-{n}", store=url) for n in range(4)]
        files = [Way("SQLite", n, [proxy(f"sqlite-{n}", workers=n)]) for n in (1, 2)]
        yield [*files, *(Way("PostgreSQL", n, proxies[:n], database) for n in (1, 2, 4))]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way and size, its figures the medians of the rounds, which are mixed."""
    found = defaultdict(list)
    upstream = start_upstream()
    try:
        with tempfile.TemporaryDirectory() as directory, ways(Path(directory), upstream) as all_ways:
            jobs = [(prompt, n) for prompt in options.prompts for n in range(len(all_ways))] * options.rounds
            random.Random(options.seed).shuffle(jobs)
            jobs.sort(key=lambda job: job[0])  # or small calls would pay for writing what large ones have left behind
            for at, (prompt, n) in enumerate(jobs):
                found[prompt, n].append(load(all_ways[n], upstream, prompt, f"b{at}", options))
    finally:
        upstream.stop()
    return [
        {"prompt": prompt, "store": all_ways[n].store, "processes": all_ways[n].processes, **figures(results)}
        for (prompt, n), results in sorted(found.items())
    ]


def figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "per_s": median(r["answers"] / r["seconds"] for r in results),
        "p50_ms": median(r["p50_ms"] for r in results),
        "cpu_ms": {name: median(1000 * r["cpu"][name] / r["answers"] for r in results) for name in results[0]["cpu"]},
        "cores": median(sum(r["cpu"].values()) / r["seconds"] for r in results),
    }


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    parts = list(rows[0]["cpu_ms"])
    yield f"| request | store | processes | calls/s | median ms | {' | '.join(parts)} | all, cores |"
    yield "|" + "---|" * (6 + len(parts))
    for row in rows:
        cpu = " | ".join(f"{row['cpu_ms'][name]:.2f}" for name in parts)
        yield (
            f"| {row['prompt'] // 1000} KB | {row['store']} | {row['processes']} | {row['per_s']:,.0f} | "
            f"{row['p50_ms']:.1f} | {cpu} | {row['cores']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--connections", type=int, default=32, help="in all")
    parser.add_argument("--prompts", type=int, nargs="*", default=[1_000, 50_000], help="bytes of a request")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    option(parser)
    options = parser.parse_args()
    page = Page("Several proxies over one PostgreSQL")
    rows = measure(options)
    page.text(["All parts share the machine. Processor time in ms a call:", "", *markdown(rows)])
    page.save(options.page)


if __name__ == "__main__":
    main()
