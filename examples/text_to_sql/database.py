"""Four small databases of two tables each, made in memory for every query, so that no query affects a later one."""

import random
import re
import sqlite3
from contextlib import closing

Rows = list[tuple[object, ...]]
ROWS, ROWS_BESIDE = 12, 18
MOST_ROWS, MOST_BYTES, MOST_INSTRUCTIONS = 100, 10_000, 200_000
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
FUNCTIONS = {"count", "avg", "sum", "min", "max", "total", "abs", "round", "length", "lower", "upper"}
# The second table's rows belong to the first one's by their first column.
SCHEMAS = {
    "concerts": "singer(sid, name, country, age, songs)\nconcert(sid, city, guests)",
    "shop": "product(pid, name, kind, price, stock)\nsale(pid, city, amount)",
    "library": "book(bid, title, topic, price, copies)\nloan(bid, reader, days)",
    "school": "student(sid, name, town, age, points)\ntest(sid, subject, grade)",
}
# Every other column holds numbers.
TEXTS = {
    "singer.name": "Ada Ben Cem Dora Emil Fay Gus Hana Ida Jon Kim Leo",
    "singer.country": "Peru Chad Cuba Iran",
    "concert.city": "Rome Oslo Lima Bonn",
    "product.name": "apron bench chair desk easel fan globe hat iron jug kite lamp",
    "product.kind": "toy home office garden",
    "sale.city": "Rome Oslo Lima Bonn",
    "book.title": "Alone Bread Clouds Dust Echo Fire Ghosts Home Ice Joy Kings Light",
    "book.topic": "art love war food",
    "loan.reader": "Ann Bob Eva Max",
    "student.name": "Ali Bea Carl Dan Ella Finn Gina Hugo Ines Jack Kate Liam",
    "student.town": "Rome Oslo Lima Bonn",
    "test.subject": "music maths art sport",
}  # fmt: skip


def schema(database: str) -> str:
    """The tables and their columns, one table a line."""
    return SCHEMAS[database]


def tables(database: str) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """(name, columns) of both."""
    first, second = re.findall(r"(\w+)\((.*)\)", schema(database))
    return (first[0], first[1].split(", ")), (second[0], second[1].split(", "))


def connect(database: str, filling: int = 0) -> sqlite3.Connection:
    """A new one that can only be read, and not for long. Another `filling`: the same tables with other rows."""
    connection = sqlite3.connect(":memory:")
    source = random.Random(f"{database} {filling}")
    for line, (table, columns), rows in zip(
        schema(database).split("\n"), tables(database), (ROWS, ROWS_BESIDE), strict=True
    ):
        connection.execute(f"CREATE TABLE {line}")
        keys = [key % ROWS + 1 for key in range(rows)]
        made = [keys, *(_column(f"{table}.{column}", rows, source) for column in columns[1:])]
        connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", zip(*made, strict=True))
    connection.set_authorizer(_only_reading)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    connection.set_progress_handler(lambda: 1, MOST_INSTRUCTIONS)
    return connection


def run(database: str, sql: str, filling: int = 0) -> Rows | str:
    """A statement's rows, or why it has none."""
    with closing(connect(database, filling)) as connection:
        try:
            return connection.execute(sql).fetchmany(MOST_ROWS)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return f"error: {error}"


def _column(column: str, rows: int, source: random.Random) -> list[object]:
    """Names and numbers of which no two are equal, or texts of a few kinds."""
    texts = TEXTS.get(column, "").split()
    if texts and len(texts) < rows:
        return list(source.choices(texts, k=rows))
    return list(source.sample(texts or range(5, 80), rows))


def _only_reading(action: int, _: object, function: str | None, *__: object) -> int:
    allowed = action in ALLOWED or (action == sqlite3.SQLITE_FUNCTION and function in FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
