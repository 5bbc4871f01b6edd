"""Chooses where agent programs run: here, on a Ray cluster or as Kubernetes Jobs (`run.executor`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from ....proxy.config.root import Config
from ....proxy.errors import ConfigError
from ..output import Keeping
from ..programs import LocalRunner
from ..runner import Runner

PACKAGES = {"ray": "ray", "kubernetes": "kubernetes.aio"}


def runner_for(config: Config, command: Sequence[str], preload: Sequence[str], say: Callable[[str], None]) -> Runner:
    """Make the runner for a command line. ConfigError if it cannot work. `say` prints what the run waits for."""
    executor = config.run.executor
    if executor == "local":
        return LocalRunner(command, preload, Keeping.of(config), say)
    if not command:
        raise ConfigError("run: no command given; put it after `--`")
    if preload:
        raise ConfigError(f"--preload goes with executor local only, not with {executor}")
    if not _is_there(PACKAGES[executor]):
        raise ConfigError(f"executor {executor} needs a package: pip install 'lightning-proxy[{executor}]'")
    if executor == "ray":
        from .ray.runner import RayRunner

        return RayRunner(config.run, command, say, Keeping.of(config))
    from .kubernetes.runner import KubernetesRunner

    return KubernetesRunner(config.run, command, say, Keeping.of(config))


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent
        return False
