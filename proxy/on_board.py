"""Lists the side rooms that are on board: for their keys of the configuration, and what they plug into the proxy."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

# Each is a folder of the proxy with a module `config`, `plugin` or both. A room is taken out by deleting its folder and
# its line.
ON_BOARD = (
    "otel",
    "page",
    "promotion",
    "prompts",
    "reward_function",
    "upstreams.litellm",
    "judge",
    "guides",
    "sft",
    "preferences",
    "backends",
)


def modules(name: Literal["config", "plugin"]) -> list[ModuleType]:
    """Return the modules of this name, of the rooms that have one."""
    paths = [f"{__package__}.{room}.{name}" for room in ON_BOARD]
    return [import_module(path) for path in paths if find_spec(path)]
