"""What is measured: the model server, the floor, and the proxy in all the ways that it can be served."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from servers import Server, free_port

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".venv-peers"
COMMITTING = "forwarder that commits"


@dataclass(frozen=True)
class Target:
    """A server that answers chat completions.

    `path`: `{run}` is a name that no other run has, `{}` the number of the call, around the first `ids` of them.
    `recorded`: how many calls it has recorded of the run `check`, number 0. `clean`: called between two runs.
    """

    name: str
    server: Server
    path: str = "/v1/chat/completions"
    ids: int | None = None
    key: str = "sk-bench"
    streams: bool = True
    is_peer: bool = False
    recorded: Callable[[], int] | None = None
    clean: Callable[[], None] = lambda: None


def start_upstream() -> Server:
    port = free_port()
    return Server([sys.executable, HERE / "upstream.py", str(port)], port)


def start_forwarder(url: str, *journal: Path) -> Server:
    """`journal`: where it commits what it forwards, if it does."""
    port = free_port()
    return Server([sys.executable, HERE / "forwarder.py", str(port), url, *journal], port)


def committing(url: str, journal: Path) -> Target:
    """The forwarder that commits requests and answers, and does nothing else with them."""

    def recorded() -> int:  # different requests: it knows no runs
        with closing(sqlite3.connect(journal)) as db:
            found = db.execute("SELECT count(DISTINCT body) FROM bodies WHERE instr(body, '\"messages\"') > 0")
            return int(found.fetchone()[0])

    return Target(COMMITTING, start_forwarder(url, journal), recorded=recorded)


def start_proxy(
    directory: Path,
    url: str,
    *,
    workers: int = 1,
    script: Path | None = None,
    env: Mapping[str, str] | None = None,
    store: str | None = None,
) -> Server:
    """The proxy in front of `url`, with a store of its own in `directory`; `script`: serves it in place of `serve`."""
    directory.mkdir(exist_ok=True)
    port, config = free_port(), directory / "config.yaml"
    settings = {
        "proxy": {"port": port, "workers": workers},
        "store": {"url": store or f"sqlite:///{directory}/store.db"},
        "upstreams": [{"name": "policy", "base_url": f"{url}/v1"}],
        "policy": {"publish": "merged", "directory": f"{directory}/policy"},
    }
    config.write_text(json.dumps(settings))
    argv = [script, config] if script else ["-m", "lightning_proxy.cli", "--config", config, "serve"]
    return Server([sys.executable, *argv], port, ready="/readyz", env=env, log=directory / "log")


def ours(name: str, server: Server) -> Target:
    return Target(
        name,
        server,
        path="/rollouts/{run}-{}/v1/chat/completions",
        recorded=lambda: len(server.send("GET", "/rollouts/check-0")["calls"]),
    )
