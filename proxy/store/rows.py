"""Rows of the store as records of `types.py`: a field is the column of its name, unless it is made of others."""

from __future__ import annotations

import sqlite3
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def read(kind: type[T], row: sqlite3.Row, **made: Any) -> T:
    """The record (a dataclass) that a row holds; `made`: its fields that are not a column as it is."""
    return kind(**{name: row[name] for name in _names(kind) if name not in made}, **made)  # type: ignore[arg-type]


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
