"""The system as one unit: vLLM, proxy and trainer, started and stopped in order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ...core.config.root import Config
from ...core.errors import ConfigError
from ...proxy.plugins import check_plugins
from ...store.keys import require_keys
from ..formats import address
from ..vllm import other_port, vllm_program
from .processes import Child, ChildSpec, Supervisor, require_free_port

T = TypeVar("T")
# How often each part is started again when it dies; it resumes where it was.
RESTARTS = 3
AFTERWARDS_S = 10.0  # that the proxy may take to end after the last answer
# What vLLM says when the trainer has the memory just now: at its peak, or on the way down.
NO_MEMORY = (
    r"Free memory on device .* is less than|No available memory for the cache blocks"
    r"|larger than the available KV cache memory|OutOfMemoryError|CUDA out of memory"
)

DOWNLOAD_DIR = "--download-dir"


@dataclass(frozen=True, slots=True)
class Launch:
    """Hands our configuration on to the children: the file, and the options that override it."""

    path: Path | None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def argv(self, *command: str) -> list[str]:
        config = ["--config", str(self.path)] if self.path is not None else []
        return [sys.executable, "-m", "lightning_proxy.cli", *config, *command]

    def env(self) -> dict[str, str]:
        given = {key: value for key, value in self.overrides.items() if value is not None}
        return {f"LIGHTNING_{key.upper().replace('.', '__')}": json.dumps(value) for key, value in given.items()}


class System:
    """`async with System(…) as system:` has vLLM and proxy ready, and the trainer started.

    With `needs_trainer` False, agents are still served while the trainer keeps dying.
    """

    def __init__(
        self,
        config: Config,
        launch: Launch,
        logs: Path,
        say: Callable[[str], None],
        *,
        needs_trainer: bool = True,
        serve_options: Sequence[str] = (),
    ) -> None:
        self._config, self._launch, self._needs_trainer = config, launch, needs_trainer
        self._serve_options = serve_options
        self._supervisor = Supervisor(logs, say)
        self._stack = AsyncExitStack()
        self.trainer: Child | None = None

    async def __aenter__(self) -> System:
        await require_keys(self._config)
        await check_plugins(self._config)
        check_addresses(self._config)
        program = vllm_program(self._config)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._supervisor)
            settings, model = self._config.vllm, str(self._config.policy.model)
            vllm = ChildSpec(
                "vllm", program.argv, program.env, f"http://{address(settings.host, settings.port)}/health",
                settings.start_timeout_s, restarts=RESTARTS, shortage=NO_MEMORY,
                progress=partial(downloaded, model, settings.extra_args),
            )  # fmt: skip
            proxy_url = f"http://{address(self._config.proxy.host, self._config.proxy.port)}/readyz"
            serve = ChildSpec(
                "proxy",
                self._launch.argv("serve", *self._serve_options),
                self._launch.env(),
                proxy_url,
                60,
                restarts=RESTARTS,
                grace_s=self._config.proxy.stop_timeout_s + AFTERWARDS_S,
            )
            for spec in (vllm, serve):
                await self._supervisor.wait_healthy(await self._supervisor.start(spec))
            steps, done = self._config.trainer.max_steps, None
            if steps is not None and not self._needs_trainer:
                done = f"trainer.max_steps ({steps}) are done; agents are still served"
            train = ChildSpec(
                "trainer", self._launch.argv("train"), self._launch.env(), may_end=True, restarts=RESTARTS,
                vital=self._needs_trainer, done=done,
            )  # fmt: skip
            self.trainer = await self._supervisor.start(train)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, and stop it when a part dies for good."""
        return await self._supervisor.guard(work)


def check_addresses(config: Config) -> None:
    """Raise LightningError unless the ports are free and the first vLLM upstream is the server to start."""
    upstream = config.policy_upstream
    address = urlsplit(upstream.urls[0]) if upstream else None
    if address is None or address.port != config.vllm.port:
        wrong = f"upstreams: the first of kind vllm must be at port {config.vllm.port}, as vllm.port says"
        raise ConfigError(other_port(config) or wrong)
    require_free_port(config.proxy.host, config.proxy.port, "proxy.port")
    require_free_port(config.vllm.host, config.vllm.port, "vllm.port")


def downloaded(model: str, vllm_args: Sequence[str] = ()) -> int:
    """Return the bytes of the model's files in the cache of the Hugging Face hub, half-written ones included."""
    found = 0
    for folder, _, files in os.walk(_cache(vllm_args) / f"models--{model.replace('/', '--')}"):
        for file in files:
            path = Path(folder, file)
            try:
                found += 0 if path.is_symlink() else path.stat().st_size
            except OSError:  # renamed meanwhile: it is complete
                continue
    return found


def _cache(vllm_args: Sequence[str]) -> Path:
    for option, value in zip_longest(vllm_args, vllm_args[1:], fillvalue=""):
        if option == DOWNLOAD_DIR:
            return Path(value)
        if option.startswith(f"{DOWNLOAD_DIR}="):
            return Path(option.partition("=")[2])
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
