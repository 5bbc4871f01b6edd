"""Word problems of two operations, and the evaluator: exact match."""

import random
import re
from typing import Any

Task = dict[str, Any]
NAMES = ("Ann", "Ben", "Cem", "Dora", "Emil", "Fay")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")
# Wording and what it asks for, of three numbers.
KINDS = (
    ("{name} has {a} {thing}, gets {b} more and gives {c} away. How many {thing} are left?", "{a} + {b} - {c}"),
    ("{name} buys {b} boxes of {a} {thing} and finds {c} more. How many {thing} are there?", "{a} * {b} + {c}"),
    ("{c} friends bring {a} {thing} each and then {b} more each. How many {thing} is that?", "({a} + {b}) * {c}"),
)  # fmt: skip


def split(seed: int, train: int, held_out: int) -> tuple[list[Task], list[Task]]:
    """(train, held out): problems of which no two ask for the same expression."""
    source, found = random.Random(seed), {}
    while len(found) < train + held_out:
        made = _problem(source)
        found.setdefault(made["expression"], made)
    tasks = [{"task_id": f"problem-{seed}-{i}", **made} for i, made in enumerate(found.values())]
    return tasks[held_out:], tasks[:held_out]


def score(task: Task, answer: str) -> tuple[float, str]:
    """(reward, comment). 1 where the number, and no other, is in the answer; else 0."""
    exact = re.findall(r"-?\d+", answer) == [str(task["answer"])]
    return float(exact), "exact" if exact else f"answered {answer[:80]!r}, not {task['answer']}"


def _problem(source: random.Random) -> Task:
    wording, expression = source.choice(KINDS)
    numbers = {"a": source.randint(11, 60), "b": source.randint(3, 40), "c": source.randint(2, 9)}
    question = wording.format(name=source.choice(NAMES), thing=source.choice(THINGS), **numbers)
    asked = expression.format(**numbers)
    return {"question": question, "expression": asked, "answer": eval(asked)}
