"""The text-to-SQL example: what is right scores, what is wrong does not, and no SQL does harm."""

from __future__ import annotations

import ast
import random
from typing import Any

import pytest

from support.examples import EXAMPLES, modules

Json = dict[str, Any]


example = modules("text_to_sql")
database, tasks, teacher = example.database, example.tasks, example.teacher
TRAIN, HELD_OUT = tasks.split(0, 140, 42)


def prompts() -> dict[str, str]:
    """What `agent.py` tells its agents; its framework is not installed here."""
    told = {}
    for line in ast.parse((EXAMPLES / "text_to_sql" / "agent.py").read_text()).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            told[ast.unparse(line.targets[0])] = line.value.value
    return told


def said(agent: str, task: Json, *told: str, source: random.Random | None = None) -> str:
    system, user = {"role": "system", "content": prompts()[agent]}, {"role": "user", "content": "\n".join(told)}
    return teacher.reply({"messages": [system, user]}, task, source or random.Random(0))["content"]


def right(agent: str, *told: str) -> float:
    """The share of the teacher's statements that score."""
    source = random.Random(0)
    answers = [(task, said(agent, task, task["question"], *told, source=source)) for task in TRAIN * 2]
    return sum(tasks.score(task, sql)[0] for task, sql in answers) / len(answers)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_no_sql_of_one_split_scores_in_the_other(seed: int) -> None:
    train, held_out = tasks.split(seed, 200, 32)
    assert (len(train), len(held_out)) == (200, 32)
    for one, other in ((one, other) for one in train for other in held_out if one["database"] == other["database"]):
        assert tasks.score(one, other["sql"])[0] == tasks.score(other, one["sql"])[0] == 0


def test_the_right_sql_scores_and_one_mistake_does_not() -> None:
    for task in TRAIN + HELD_OUT:
        assert tasks.score(task, task["sql"]) == (1.0, "the same rows")
        assert len(mistakes := tasks.near_misses(task)) >= 2
        assert [tasks.score(task, mistake)[0] for mistake in mistakes] == [0.0] * len(mistakes)


def test_rows_are_compared_in_their_order_only_where_it_was_asked_for() -> None:
    task = {"database": "concerts", "sql": "SELECT name FROM singer WHERE age > 30"}
    assert tasks.score(task, "select s.name from singer as s where not s.age <= 30;")[0] == 1
    equal = {"database": "school", "sql": "SELECT name FROM student JOIN test USING (sid) WHERE grade > 20"}
    assert tasks.score(equal, equal["sql"].replace("SELECT", "SELECT DISTINCT"))[0] == 0, "as many equal rows"
    unordered = {"database": "shop", "sql": "SELECT name FROM product WHERE kind = 'toy'"}
    ordered = unordered | {"sql": unordered["sql"] + " ORDER BY price"}
    turned = ordered["sql"] + " DESC"
    assert tasks.score(unordered, ordered["sql"])[0] == tasks.score(unordered, turned)[0] == 1
    assert tasks.score(ordered, turned)[0] == tasks.score(ordered, unordered["sql"])[0] == 0


@pytest.mark.parametrize(
    "sql",
    [
        "",
        ";",
        "I think that it is Ada.",
        "SELECT name FROM singer WHERE",
        "SELECT name FROM nobody",
        "SELECT ?",
        "SELECT 1; DROP TABLE singer",
        "SELECT '\0'",
        "SELECT '\ud800'",
        "DROP TABLE singer",
        "DELETE FROM singer",
        "UPDATE singer SET age = 1",
        "CREATE TABLE other(x)",
        "ATTACH '/tmp/other.db' AS other",
        "VACUUM INTO '/tmp/other.db'",
        "PRAGMA writable_schema = 1",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT hex(randomblob(900000000))",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
        "SELECT COUNT(*) FROM " + ", ".join(f"concert AS c{i}" for i in range(12)),
        "SELECT " + "(" * 5000,
    ],
)
def test_what_is_no_query_of_the_tables_is_harmless(sql: str) -> None:
    task = {"database": "concerts", "sql": "SELECT COUNT(*) FROM singer"}
    assert tasks.score(task, sql)[0] == 0
    assert tasks.score(task, task["sql"])[0] == 1


def test_a_result_without_end_is_cut() -> None:
    assert len(database.run("concerts", "SELECT a.name FROM singer AS a, singer AS b, singer AS c")) == 100


def test_the_teacher_writes_what_is_right_mostly_and_rewrites_better() -> None:
    assert right("WRITER") == pytest.approx(0.6, abs=0.08)
    assert right("REWRITER", "SELECT name FROM nobody", "error: no such table: nobody") == pytest.approx(0.85, abs=0.08)
