"""Other gateways that record what agents do, each in an environment of its own: `make bench-peers` installs them.

Each is started as its own documentation says, with one worker, on the loopback, its telemetry off, and so that it
records, by the means that it has. One that is not installed, or does not start, is left out of the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servers import Server, Unavailable, free_port
from targets import ENVIRONMENTS, Target

ROLLOUTS = 256


@dataclass(frozen=True)
class Package:
    """What gets an environment of its own. `python`: the lowest version that it runs on."""

    name: str
    distribution: str
    version: str
    python: tuple[int, int] = (3, 11)

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def installed(self) -> bool:
        return (self.environment / "installed").exists()


@dataclass(frozen=True)
class Peer(Package):
    """`start`: from itself, a directory for its files and the upstream's URL; Unavailable if it does not start."""

    start: Callable[[Peer, Path, str], Target] = field(kw_only=True)

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"

    def program(self, name: str) -> Path:
        if not self.installed:
            raise Unavailable("not installed (make bench-peers)")
        return self.environment / "bin" / name


def agent_lightning(peer: Peer, directory: Path, url: str) -> Target:
    """Its gateway: keeps what it records in memory only, answers no streams, knows only rollouts made beforehand."""
    port = free_port()
    argv = ["host=127.0.0.1", f"port={port}", "default_proxy.model_name=base", f"hydra.run.dir={directory}/hydra"]
    server = Server([peer.program("agl-server"), *argv], port, ready="/healthz", log=directory / "agl.log")

    def renew_rollouts() -> None:
        for i in range(ROLLOUTS):
            server.send("DELETE", f"/api/rollouts/b{i}")
        server.send("POST", "/api/rollouts", [{"rollout_id": f"b{i}", "input": ""} for i in range(ROLLOUTS)])

    server.send("POST", "/api/models", [{"model": "base", "endpoint": f"{url}/v1"}])
    renew_rollouts()
    return Target(
        peer.title,
        server,
        path="/proxy/rollout/b{}/attempt/0/mode/train/openai/v1/chat/completions",
        ids=ROLLOUTS,
        streams=False,
        is_peer=True,
        recorded=lambda: len(server.send("GET", "/api/rollouts/b0/events")),
        clean=renew_rollouts,
    )


def rllm(peer: Peer, directory: Path, url: str) -> Target:
    """Its gateway with its SQLite store, written after the answer, as is its default."""
    port = free_port()
    argv = ["--host", "127.0.0.1", "--port", str(port), "--worker", f"{url}/v1", "--db-path", f"{directory}/rllm.db"]
    argv += ["--log-level", "WARNING"]
    server = Server([peer.program("rllm-model-gateway"), *argv], port, ready="/health", log=directory / "rllm.log")
    return Target(
        peer.title,
        server,
        path="/sessions/{run}-{}/v1/chat/completions",
        is_peer=True,
        recorded=lambda: len(server.send("GET", "/sessions/check-0/traces")),
    )


def litellm(peer: Peer, directory: Path, url: str) -> Target:
    """Its proxy without a database: it records nothing, which is generous to it."""
    port, config, key = free_port(), directory / "litellm.yaml", f"sk-{secrets.token_hex(24)}"
    model = {"model": "openai/base", "api_base": f"{url}/v1", "api_key": "none"}
    config.write_text(json.dumps({"model_list": [{"model_name": "base", "litellm_params": model}]}))
    argv = ["--config", config, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    argv += ["--telemetry", "False"]
    env = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    log = directory / "litellm.log"
    server = Server([peer.program("litellm"), *argv], port, ready="/health/liveliness", env=env, log=log)
    return Target(peer.title, server, key=key, is_peer=True)


PEERS = (
    Peer("agent-lightning", "agentlightning", "1.0.2", (3, 12), start=agent_lightning),
    Peer("rllm-model-gateway", "rllm-model-gateway", "0.1.0", start=rllm),
    Peer("litellm", "litellm[proxy]", "1.106.2", start=litellm),
)


def install(package: Package) -> str:
    """What was done."""
    python, requirement = find_python(package.python), f"{package.distribution}=={package.version}"
    if python is None:
        return f"left out: it needs Python {'.'.join(map(str, package.python))}, and none was found"
    if not package.installed:
        subprocess.run([python, "-m", "venv", "--clear", package.environment], check=True)
        pip = [package.environment / "bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        if subprocess.run([*pip, requirement], check=False).returncode:
            return f"left out: pip could not install {requirement}"
        (package.environment / "installed").touch()
    return f"{requirement} is installed"


def find_python(lowest: tuple[int, int]) -> str | None:
    """Our own Python if it is new enough, or one on PATH or from pyenv."""
    if sys.version_info[:2] >= lowest:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = [shutil.which(f"python3.{minor}") for minor in range(lowest[1], lowest[1] + 3)]
    test = f"import sys, venv; sys.exit(sys.version_info[:2] < {lowest})"
    for found in [*filter(None, on_path), *map(str, sorted(pyenv.glob("3.*/bin/python")))]:
        if subprocess.run([found, "-c", test], capture_output=True, check=False).returncode == 0:
            return found
    return None


def chosen(argv: Sequence[str]) -> list[Package]:
    """The packages that the command line names, or all; SystemExit for an unknown one."""
    packages = {package.name: package for package in PEERS}
    parser = argparse.ArgumentParser(description="Install what is named, or all of it.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(packages))
    names = parser.parse_args(argv).names or list(packages)
    if unknown := sorted(set(names) - packages.keys()):
        parser.error(f"unknown: {', '.join(unknown)} (known: {', '.join(packages)})")
    return [packages[name] for name in names]


def main() -> None:
    for package in chosen(sys.argv[1:]):
        began = time.monotonic()
        print(f"{package.name}: ", end="", flush=True)
        print(f"{install(package)} ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
