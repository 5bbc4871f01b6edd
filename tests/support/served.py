"""`serve` as a process with an upstream and a client that remembers its answers; a proxy in this process; a vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
import yaml
from starlette.types import ASGIApp

from contract.system import CLI, Process, free_port, listening, wait_until, write_config
from contract.vllm import PlayedVllm
from lightning_proxy.commands.serve import uvicorn_options
from lightning_proxy.core.config.root import Config
from lightning_proxy.proxy.app import create_app
from lightning_proxy.serving.swap import swap_lock
from lightning_proxy.store.store import Store
from support.twice import get


class Proxy:
    """`lightning-proxy serve` on a store of its own, started and killed at will."""

    def __init__(self, directory: Path, upstream: str, program: Sequence[str | Path]) -> None:
        self.program, self.port = program, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.store, self.config = directory / "store.db", directory / "config.yaml"
        store = {"url": f"sqlite:///{self.store}", "busy_timeout_s": 0.5}
        write_config(directory, f"{upstream}/v1", self.port, store=store, policy={"publish": "lora"})
        self.process: Any = None

    def set(self, section: str, **keys: Any) -> None:
        """Change the configuration for the next start."""
        settings = yaml.safe_load(self.config.read_text())
        settings[section] = settings.get(section, {}) | keys
        self.config.write_text(yaml.safe_dump(settings))

    async def start(self, limits: Callable[[], None] | None = None) -> None:
        argv = (*self.program, "--config", self.config, "serve")
        self.process = await asyncio.create_subprocess_exec(*argv, preexec_fn=limits)
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(get, self.url + "/healthz"):
                await asyncio.sleep(0.1)

    async def end(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
        await self.process.wait()

    def rows(self, sql: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.store)) as db:
            return db.execute(sql).fetchall()


def workers(proxy: Proxy) -> set[int]:
    """The processes that serve, or will; multiprocessing's own helper is not one of them."""
    found = set()
    for pid in Path(f"/proc/{proxy.process.pid}/task/{proxy.process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # one that has just ended
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
    return found


async def settled(proxy: Proxy, count: int, without: Iterable[int] = ()) -> set[int]:
    """Wait until `count` workers answer, none of them in `without`. Under load one takes long to start."""
    for _ in range(900):
        found = workers(proxy)
        if len(found) == count and found.isdisjoint(without) and all(map(serves, found)):
            return found
        await asyncio.sleep(0.1)
    pytest.fail(f"no {count} workers")


def serves(pid: int) -> bool:
    """Whether a worker has opened the store."""
    with contextlib.suppress(OSError):
        return any(fd.readlink().name == "store.db" for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


@asynccontextmanager
async def proxy_in_front(directory: Path, program: Sequence[str | Path] = CLI) -> AsyncIterator[Proxy]:
    vllm = PlayedVllm(directory)
    vllm.answer = lambda _: {"role": "assistant", "content": "x"}
    async with listening(vllm.app) as url:
        proxy = Proxy(directory, url, program)
        try:
            yield proxy
        finally:
            await proxy.end(signal.SIGKILL)


class Client:
    """An agent that remembers which answers it received whole."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.calls: set[str] = set()
        self.statuses: set[int] = set()

    async def turn(self, session: aiohttp.ClientSession, rollout_id: str, *, stream: bool) -> None:
        body = {"model": "policy", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
        url = f"{self._proxy.url}/rollouts/{rollout_id}/v1/chat/completions"
        async with session.post(url, json=body) as answer:
            data = await answer.read()
            self.statuses.add(answer.status)
            if answer.status != 200:
                return
            assert not stream or data.endswith(b"data: [DONE]\n\n")
            self.calls.add(answer.headers["X-Call-Id"])
        async with session.post(self._proxy.url + "/reward", json={"rollout_id": rollout_id, "reward": 1}):
            pass


@contextmanager
def own_vllm(directory: Path, model: Path, template: str, *options: str) -> Iterator[str]:
    """Yields its base URL. It parses tools as hermes does, and is asked for the model by its directory's name."""
    port, file = free_port(), directory / "template.jinja"
    file.write_text(template.strip())
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(file)]
    settings = {
        "upstreams": [{"name": "policy", "kind": "vllm", "base_url": f"http://127.0.0.1:{port}/v1"}],
        "policy": {"model": str(model), "publish": "merged"},
        "vllm": {"port": port, "max_model_len": 1024, "kv_cache_gib": 1, "extra_args": [*tools, *options]},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    server, url = Process(directory, "vllm"), f"http://127.0.0.1:{port}/v1"
    server.start()
    try:
        wait_until(lambda: not server.running or get(f"{url}/models"), 480, "vLLM is there")
        yield url
    finally:
        server.end(signal.SIGINT)


@asynccontextmanager
async def proxy_of(config: Config, wrapped: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> AsyncIterator[str]:
    """Yields its root URL. `wrapped` is given its app, and what it returns is run."""
    server = uvicorn.Server(uvicorn.Config(wrapped(create_app(config)), **uvicorn_options(config.proxy) | {"port": 0}))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def saved_version(store: Store, publish: Any, directory: Path, adapters: Sequence[str] = ()) -> int:
    """A version with its files, which is not live yet."""
    version = await store.versions.new(publish, 1, {})
    path, served = directory / f"v{version}", f"policy-v{version}"
    for part in (path, *(path / name for name in adapters)):
        part.mkdir()
    await store.versions.saved(version, str(path), served, {name: f"{served}.{name}" for name in adapters})
    return version


async def earlier_version(config: Config, store: Store, directory: Path, adapters: Sequence[str] = ()) -> int:
    """A version that was live once. A proxy's watch must not see it live: no server was ever given its weights."""
    version = await saved_version(store, config.policy.publish, directory, adapters)
    async with swap_lock(Path(config.policy.directory)):
        await store.versions.set_live(version, 1)
        await store.versions.set_live(0)
    return version
