"""The configuration: the core's sections, with the keys of the side rooms on board. `file.py` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import create_model

from ..on_board import modules
from .core import CoreConfig
from .section import Section

S = TypeVar("S", bound=Section)


def extended(section: type[S]) -> type[S]:
    """Return a section of the core with the keys that side rooms add to it, and to the sections in it."""
    found = (kind for module in modules("config") for kind in vars(module).values() if isinstance(kind, type))
    rooms = [kind for kind in dict.fromkeys(found) if issubclass(kind, section) and kind is not section]
    inner: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section) and (made := extended(kind)) is not kind:
            inner[name] = made, made()
    if not rooms and not inner:
        return section
    return create_model(section.__name__, __base__=(*rooms[::-1],) or section, **inner)


if TYPE_CHECKING:
    Config = CoreConfig  # a room reads its own keys with `Section.of`
else:
    Config = extended(CoreConfig)
