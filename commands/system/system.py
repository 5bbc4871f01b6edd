"""Starts and stops vLLM, proxy and trainer in order, as one unit."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...core.config.root import Config
from ...core.errors import ConfigError
from ...proxy.plugins import check_plugins
from ...store.keys import require_keys
from ..formats import address
from ..vllm import VLLM_HOST, other_port, vllm_program
from .processes import ChildSpec, Supervisor, require_free_port

# How often each part is restarted when it dies; it resumes where it was.
RESTARTS = 8
PROXY_START_S = 60.0
VLLM_START_S = 7200.0  # it may download a large model first
AFTERWARDS_S = 10.0  # that the proxy may take to end after the last answer


@dataclass(frozen=True, slots=True)
class Launch:
    """What child processes are started with: the configuration file, the overriding options, further `variables`."""

    path: Path | None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def argv(self, *command: str) -> list[str]:
        config = ["--config", str(self.path)] if self.path is not None else []
        return [sys.executable, "-m", "lightning_proxy.cli", *config, *command]

    def env(self) -> dict[str, str]:
        given = {key: value for key, value in self.overrides.items() if value is not None}
        options = {f"LIGHTNING_{key.upper().replace('.', '__')}": json.dumps(value) for key, value in given.items()}
        return {**options, **self.variables}


@asynccontextmanager
async def running_system(
    config: Config,
    launch: Launch,
    logs: Path,
    say: Callable[[str], None],
    *,
    trains: bool,
) -> AsyncIterator[Supervisor]:
    """Run vLLM, the proxy and, if `trains`, the trainer. Yield their supervisor once vLLM and the proxy are ready.

    Agents are served even while the trainer keeps dying, unless its configuration is wrong.
    """
    await require_keys(config)
    await check_plugins(config)
    check_addresses(config)
    vllm_program(config)  # what it refuses is one line, before anything starts
    env, steps = launch.env(), config.trainer.max_steps
    vllm = ChildSpec(
        "vllm",
        launch.argv("vllm"),
        env,
        f"http://{VLLM_HOST}:{config.vllm.port}/health",
        VLLM_START_S,
        restarts=RESTARTS,
    )
    proxy = ChildSpec(
        "proxy",
        launch.argv("serve"),
        env,
        f"http://{address(config.proxy.host, config.proxy.port)}/readyz",
        PROXY_START_S,
        restarts=RESTARTS,
        grace_s=config.proxy.stop_timeout_s + AFTERWARDS_S,
    )
    done = None if steps is None else f"trainer.max_steps ({steps}) is reached; agents are still served"
    trainer = ChildSpec(
        "trainer", launch.argv("train"), env, may_end=True, restarts=RESTARTS, vital=False, done=done
    )  # fmt: skip
    async with Supervisor(logs, say) as supervisor:
        for spec in (vllm, proxy):
            await supervisor.wait_healthy(await supervisor.start(spec))
        if trains:
            await supervisor.start(trainer)
        yield supervisor


def check_addresses(config: Config) -> None:
    """Raise LightningError unless the ports are free and the first vLLM upstream is at vllm.port."""
    upstream = config.policy_upstream
    if upstream is None or urlsplit(upstream.urls[0]).port != config.vllm.port:
        wrong = f"upstreams: the first of kind vllm must be at port {config.vllm.port}, as vllm.port says"
        raise ConfigError(other_port(config) or wrong)
    require_free_port(config.proxy.host, config.proxy.port, "proxy.port")
    require_free_port(VLLM_HOST, config.vllm.port, "vllm.port")
