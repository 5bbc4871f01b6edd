"""The store's statements as PostgreSQL takes them: parameters by number, and the few words that differ."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from ..database import Sql

_PARTS = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|::|:(\w+)""")
_LISTED = r"SELECT CAST\(value AS (TEXT|BIGINT)\) FROM json_each\((:\w+)\)"
# LIKE has no escape character in SQLite unless one is named, and takes ASCII letters of both cases for equal.
_WORDS = (
    (re.compile(r"\bCROSS JOIN\b(?! LATERAL)"), "JOIN"),
    (re.compile(r"\s+INDEXED BY \w+"), ""),
    (re.compile(r"\bIS NOT (?=:)"), "IS DISTINCT FROM "),
    (re.compile(r"\bIS (?=:)"), "IS NOT DISTINCT FROM "),
    (re.compile(r"(:\w+) IS NULL\b"), r"\1::TEXT IS NULL"),  # only texts are asked so
    (re.compile(r"\bCAST\((:\w+) AS TEXT\)"), r"convert_from(\1::BYTEA, 'UTF8')"),  # only bytes are read so
    # The values of a JSON list, which a table is looked up by.
    (re.compile(rf"(?<!NOT )\bIN \({_LISTED}\)"), r"= ANY(ARRAY(SELECT json_array_elements_text(\2::json)::\1))"),
    (re.compile(_LISTED), r"SELECT json_array_elements_text(\2::json)::\1"),
    (re.compile(r"\bLIKE (:\w+)\b(?! ESCAPE)"), r"""LIKE \1 ESCAPE ''"""),
    (re.compile(r"\bLIKE (:\w+)"), r"""ILIKE \1 COLLATE "C" """),
)


class Numbered(NamedTuple):
    """A statement for PostgreSQL, and the names of its parameters in the order of their numbers."""

    text: str
    names: tuple[str, ...]


@cache
def translated(sql: str) -> Numbered:
    """Return a statement of the store as PostgreSQL takes it."""
    if isinstance(sql, Sql):
        sql = sql.postgres
    for word, other in _WORDS:
        sql = word.sub(other, sql)
    names: dict[str, int] = {}

    def numbered(part: re.Match[str]) -> str:
        if (name := part[1]) is None:  # a text, a name in quotes, or a cast
            return part[0]
        return f"${names.setdefault(name, len(names) + 1)}"

    return Numbered(_PARTS.sub(numbered, sql), tuple(names))
