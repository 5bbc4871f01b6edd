"""Finds the modules of features, and the third-party packages that `plugins` names."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .errors import ConfigError

GROUP = "lightning_proxy.plugins"


def modules(name: str) -> list[ModuleType]:
    """Return the modules with this name, from all features that have one."""
    package = f"{__package__.rpartition('.')[0]}.features"
    paths = [f"{package}.{feature}.{name}" for feature in import_module(package).FEATURES]
    return [import_module(path) for path in paths if find_spec(path)]


def load_plugin(name: str) -> Any:
    """Return the object of the entry point with this name. Raises ConfigError if it cannot be loaded."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(f"plugins: no installed package has a plugin {name!r} (installed: {known})")
    try:
        return installed[name].load()
    except Exception as error:
        raise ConfigError(f"plugins: {name} cannot be imported: {type(error).__name__}: {error}") from error
