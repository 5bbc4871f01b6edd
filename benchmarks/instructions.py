"""What a call costs without what the machine does besides: `make bench-instructions`. Needs valgrind.

The proxy, and a bare forwarder beside it, run under valgrind's callgrind; after a warm-up, the instructions of a load
of calls are counted, less those of the same time without calls, and divided by its answers. What follows an answer
counts, too. Instructions mislead: copying counts by the byte, and compiled code needs fewer and no less time. So the
same programs run once more as they are, in turns, and their processor time is read. `--before PYTHON`, another
checkout's interpreter, adds its proxy. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from report import Page, option
from servers import Server, free_port
from targets import HERE, start_upstream

# Each with what load.py is told. Ten turns: an agent's conversation grows from 32 to 68 KB, in one rollout.
CASES = {
    "JSON, 1 KB": {"prompt": 1_000, "options": {"stream": False}},
    "JSON, 50 KB": {"prompt": 50_000, "options": {"stream": False}},
    "JSON, 50 KB, ten turns": {"prompt": 50_000, "options": {"stream": False}, "turns": 10},
    "40 chunks, 1 KB": {"prompt": 1_000, "options": {"stream": True}},
}
WARM_UP_S, IDLE_S = 8.0, 5.0
FLOOR, OURS, BEFORE = "bare forwarder", "lightning-proxy", "lightning-proxy before"


class Program(NamedTuple):
    """A program that answers calls at `path`, and when it is ready."""

    argv: list[str | Path]
    port: int
    ready: str
    path: str

    @contextmanager
    def started(self, directory: Path, *prefix: str, patience_s: float = 60) -> Iterator[Server]:
        """Run it, behind a `prefix`, until the block is left."""
        argv = [*prefix, *self.argv]
        server = Server(argv, self.port, ready=self.ready, log=directory / f"{self.port}.log", patience_s=patience_s)
        try:
            yield server
        finally:
            server.stop()


def programs(directory: Path, url: str, before: str | None) -> dict[str, Program]:
    """The forwarder and the proxy, in front of `url`, each with a port and a store of its own."""
    port = free_port()
    forwarder = [sys.executable, HERE / "forwarder.py", str(port), url]
    found = {FLOOR: Program(forwarder, port, "/v1/models", "/v1/chat/completions")}
    for name, python in ({OURS: sys.executable} | ({BEFORE: before} if before else {})).items():
        port, config = free_port(), directory / f"{name}.yaml"
        settings = {
            "proxy": {"port": port},
            "store": {"url": f"sqlite:///{directory}/{port}.db"},
            "upstreams": [{"name": "policy", "base_url": f"{url}/v1", "connect_timeout_s": 60}],
            "policy": {"publish": "merged", "directory": f"{directory}/{port}"},
        }
        config.write_text(json.dumps(settings))
        argv: list[str | Path] = [python, "-m", "lightning_proxy.cli", "--config", config, "serve"]
        found[name] = Program(argv, port, "/readyz", "/rollouts/{run}-{}/v1/chat/completions")
    return found


def load(server: Server, path: str, case: dict[str, Any], seconds: float) -> int:
    """Put load on the server and return the number of its answers; an answer that is wrong ends the program."""
    settings = case | {"port": server.port, "connections": 16, "seconds": seconds, "path": path}
    done = subprocess.run([sys.executable, HERE / "load.py", json.dumps(settings)], stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout)
    if result["failed"]:
        raise SystemExit(f"{path}: {result['example']}")
    server.settle()
    return int(result["answers"])


def idle_rate(read: Callable[[], float]) -> float:
    """What `read`, a counter, gains in a second without calls."""
    before, began = read(), time.monotonic()
    time.sleep(IDLE_S)
    return (read() - before) / (time.monotonic() - began)


def per_answer(read: Callable[[], float], idle: float, work: Callable[[], int]) -> float:
    """What `read`, a counter, gains by an answer of `work`, beside what it would have gained idly."""
    before, began = read(), time.monotonic()
    answers = work()
    return (read() - before - idle * (time.monotonic() - began)) / answers


def instructions(server: Server, directory: Path) -> float:
    """Millions of instructions so far; callgrind counts from its last dump."""
    pid = next(iter(server.pids()))
    subprocess.run(["callgrind_control", "--dump", str(pid)], check=True, capture_output=True)
    dumps = [dump.read_text(errors="replace") for dump in directory.glob("out.*")]
    found = [re.search(r"^(?:totals|summary): (\d+)", dump, re.MULTILINE) for dump in dumps]
    return sum(int(match[1]) for match in found if match) / 1e6


def count(program: Program, directory: Path, seconds: float) -> list[float]:
    """Millions of instructions a call, for each of `CASES`."""
    directory.mkdir()
    valgrind = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={directory}/out", "--quiet")
    with program.started(directory, *valgrind, patience_s=300) as server:

        def one(n: int, case: dict[str, Any]) -> float:
            load(server, program.path.replace("{run}", f"warm{n}"), case, WARM_UP_S)
            path, read = program.path.replace("{run}", f"run{n}"), partial(instructions, server, directory)
            return per_answer(read, idle_rate(read), partial(load, server, path, case, seconds))

        return [one(n, case) for n, case in enumerate(CASES.values())]


def time_in_turns(found: dict[str, Program], directory: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of processor time a call, for each of `CASES`: medians of rounds in which all take their turns."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in CASES] for name in found}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(program.started(directory)) for name, program in found.items()}
        idle = {name: idle_rate(server.cpu_s) for name, server in servers.items()}
        for turn in range(rounds + 1):
            for n, case in enumerate(CASES.values()):
                for name in random.sample([*found], len(found)):
                    server, path = servers[name], found[name].path.replace("{run}", f"turn{turn}-{n}")
                    took = per_answer(server.cpu_s, idle[name], partial(load, server, path, case, seconds))
                    if turn:  # the first warms up
                        times[name][n].append(1000 * took)
    return {name: [median(each) for each in of_cases] for name, of_cases in times.items()}


def table(page: Page, what: str, figures: dict[str, list[float]]) -> None:
    rows = {name: [f"{figure:.3g}" for figure in of_cases] for name, of_cases in figures.items()}
    for other in (name for name in (FLOOR, BEFORE) if name in figures):
        shares = zip(figures[OURS], figures[other], strict=True)
        rows[f"{OURS} / {other}"] = [f"**{ours / theirs:.2f}**" for ours, theirs in shares]
    page.table("", (what, *CASES), ((name, *cells) for name, cells in rows.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load under valgrind")
    parser.add_argument("--rounds", type=int, default=5, help="of processor time, two seconds a load")
    parser.add_argument("--before", metavar="PYTHON", help="interpreter of a checkout to compare with")
    option(parser)
    options = parser.parse_args()
    page = Page("Instructions and processor time of a call")
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed")
    upstream = start_upstream()
    try:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            found = programs(directory, upstream.url, options.before)
            counts = {n: count(p, directory / str(p.port), options.seconds) for n, p in found.items()}
            table(page, "millions of instructions a call", counts)
            table(page, "milliseconds of processor time a call", time_in_turns(found, directory, options.rounds, 2.0))
    finally:
        upstream.stop()
    page.save(options.page)


if __name__ == "__main__":
    main()
