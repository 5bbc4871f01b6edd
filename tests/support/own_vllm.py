"""A vLLM of a test's own, started as `lightning-proxy vllm` starts it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from contract.system import CLI, free_port, wait_until
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
