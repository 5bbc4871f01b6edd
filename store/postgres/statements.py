"""Translates the store's statements and values for PostgreSQL, and runs them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import asyncpg

from ..database import Params, Transaction

_OTHERWISE = re.compile(r"/\* PostgreSQL:(.*)\*/", re.DOTALL)  # a statement that each database needs in its own words
_PARTS = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|::|:(\w+)""")
_LISTED = r"SELECT CAST\(value AS (TEXT|BIGINT)\) FROM json_each\((:\w+)\)"
# LIKE has no escape character in SQLite unless one is named, and takes ASCII letters of both cases for equal.
_WORDS = (
    (re.compile(r"\bCROSS JOIN\b(?! LATERAL)"), "JOIN"),
    (re.compile(r"\s+INDEXED BY \w+"), ""),
    (re.compile(r"\bgroup_concat\("), "string_agg("),
    (re.compile(r"\binstr\("), "strpos("),
    (re.compile(r"\bIS NOT (?=:|excluded\b)"), "IS DISTINCT FROM "),
    (re.compile(r"\bIS (?=:)"), "IS NOT DISTINCT FROM "),
    (re.compile(r"(:\w+) IS NULL\b"), r"\1::TEXT IS NULL"),  # only texts are asked so
    (re.compile(r"\bCAST\((:\w+) AS TEXT\)"), r"convert_from(\1::BYTEA, 'UTF8')"),  # only bytes are read so
    # The values of a JSON list, which a table is looked up by.
    (re.compile(rf"(?<!NOT )\bIN \({_LISTED}\)"), r"= ANY(ARRAY(SELECT json_array_elements_text(\2::json)::\1))"),
    (re.compile(_LISTED), r"SELECT json_array_elements_text(\2::json)::\1"),
    (re.compile(r"\bLIKE (:\w+)\b(?! ESCAPE)"), r"""LIKE \1 ESCAPE ''"""),
    (re.compile(r"\bLIKE (:\w+)"), r"""ILIKE \1 COLLATE "C" """),
)


@cache
def translated(sql: str) -> tuple[str, tuple[str, ...]]:
    """Return a statement in PostgreSQL's form, and the names of its parameters in the order of their numbers."""
    if found := _OTHERWISE.search(sql):
        sql = found[1]
    for word, other in _WORDS:
        sql = word.sub(other, sql)
    names: dict[str, int] = {}

    def numbered(part: re.Match[str]) -> str:
        if (name := part[1]) is None:  # a text, a name in quotes, or a cast
            return part[0]
        return f"${names.setdefault(name, len(names) + 1)}"

    return _PARTS.sub(numbered, sql), tuple(names)


class PostgresTransaction(Transaction):
    """The statements of a transaction on a connection, or single statements without a transaction."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def all(self, sql: str, params: Params | None = None) -> list[asyncpg.Record]:
        text, names = translated(sql)
        return await self._connection.fetch(text, *_values(names, params or {}))

    async def many(self, sql: str, rows: Sequence[Params]) -> list[asyncpg.Record]:
        """As in the base class, but in one round trip."""
        if len(rows) < 2:
            return await self.all(sql, rows[0]) if rows else []
        text, names = translated(sql)
        return await self._connection.fetchmany(text, [_values(names, row) for row in rows])


def _values(names: Sequence[str], params: Params) -> list[Any]:
    return [storable(params[name]) for name in names]


def storable(value: Any) -> Any:
    """Return the value as PostgreSQL can store it, with `?` for NUL. Raises UnicodeEncodeError for a lone surrogate."""
    if not isinstance(value, str):
        return value
    if not value.isascii():
        value.encode()
    return value.replace("\0", "?")
