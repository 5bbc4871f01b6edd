"""Finds the modules of features: their keys, their plugins of the proxy and the trainer, their commands."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def modules(name: str) -> list[ModuleType]:
    """Return the modules of this name, of the features that have one."""
    package = f"{__package__.rpartition('.')[0]}.features"
    paths = [f"{package}.{feature}.{name}" for feature in import_module(package).FEATURES]
    return [import_module(path) for path in paths if find_spec(path)]
