"""How fast the proxy is, with durable recording on: `make bench-proxy`, or `python benchmarks/proxy.py --help`.

Compared in one run, in random order, several rounds: the model server itself, a bare forwarder that records nothing
(the floor), and the proxy. All on this machine's loopback, each a process of its own; every run ends by itself.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parent
Case = tuple[bool, int, int]  # streamed, bytes of prompt, connections


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Process:
    """One of the servers; ended with the block."""

    def __init__(self, *argv: str, port: int, ready: str = "/v1/models") -> None:
        self.port = port
        self.popen = subprocess.Popen([sys.executable, *argv], start_new_session=True)
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"{argv} did not start")

    @property
    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self) -> None:
        self.popen.terminate()
        self.popen.wait(30)


def load(port: int, connections: int, seconds: float, prompt: int, stream: bool, path: str) -> dict:
    options = {
        "port": port, "connections": connections, "seconds": seconds, "prompt_bytes": prompt, "stream": stream,
        "path": path,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, HERE / "load.py", json.dumps(options)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def measure(targets: dict[str, Process], cases: list[Case], rounds: int, seconds: float) -> dict:
    """Answers a second, and latencies, by (case, target): the median over the rounds."""
    jobs = [(case, name) for case in cases for name in targets for _ in range(rounds)]
    random.Random(0).shuffle(jobs)
    found = defaultdict(list)
    for case, name in track(jobs, "measuring", console=Console(stderr=True)):
        stream, prompt, connections = case
        own = f"/rollouts/b{time.time_ns()}-{{}}" if name == "ours" else ""
        path = f"{own}/v1/chat/completions"
        result = load(targets[name].port, connections, seconds, prompt, stream, path)
        if result["failed"] or not result["answers"]:
            raise SystemExit(f"{name}, {case}: {result}")
        found[case, name].append(result)
    return {
        key: {
            "per_s": median(r["answers"] / r["seconds"] for r in results),
            "p50_ms": median(r["latency_ms"][0] for r in results),
            "p99_ms": median(r["latency_ms"][-1] for r in results),
            "first_p50_ms": median(r["first_ms"][0] for r in results),
        }
        for key, results in found.items()
    }


def show(figures: dict, cases: list[Case], names: list[str]) -> None:
    table = Table(title="answers a second, and median latency; ratio to the bare forwarder, ms added to it")
    for column in (
        "answers",
        "prompt",
        "connections",
        *names,
        "ours / forwarder",
        "added ms",
        "added to first byte ms",
    ):
        table.add_column(column, justify="right")
    for case in cases:
        stream, prompt, connections = case
        ours, floor = figures[case, "ours"], figures[case, "forwarder"]
        table.add_row(
            "40 chunks" if stream else "JSON", f"{prompt / 1000:g} KB", str(connections),
            *(f"{figures[case, n]['per_s']:,.0f}/s {figures[case, n]['p50_ms']:.2f} ms" for n in names),
            f"{ours['per_s'] / floor['per_s']:.2f}", f"{ours['p50_ms'] - floor['p50_ms']:+.2f}",
            f"{ours['first_p50_ms'] - floor['first_p50_ms']:+.2f}",
        )  # fmt: skip
    Console(width=150).print(table)


def open_streams(ours: Process, n: int) -> float:
    """The proxy's memory in MiB with `n` streams open that wait for their next chunk."""
    body = b'{"model":"base","messages":[{"role":"user","content":"hi"}],"slow":true,"stream":true}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    sockets = []
    for _ in range(n):
        one = socket.create_connection(("127.0.0.1", ours.port))
        one.sendall(head + body)
        sockets.append(one)
    for one in sockets:
        if b"200" not in one.recv(4096)[:20]:
            raise SystemExit("a stream was refused")
    memory = ours.rss_mib
    for one in sockets:
        one.close()
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="only 1 KB prompts on 1 and 16 connections")
    parser.add_argument("--streams", type=int, default=1000, help="streams open at once for the memory figure; 0: skip")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    prompts, connections = ([1_000], [1, 16]) if options.quick else ([1_000, 50_000, 1_000_000], [1, 16, 256])
    cases = [
        (stream, p, c) for stream in (False, True) for p in prompts for c in connections if not (p > 50_000 and c > 16)
    ]
    with tempfile.TemporaryDirectory() as directory:
        ports = [free_port() for _ in range(3)]
        config = Path(directory) / "config.yaml"
        upstream_url = f"http://127.0.0.1:{ports[0]}"
        settings = {
            "proxy": {"port": ports[2]},
            "store": {"url": f"sqlite:///{directory}/store.db"},
            "upstreams": [{"name": "policy", "base_url": f"{upstream_url}/v1"}],
            "policy": {"publish": "merged", "directory": f"{directory}/policy"},
        }
        config.write_text(json.dumps(settings))
        processes = {
            "direct": Process(str(HERE / "upstream.py"), str(ports[0]), port=ports[0]),
            "forwarder": Process(str(HERE / "forwarder.py"), str(ports[1]), upstream_url, port=ports[1]),
            "ours": Process(
                "-m", "lightning_proxy.cli", "--config", str(config), "serve", port=ports[2], ready="/readyz"
            ),
        }
        try:
            before = processes["ours"].rss_mib
            figures = measure(processes, cases, options.rounds, options.seconds)
            show(figures, cases, list(processes))
            after = processes["ours"].rss_mib
            print(
                f"{os.cpu_count()} cores; the proxy's memory: {before:.0f} MiB at first, {after:.0f} MiB after the load"
            )
            if options.streams:
                print(f"{open_streams(processes['ours'], options.streams):.0f} MiB with {options.streams} streams open")
            if options.json:
                rows = [{"case": list(case), "target": name, **f} for (case, name), f in figures.items()]
                options.json.write_text(json.dumps(rows, indent=1))
        finally:
            for process in processes.values():
                process.stop()


if __name__ == "__main__":
    main()
