"""How many instructions a call costs: `make bench-instructions`. Needs valgrind.

Seconds depend on what else the machine does; the number of instructions hardly does. The proxy, and a bare forwarder
beside it, run under valgrind's callgrind; after a warm-up, the instructions of a load of calls are counted and divided
by its answers. Everything that the process does is counted, what follows an answer too. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from results_page import Page, option
from servers import Server, free_port
from targets import HERE, start_upstream

# Each with what load.py is told. Ten turns: an agent's conversation grows from 32 to 68 KB, in one rollout.
CASES = {
    "JSON, 1 KB": {"prompt": 1_000, "options": {"stream": False}},
    "JSON, 50 KB": {"prompt": 50_000, "options": {"stream": False}},
    "JSON, 50 KB, ten turns": {"prompt": 50_000, "options": {"stream": False}, "turns": 10},
    "40 chunks, 1 KB": {"prompt": 1_000, "options": {"stream": True}},
}
WARM_UP_S = 8.0


@contextmanager
def counted(argv: list[str | Path], port: int, directory: Path, ready: str) -> Iterator[Server]:
    """The program under callgrind, until the block is left."""
    valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={directory}/out", "--quiet"]
    server = Server([*valgrind, *argv], port, ready=ready, log=directory / "log", patience_s=300)
    try:
        yield server
    finally:
        server.stop()


def load(server: Server, path: str, case: dict[str, Any], seconds: float) -> int:
    """Put load on the server and return the number of its answers; an answer that is wrong ends the program."""
    settings = case | {"port": server.port, "connections": 16, "seconds": seconds, "path": path}
    done = subprocess.run([sys.executable, HERE / "load.py", json.dumps(settings)], stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout)
    if result["failed"]:
        raise SystemExit(f"{path}: {result['example']}")
    return int(result["answers"])


def instructions(server: Server, directory: Path) -> int:
    """Instructions since the last call of this function."""
    pid = next(iter(server.pids()))
    before = set(directory.glob("out.*"))
    subprocess.run(["callgrind_control", "--dump", str(pid)], check=True, capture_output=True)
    counts = [
        int(match[1])
        for dump in set(directory.glob("out.*")) - before
        if (match := re.search(r"^(?:totals|summary): (\d+)", dump.read_text(errors="replace"), re.MULTILINE))
    ]
    return sum(counts)


def measure(server: Server, path: str, directory: Path, seconds: float) -> list[float]:
    """Millions of instructions a call, for each of `CASES`."""
    figures = []
    for n, case in enumerate(CASES.values()):
        load(server, path.replace("{run}", f"warm{n}"), case, WARM_UP_S)
        server.settle()
        instructions(server, directory)
        answers = load(server, path.replace("{run}", f"run{n}"), case, seconds)
        server.settle()
        figures.append(instructions(server, directory) / answers / 1e6)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    option(parser, "instructions")
    options = parser.parse_args()
    seconds, page = options.seconds, Page("Instructions of a call")
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed")
    upstream = start_upstream()
    try:
        with tempfile.TemporaryDirectory() as name:
            rows = {}
            directory = Path(name) / "forwarder"
            directory.mkdir()
            port = free_port()
            forwarder = [sys.executable, HERE / "forwarder.py", str(port), upstream.url]
            with counted(forwarder, port, directory, "/v1/models") as server:
                rows["bare forwarder"] = measure(server, "/v1/chat/completions", directory, seconds)
            directory = Path(name) / "proxy"
            directory.mkdir()
            port, config = free_port(), directory / "config.yaml"
            settings = {
                "proxy": {"port": port},
                "store": {"url": f"sqlite:///{directory}/store.db"},
                "upstreams": [{"name": "policy", "base_url": f"{upstream.url}/v1", "connect_timeout_s": 60}],
                "policy": {"publish": "merged", "directory": f"{directory}/policy"},
            }
            config.write_text(json.dumps(settings))
            proxy = [sys.executable, "-m", "lightning_proxy.cli", "--config", config, "serve"]
            with counted(proxy, port, directory, "/readyz") as server:
                rows["lightning-proxy"] = measure(server, "/rollouts/{run}-{}/v1/chat/completions", directory, seconds)
    finally:
        upstream.stop()
    rows["ratio"] = [a / b for a, b in zip(rows["lightning-proxy"], rows["bare forwarder"], strict=True)]
    page.table(
        "",
        ("millions of instructions a call", *CASES),
        ((name, *(f"{figure:.2f}" for figure in figures)) for name, figures in rows.items()),
    )
    page.save(options.page)


if __name__ == "__main__":
    main()
