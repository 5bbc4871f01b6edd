"""Starts the product for the tests of this folder, and is the only file here that imports it.

`in_this_process`: the app behind a real server, in a thread (0.3 s to start). `served`: `serve` as a process, to be
killed and started again. Everything else goes through HTTP, the command line, files and environment variables.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn
import yaml
from aiohttp import web

from contract.raw import Upstream
from contract.vllm import PlayedVllm
from lightning_proxy.cli import app
from lightning_proxy.commands.serve import uvicorn_options
from lightning_proxy.core.config.file import load_config
from lightning_proxy.proxy.app import create_app
from support.command_line import Done as Done
from support.command_line import lightning as lightning
from support.stores import store_url

Json = dict[str, Any]
CLI = [sys.executable, "-m", "lightning_proxy.cli"]
PRELOADED = ["contract.system", "contract.model", "lightning_proxy.commands.train", "lightning_proxy.trainer.train"]
CHANGES = {"open", "os.rename", "os.remove", "shutil.rmtree"}  # audit events


@dataclass(frozen=True)
class Answer:
    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"null")

    @property
    def error(self) -> Any:
        return self.json["error"]


def ok(done: Done) -> Done:
    assert done.returncode == 0, done
    return done


def client() -> httpx.Client:
    return httpx.Client(timeout=60, trust_env=False)


@dataclass
class Proxy:
    """A proxy at a URL. `directory` has its configuration, store and policy; `vllm` is the played server behind it."""

    url: str
    directory: Path
    vllm: Any = None
    client: httpx.Client = field(default_factory=client)

    @property
    def config(self) -> Path:
        return self.directory / "config.yaml"

    def call(self, method: str, path: str, body: Any = None, key: str | None = None, **headers: str) -> Answer:
        """Send a request. `body`: bytes, or what becomes JSON; `headers`: with `_` for `-`."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            names = {"Content-Type": "application/json"} | names
        if key is not None:
            names["Authorization"] = f"Bearer {key}"
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        got = self.client.request(method, self.url + path, content=content, headers=names)
        return Answer(got.status_code, got.headers, got.content)

    def get(self, path: str, key: str | None = None) -> Any:
        """Return the JSON of a route that must answer with 200."""
        answer = self.call("GET", path, key=key)
        assert answer.status == 200, answer.body
        return answer.json

    def post(self, path: str, body: Any = None, key: str | None = None, **headers: str) -> Answer:
        return self.call("POST", path, body, key, **headers)

    def chat(self, rollout: str | None, *messages: Json, key: str | None = None, **fields: Any) -> Answer:
        """Ask the policy in a named rollout; without messages, "hi"."""
        body = {"model": "policy", "messages": list(messages) or [{"role": "user", "content": "hi"}], **fields}
        prefix = "" if rollout is None else f"/rollouts/{rollout}"
        return self.post(f"{prefix}/v1/chat/completions", body, key)

    def reward(self, rollout: str, value: float, key: str | None = None, **more: Any) -> None:
        answer = self.post("/reward", {"rollout_id": rollout, "reward": value, **more}, key)
        assert answer.status == 200, answer.body

    def rollout(self, rollout: str, key: str | None = None) -> Any:
        return self.get(f"/rollouts/{rollout}?requests=whole", key)

    def new_key(self, name: str, *options: str) -> str:
        """Make a key with the command line; the proxy knows it within a second."""
        key = ok(self.run("keys", "create", name, *options)).stdout.strip()
        wait_until(lambda: self.call("GET", "/rollouts").status == 401, 30, "a key is needed")
        wait_until(lambda: self.call("GET", "/rollouts", key=key).status == 200, 30, "the key is known")
        return key

    def run(self, *arguments: str | Path) -> Done:
        """Run a command of the command line with this proxy's configuration, in its directory, in this process."""
        return lightning("--config", self.config, *arguments, cwd=self.directory)

    def process(self, *arguments: str | Path) -> Done:
        """Run a command as `run` does, in a process of its own: seconds, for its imports."""
        argv = [*CLI, "--config", self.config, *arguments]
        done = subprocess.run(argv, cwd=self.directory, timeout=240, capture_output=True, text=True)
        return Done(done.returncode, done.stdout, done.stderr)


def write_config(directory: Path, upstream: str, port: int, **sections: Any) -> None:
    """Write a configuration with one vLLM as the policy's server. `sections` replace keys of its sections."""
    defaults: Json = {
        "proxy": {"port": port},
        "store": {"url": store_url(directory)},
        "upstreams": [{"name": "policy", "kind": "vllm", "base_url": upstream}],
        "policy": {"publish": "merged", "directory": str(directory / "policy")},
    }
    if "upstreams" in sections:  # without an address: the played server's
        sections["upstreams"] = [{"base_url": upstream} | one for one in sections["upstreams"]]
    for name, section in sections.items():
        defaults[name] = {**defaults.get(name, {}), **section} if isinstance(section, dict) else section
    (directory / "config.yaml").write_text(yaml.safe_dump(defaults))


def configuration(directory: Path) -> Any:
    """Return what the file in a directory, if it is there, and the environment set; all other keys with defaults."""
    file = directory / "config.yaml"
    return load_config(file if file.exists() else None).model_dump(mode="json")


