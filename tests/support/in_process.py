"""A whole proxy in this process, under a real uvicorn."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
import yaml
from starlette.types import ASGIApp

from contract.system import CLI, free_port, wait_until
from lightning_proxy.commands.serve import uvicorn_options
from lightning_proxy.core.config.root import Config
from lightning_proxy.proxy.app import create_app
from support.responses_twice import get


@contextmanager
def own_vllm(directory: Path, model: Path, template: str, *options: str) -> Iterator[str]:
    """Yields its base URL. It parses tools as hermes does, and is asked for the model by its directory's name."""
    port, file, config = free_port(), directory / "template.jinja", directory / "config.yaml"
    file.write_text(template.strip())
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(file)]
    settings = {
        "upstreams": [{"name": "policy", "kind": "vllm", "base_url": f"http://127.0.0.1:{port}/v1"}],
        "policy": {"model": str(model), "publish": "merged"},
        "vllm": {"port": port, "max_model_len": 1024, "kv_cache_gib": 1, "extra_args": [*tools, *options]},
    }
    config.write_text(yaml.safe_dump(settings))
    with (directory / "vllm.log").open("wb") as log:
        server = subprocess.Popen([*CLI, "--config", str(config), "vllm"], stdout=log, stderr=log, cwd=directory)
    try:
        wait_until(lambda: server.poll() is not None or get(f"http://127.0.0.1:{port}/v1/models"), 480, "vLLM is there")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


@asynccontextmanager
async def proxy_of(config: Config, wrapped: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> AsyncIterator[str]:
    """Yields its root URL. `wrapped` is given its app, and what it returns is run."""
    options = uvicorn_options(config.proxy) | {"port": 0, "log_level": "warning"}
    server = uvicorn.Server(uvicorn.Config(wrapped(create_app(config)), **options))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
