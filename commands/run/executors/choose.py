"""Chooses where agent programs run: here or on a Ray cluster (`run.executor`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from ....proxy.config.root import Config
from ....proxy.errors import ConfigError
from ..output import Keeping
from ..programs import LocalRunner
from ..runner import Runner


def runner_for(config: Config, command: Sequence[str], preload: Sequence[str], say: Callable[[str], None]) -> Runner:
    """Make the runner for a command line. ConfigError if it cannot work. `say` prints what the run waits for."""
    if config.run.executor == "local":
        return LocalRunner(command, preload, Keeping.of(config), say)
    if not command:
        raise ConfigError("run: no command given; put it after `--`")
    if preload:
        raise ConfigError("--preload goes with executor local only, not with ray")
    if find_spec("ray") is None:
        raise ConfigError("executor ray needs a package: pip install 'lightning-proxy[ray]'")
    from .ray.runner import RayRunner

    return RayRunner(config.run, command, say, Keeping.of(config))
