"""Makes the tables of a store in SQLite, and checks those that are there."""

from __future__ import annotations

import sqlite3

from ..schema import NUMBERS, missing_parts, parts


def missing_in(connection: sqlite3.Connection, where: str) -> list[str]:
    """Return the rooms whose tables the file does not have yet. Raise OtherSchema if it is no store of this schema."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return missing_parts(where, tables, dict(connection.execute(NUMBERS)) if "schema_numbers" in tables else {})


def make_tables(connection: sqlite3.Connection, where: str) -> None:
    """Make the tables that are missing, in one transaction: several processes may start at once."""
    if not missing_in(connection, where):
        return
    connection.execute("BEGIN IMMEDIATE")
    missing = missing_in(connection, where)
    for part in parts("sqlite"):
        if part.room in missing:
            _run(connection, part.script)
    connection.execute("COMMIT")


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Run the statements of a script; `executescript` would commit the transaction around them."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