@contextmanager
def in_a_thread(server: Any) -> Iterator[str]:
    """Let a server, an asynchronous context, run in a thread of its own; yields its root URL."""
    started, ended, url = threading.Event(), threading.Event(), ""

    async def run() -> None:
        nonlocal url
        async with server as url:
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    try:
        while not started.wait(0.1):
            assert thread.is_alive(), "it did not start"
        yield url
    finally:
        ended.set()
        thread.join(60)


@asynccontextmanager
async def running(app: Any, **options: Any) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, **options))
    task = asyncio.create_task(server.serve())
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.config.port}"
    server.should_exit = True
    await task


@asynccontextmanager
async def _proxy(directory: Path, vllm: PlayedVllm, sections: Json) -> AsyncIterator[str]:
    async with listening(vllm.app) as upstream:
        write_config(directory, f"{upstream}/v1", free_port(), **sections)
        config = load_config(directory / "config.yaml")
        async with running(create_app(config), **uvicorn_options(config.proxy)) as url:
            yield url


@contextmanager
def in_this_process(directory: Path, vllm: PlayedVllm | None = None, **sections: Any) -> Iterator[Proxy]:
    """Run the app behind a real server, and the played vLLM, in a thread."""
    vllm = vllm or PlayedVllm(directory)
    with in_a_thread(_proxy(directory, vllm, sections)) as url, client() as own:
        yield Proxy(url, directory, vllm, own)


def played(server: PlayedVllm | Upstream, port: int = 0) -> Any:
    """Serve a played upstream in a thread, at any free port unless one is given; yields its root URL."""
    return in_a_thread(listening(server.app, port))


class Process:
    """`lightning-proxy COMMAND` in a directory with a configuration, in a session of its own."""

    def __init__(self, directory: Path, command: str, *options: str, program: Sequence[str] = CLI) -> None:
        self.directory, self.argv = directory, [*program, "--config", str(directory / "config.yaml"), command, *options]
        self.log = directory / f"{command}.log"
        self.process: Any = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            where: Any = {"stdout": log, "stderr": log, "cwd": self.directory, "start_new_session": True}
            self.process = subprocess.Popen(self.argv, **where)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        """Send it a signal, and return its exit code. SIGKILL ends all that it started, too."""
        with suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        return self.process.wait(seconds)


class Forked:
    """A command forked from a process that has imported all; it kills itself before its nth change of `policy/`."""

    _forks = multiprocessing.get_context("forkserver")

    def __init__(self, proxy: Proxy, *arguments: str, killed_at: int = 0) -> None:
        self.log = proxy.directory / "forked.log"
        self.log.write_bytes(b"")
        self._forks.set_forkserver_preload(PRELOADED)
        argv = ["--config", str(proxy.config), *arguments]
        self._process = self._forks.Process(target=_forked, args=(proxy.directory, argv, killed_at), daemon=True)
        with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
            self._process.start()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)  # type: ignore[arg-type]

    def wait(self) -> Done:
        """Its end; of a killed one, -9. All that it said is in `stderr`."""
        self._process.join(120)
        code, said = self._process.exitcode, self.log.read_text()
        if code is None:
            self.signal(signal.SIGKILL)
        assert code is not None, f"it does not end: {said}"
        return Done(code, "", said)


def _forked(directory: Path, argv: list[str], killed_at: int) -> None:
    with (directory / "forked.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    watched, changes = str(directory / "policy"), itertools.count(1)

    def look(event: str, given: tuple[Any, ...]) -> None:
        if event not in CHANGES or not str(given[0]).startswith(watched) or (event == "open" and given[1] == "r"):
            return
        if next(changes) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    os.chdir(directory)
    app(argv, prog_name="lightning-proxy")


@dataclass
class Served(Proxy):
    """`lightning-proxy serve` as a process, which can be killed and started again."""

    server: Process = None  # type: ignore[assignment]

    def start(self) -> None:
        self.server.start()
        self.wait_for("/healthz", 60)

    def wait_for(self, path: str, seconds: float) -> None:
        def answers() -> bool:
            assert self.server.running, self.server.log.read_text()
            with suppress(httpx.HTTPError):
                return self.client.get(self.url + path).status_code == 200
            return False

        wait_until(answers, seconds, f"{path} answers")


@contextmanager
def served(
    directory: Path, vllm: PlayedVllm | None = None, program: Sequence[str] = CLI, **sections: Any
) -> Iterator[Served]:
    vllm = vllm or PlayedVllm(directory)
    with played(vllm) as upstream:
        port = free_port()
        write_config(directory, f"{upstream}/v1", port, **sections)
        server = Process(directory, "serve", program=program)
        proxy = Served(f"http://127.0.0.1:{port}", directory, vllm, server=server)
        try:
            proxy.start()
            yield proxy
        finally:
            proxy.client.close()
            proxy.server.end(signal.SIGKILL)


@asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve an app on this machine, at any free port unless one is given; yields its root URL."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def free_port() -> int:
    """Return a port below the range that the system gives out by itself: no other test can get it meanwhile."""
    while True:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(listener.getsockname()[1])


def wait_until(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)
