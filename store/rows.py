"""Reads rows of the store as records of `types.py`. Most fields are columns of the same name."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from .database import Row

T = TypeVar("T")


def read(kind: type[T], row: Row, **made: Any) -> T:
    """Return the record (a dataclass) in a row. `made` has the fields that are not simply a column."""
    return kind(**{name: row[name] for name in _names(kind) if name not in made}, **made)  # type: ignore[arg-type]


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
