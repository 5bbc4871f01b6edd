"""The text-to-SQL example: what is right scores, what is wrong does not, and no SQL does harm."""

from __future__ import annotations

import ast
import random
from collections import Counter
from typing import Any

import pytest

from support.examples import EXAMPLES, modules

Json = dict[str, Any]


example = modules("text_to_sql")
database, tasks, teacher = example.database, example.tasks, example.teacher
TRAIN, HELD_OUT = tasks.split(0, 140, 42)


def prompts() -> dict[str, str]:
    """What `agent.py`, whose framework is not installed here, tells its agents."""
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


def pattern(task: Json) -> tuple[bool, ...]:
    """The kind of a task's question, by the words of its SQL."""
    return tuple(word in task["sql"] for word in ("COUNT", "AVG", "JOIN", "ORDER", "DESC", "LIMIT"))


def test_no_task_is_in_both_splits() -> None:
    for key in ("task_id", "question", "sql"):
        assert len({task[key] for task in TRAIN + HELD_OUT}) == len(TRAIN) + len(HELD_OUT) == 182
    assert tasks.split(0, 140, 42) == (TRAIN, HELD_OUT) != tasks.split(1, 140, 42)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_no_sql_of_one_split_scores_in_the_other(seed: int) -> None:
    train, held_out = tasks.split(seed, 200, 32)
    assert (len(train), len(held_out)) == (200, 32)
    for one, other in ((one, other) for one in train for other in held_out if one["database"] == other["database"]):
        assert tasks.score(one, other["sql"])[0] == tasks.score(other, one["sql"])[0] == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))])
def test_there_are_questions_enough_of_each_kind(seed: int) -> None:
    for split in tasks.split(seed, 320, 64):
        patterns = Counter(pattern(task) for task in split)
        assert len(patterns) == len(tasks.KINDS) and max(patterns.values()) - min(patterns.values()) <= 1


def test_every_kind_of_question_is_in_both_splits() -> None:
    for split in (TRAIN, HELD_OUT):
        for words in ("COUNT", "AVG", "JOIN", "DESC LIMIT", "LIMIT 1"):
            assert sum(words in task["sql"] for task in split) >= len(split) // len(tasks.KINDS)
        assert {task["database"] for task in split} == set(database.SCHEMAS)


def test_the_right_sql_scores_and_one_mistake_does_not() -> None:
    for task in TRAIN + HELD_OUT:
        assert tasks.score(task, task["sql"]) == (1.0, "the same rows")
        assert len(mistakes := tasks.near_misses(task)) >= 2
        assert [tasks.score(task, mistake)[0] for mistake in mistakes] == [0.0] * len(mistakes)


def test_other_sql_with_the_same_rows_scores() -> None:
    task = {"database": "concerts", "sql": "SELECT name FROM singer WHERE age > 30"}
    assert tasks.score(task, "select s.name from singer as s where not s.age <= 30;")[0] == 1


def test_order_matters_only_where_it_was_asked_for() -> None:
    unordered = {"database": "shop", "sql": "SELECT name FROM product WHERE kind = 'toy'"}
    ordered = unordered | {"sql": unordered["sql"] + " ORDER BY price"}
    turned = ordered["sql"] + " DESC"
    assert tasks.score(unordered, ordered["sql"])[0] == tasks.score(unordered, turned)[0] == 1
    assert tasks.score(ordered, turned)[0] == tasks.score(ordered, unordered["sql"])[0] == 0


def test_as_many_equal_rows_are_asked_for_as_there_are() -> None:
    task = {"database": "school", "sql": "SELECT name FROM student JOIN test USING (sid) WHERE grade > 20"}
    assert tasks.score(task, task["sql"].replace("SELECT", "SELECT DISTINCT"))[0] == 0


def test_a_guessed_result_does_not_score() -> None:
    for task in TRAIN:
        if "COUNT" in task["sql"]:
            guess = database.run(task["database"], task["sql"])[0][0]
            assert tasks.score(task, f"SELECT {guess}")[0] == 0


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


@pytest.mark.parametrize(
    ("result", "verdict"),
    [("Ada", "yes"), ("0", "yes"), ("nothing", "no"), ("None", "no"), ("error: no such table: nobody", "no")],
)
def test_the_teachers_checker_says_no_to_errors_and_to_what_finds_nothing(result: str, verdict: str) -> None:
    for task in HELD_OUT:
        for sql in (task["sql"], *tasks.near_misses(task)):
            assert said("CHECKER", task, task["question"], sql, result) == verdict
