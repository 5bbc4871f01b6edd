"""Finds the packages of others that `plugins` names, by their entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from ..errors import ConfigError

GROUP = "lightning_proxy.plugins"


def load_plugin(name: str) -> Any:
    """Return the object of the entry point with this name. Raise ConfigError if it cannot be loaded."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(f"plugins: no installed package has a plugin {name!r} (installed: {known})")
    try:
        return installed[name].load()
    except Exception as error:
        raise ConfigError(f"plugins: {name} cannot be imported: {type(error).__name__}: {error}") from error
