"""The configuration: the core's sections, with the keys of the side rooms on board. `file.py` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extended import extended
from .core import CoreConfig

if TYPE_CHECKING:
    Config = CoreConfig  # a room reads its own keys with `Section.of`
else:
    Config = extended(CoreConfig, "config")
