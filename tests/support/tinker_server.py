"""A real server with the Tinker API on the CPU: skyrl-tx, which `make tinker` brings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from contract.system import free_port, wait_until
from support.paths import ROOT

ENVIRONMENT = ROOT / ".venv-tinker"
CLIENT = ENVIRONMENT / "client"  # of the server's time
INSTALLED = ENVIRONMENT / ".set-up"
PYTHON = ENVIRONMENT / "bin/python"
# The server starts its engine by `uv run EXTRAS -m ENGINE`, which would make an environment anew.
UV = f"""#!/bin/sh
while [ "$1" != "-m" ]; do shift; done
exec {PYTHON} "$@"
"""
ENGINE = {"max_lora_adapters": 4, "max_lora_rank": 8, "train_micro_batch_size": 4}


def as_it_reads(model: Path, directory: Path) -> Path:
    """Copy a model so that transformers 4, which the server has, reads it as transformers 5 does."""
    shutil.copytree(model, directory)
    for name, change in (("config.json", _with_theta), ("tokenizer_config.json", _with_class)):
        file = directory / name
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return directory


def _with_theta(config: dict[str, object]) -> dict[str, object]:
    parameters = config["rope_parameters"]
    assert isinstance(parameters, dict)
    return config | {"rope_theta": parameters["rope_theta"]}


def _with_class(config: dict[str, object]) -> dict[str, object]:
    return config | {"tokenizer_class": "PreTrainedTokenizerFast"}


@contextmanager
def tinker_server(model: Path, directory: Path) -> Iterator[str]:
    """Yields its URL."""
    port, shim = free_port(), directory / "bin/uv"
    shim.parent.mkdir()
    shim.write_text(UV)
    shim.chmod(0o755)
    environment = os.environ | {"PATH": f"{shim.parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    options = {
        "host": "127.0.0.1", "port": str(port), "base-model": str(as_it_reads(model, directory / "model")),
        "backend-config": json.dumps(ENGINE), "checkpoints-base": str(directory / "checkpoints"),
        "database-url": f"sqlite:///{directory / 'tinker.db'}",
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [PYTHON, "-m", "tx.tinker.api", *arguments], stdout=log, stderr=log, cwd=directory, env=environment
        )
    try:
        wait_until(lambda: server.poll() is not None or _answers(port), 300, "the server is there")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def _answers(port: int) -> bool:
    with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
        return bool(answer.status == 200)
    return False
