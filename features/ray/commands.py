"""Adds the executor `ray`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...core.errors import ConfigError

if TYPE_CHECKING:
    from ...commands.run.runner import Runner
    from ...core.config.root import Config


def executor(config: Config, command: Sequence[str], say: Callable[[str], None]) -> Runner | None:
    """Return the runner of agent programs on a Ray cluster, if configured."""
    if config.run.executor != "ray":
        return None
    if find_spec("ray") is None:
        raise ConfigError("run.executor ray needs a package: pip install 'lightning-proxy[ray]'")
    from .runner import RayRunner

    return RayRunner(config, command, say)
