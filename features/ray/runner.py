"""Runs agent programs as tasks on a Ray cluster, through a child process that runs Ray's client (driver.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...commands.run.output import redaction
from ...commands.run.runner import ServedRunner
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.http import is_loopback
from .config import RayConfig

SCHEMES = ("http://", "https://")


class RayRunner(ServedRunner):
    """Starts the command on any node of the cluster that has room for it."""

    name = "Ray driver"

    def __init__(self, config: Config, command: Sequence[str], say: Callable[[str], None]) -> None:
        # Ray's client ends its process if the cluster goes away, and takes signals for itself.
        super().__init__([sys.executable, "-m", f"{__package__}.driver"], say, redaction(config))
        self._config = config.run
        # Not in its arguments: everybody may read those, and runtime_env may hold keys.
        self.setup = json.dumps({"command": command, **config.section(RayConfig).model_dump()}).encode() + b"\n"
        self._machines: set[str] = set()

    def _ready(self, said: Mapping[str, Any]) -> None:
        self._machines = set(said["machines"])

    def _request(self, env: Mapping[str, str], log: Path) -> dict[str, Any]:
        if self._config.proxy_url is None and len(self._machines) > 1 and is_loopback(env["LIGHTNING_URL"]):
            raise ConfigError(
                f"the Ray cluster has {len(self._machines)} machines, and {env['LIGHTNING_URL']} can be reached from "
                "only one: set run.proxy_url to the address at which the other machines reach the proxy"
            )
        return {"env": reached_at(self._config.proxy_url, env), "log": str(log)}


def reached_at(proxy_url: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with `proxy_url` as the root of the proxy's addresses; unchanged if it is None."""
    if proxy_url is None:
        return dict(env)
    root = proxy_url.rstrip("/")
    return {name: root + urlsplit(value).path if value.startswith(SCHEMES) else value for name, value in env.items()}
