"""Chooses where agent programs run: here or on a Ray cluster (`run.executor`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.config.root import Config
from ....core.errors import ConfigError
from ...command_line import brought
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
        raise ConfigError(f"--preload goes with executor local only, not with {config.run.executor}")
    for make in brought("executor"):
        if (runner := make(config, command, say)) is not None:
            return runner
    raise ConfigError(f"run.executor: there is no executor {config.run.executor}")
