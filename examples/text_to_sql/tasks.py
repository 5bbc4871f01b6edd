"""Questions about small databases, and the evaluator: execution match."""

import os
import random
import re
from collections import Counter
from functools import cache
from typing import Any

from database import SCHEMAS, TEXTS, Rows, connect, run, schema, tables

__all__ = ["connect", "near_misses", "schema", "score", "split"]

Task = dict[str, Any]
FILLINGS = 4
# Wording and SQL. {words} and {condition} are of one and the same condition.
KINDS = (
    ("Name the {table}s {words}.", "SELECT {name} FROM {table} WHERE {condition}"),
    ("How many {table}s {words} are there?", "SELECT COUNT(*) FROM {table} WHERE {condition}"),
    ("What is the average {number} of {table}s {words}?", "SELECT AVG({number}) FROM {table} WHERE {condition}"),
    ("Which {table} {words} has the highest {number}?",
     "SELECT {name} FROM {table} WHERE {condition} ORDER BY {number} DESC LIMIT 1"),
    ("Which {table} {words} has the lowest {number}?",
     "SELECT {name} FROM {table} WHERE {condition} ORDER BY {number} LIMIT 1"),
    ("List the {table}s {words} by {number}.", "SELECT {name} FROM {table} WHERE {condition} ORDER BY {number}"),
    ("Name the {table} of each {second} {words}.",
     "SELECT {name} FROM {table} JOIN {second} USING ({key}) WHERE {condition}"),
)  # fmt: skip
PREPOSITIONS = {"country": "from", "town": "from", "kind": "of kind", "topic": "about", "city": "in", "reader": "to",
                "subject": "in"}  # fmt: skip
COMPARISONS = {"above": ">", "over": ">", "below": "<", "under": "<"}


def split(seed: int, train: int, held_out: int) -> tuple[list[Task], list[Task]]:
    """(train, held out): questions of all kinds in turn. No one's SQL answers another.

    With PARTIAL_CREDIT=1 a wrong answer to a training question can earn something, too.
    """
    source = random.Random(seed)
    partial = {"partial_credit": True} if os.environ.get("PARTIAL_CREDIT") == "1" else {}
    found: list[Task] = []
    while len(found) < train + held_out:
        made = _question(KINDS[len(found) % len(KINDS)], source)
        if not any(_same_answer(made, other) for other in found) and _tells(made):
            found.append({"task_id": f"question-{seed}-{len(found)}", **made})
    return [task | partial for task in found[held_out:]], found[:held_out]


def score(task: Task, answer: str) -> tuple[float, str]:
    """Return (reward, comment). The reward is 1 if the answer finds the rows of the right SQL in every filling, else 0.

    With partial credit, wrong SQL that runs has 0.1, and up to 0.5 the more rows it shares with the right SQL's.
    """
    for filling, right in enumerate(_right_rows(task["database"], task["sql"])):
        rows = run(task["database"], answer, filling)
        if not _same(rows, right, ordered=_ordered(task)):
            reward = _partial_credit(task, answer) if task.get("partial_credit") else 0.0
            return reward, f"{answer[:80]!r} gave {str(rows)[:80]}, not {str(right)[:80]}"
    return 1.0, "the same rows"


def near_misses(task: Task) -> list[str]:
    """Its SQL with one mistake each."""
    (table, columns), (second, _) = tables(task["database"])
    sql, (one, other) = task["sql"], columns[3:]
    turned = {">": "<", "<": ">", one: other, other: one}
    mistakes = (
        re.sub("[<>]", lambda found: turned[found[0]], sql),
        re.sub(rf"\b({one}|{other})\b", lambda found: turned[found[0]], sql),
        re.sub(r" WHERE \w+ . \S+", "", sql),
        sql.replace("AVG", "SUM"),
        sql.replace("COUNT(*)", columns[1]),
        sql.replace(" DESC", "") if " DESC" in sql else re.sub(r"(ORDER BY \w+)", r"\1 DESC", sql),
        sql.replace(" LIMIT 1", ""),
        re.sub(rf" JOIN {second} USING \(\w+\)", "", sql),
        sql.replace(f" {table}", f" {table}s"),
    )
    return [mistake for mistake in mistakes if mistake != sql]


def _same(rows: Rows | str, right: Rows | str, ordered: bool) -> bool:
    if isinstance(rows, str) or isinstance(right, str):
        return False
    return rows == right if ordered else Counter(rows) == Counter(right)


def _partial_credit(task: Task, answer: str) -> float:
    """0.1 for SQL that runs, and 0.4 times the share of rows that it has in common with the right SQL.

    The share is the Dice coefficient of the two multisets, averaged over the fillings.
    """
    found = [run(task["database"], answer, filling) for filling in range(FILLINGS)]
    if any(isinstance(rows, str) for rows in found):
        return 0.0
    pairs = [
        (Counter(rows), Counter(right))
        for rows, right in zip(found, _right_rows(task["database"], task["sql"]), strict=True)
    ]
    shares = [2 * (rows & right).total() / max(rows.total() + right.total(), 1) for rows, right in pairs]
    return 0.1 + 0.4 * sum(shares) / FILLINGS


@cache
def _right_rows(database: str, sql: str) -> list[Rows | str]:
    """What a task's SQL finds, filling by filling."""
    return [run(database, sql, filling) for filling in range(FILLINGS)]


def _ordered(task: Task) -> bool:
    return "ORDER BY" in task["sql"]


def _same_answer(one: Task, other: Task) -> bool:
    """Whether the SQL of either scores for the other."""
    if one["database"] != other["database"]:
        return False
    found = (_right_rows(task["database"], task["sql"]) for task in (one, other))
    ordered = _ordered(one) and _ordered(other)
    return all(_same(rows, right, ordered) for rows, right in zip(*found, strict=True))


def _tells(task: Task) -> bool:
    """Whether something is found, not the same whatever fills the tables, and by no near miss."""
    found = _right_rows(task["database"], task["sql"])
    if found[0] in ([], [(0,)], [(None,)]) or all(rows == found[0] for rows in found):
        return False
    return not any(score(task, mistake)[0] for mistake in near_misses(task))


def _question(kind: tuple[str, str], source: random.Random) -> Task:
    database = source.choice(list(SCHEMAS))
    (table, columns), (second, columns_beside) = tables(database)
    number, compared = source.sample(columns[3:], 2)
    if "{second}" in kind[0]:
        words, condition = _condition(second, *columns_beside[1:], source)
    else:
        words, condition = _condition(table, columns[2], compared, source)
    of = {"table": table, "second": second, "key": columns[0], "name": columns[1], "number": number,
          "words": words, "condition": condition}  # fmt: skip
    return {"question": kind[0].format(**of), "database": database, "sql": kind[1].format(**of)}


def _condition(table: str, text: str, number: str, source: random.Random) -> tuple[str, str]:
    """In words and in SQL: of a text or of a number."""
    if source.random() < 0.5:
        value = source.choice(TEXTS[f"{table}.{text}"].split())
        return f"{PREPOSITIONS[text]} {value}", f"{text} = '{value}'"
    word, bound = source.choice(list(COMPARISONS)), source.randint(10, 70)
    return f"with {number} {word} {bound}", f"{number} {COMPARISONS[word]} {bound}"
