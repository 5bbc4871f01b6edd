"""The examples' tasks, evaluators, rules and teachers; agents with frameworks run in frameworks/test_examples.py."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.examples import EXAMPLES, modules, played_by_teacher
from support.paths import load_module

Json = dict[str, Any]


# What no task of both splits may share.
APART: dict[str, tuple[int, int, Callable[[Json], Any]]] = {
    "calculator": (200, 32, lambda task: [task["expression"], task["task_id"]]),
    "rag": (200, 32, lambda task: [task["question"], task["bridge"], task["task_id"]]),
    "reverse_text": (200, 32, lambda task: [task["question"], task["task_id"]]),
    "agentflow": (200, 32, lambda task: [*task["counts"], *task["counts"].values()]),
    "werewolf": (180, 30, lambda task: [*task["players"], task["roles"].index("seer")]),
}


@pytest.mark.parametrize("name", APART)
def test_no_held_out_task_is_trained_on_and_a_seed_is_a_split(name: str) -> None:
    tasks, (some, others, parts) = modules(name).tasks, APART[name]
    for seed in range(1, 4):
        train, held_out = tasks.split(seed, some, others)
        assert (len(train), len(held_out)) == (some, others)
        assert {part for task in train for part in parts(task)}.isdisjoint(p for task in held_out for p in parts(task))
        assert tasks.split(seed, some, others) == (train, held_out) != tasks.split(seed + 1, some, others)


@pytest.mark.parametrize(
    ("name", "task", "rewards"),
    [
        (
            "calculator",
            {"answer": 62},
            {"62": 1, " 62. ": 1, "It is 62": 1, "61": 0, "62 or 63": 0, "-62": 0, "162": 0, "": 0},
        ),
        (
            "rag",
            {"answer": "Amy Webb"},
            {
                "<answer>Amy Webb</answer>": 1, " <answer> the amy webb. </answer>\n": 1,
                "<answer>Amy Kent</answer>": 0.55, "<answer>Ann Moor</answer>": 0.1, "Amy Webb": 0.9,
                "It is <answer>Amy Webb</answer>": 0.9, "<answer>Amy Webb</answer><answer>Amy Webb</answer>": 0.9,
                "Ann Moor is married to Amy Webb.": 0.4, "<answer></answer>": 0, "": 0,
            },
        ),
        (
            "reverse_text",
            {"question": "abc"},
            {
                "<reversed_text>cba</reversed_text>": 1, "Here: <reversed_text>\ncba\n</reversed_text> so": 1,
                "<reversed_text>cab</reversed_text>": 2 / 3, "<reversed_text>abc</reversed_text>": 1 / 3,
                "<reversed_text></reversed_text>": 0, "cba": 0, "<reversed_text>cba": 0,
            },
        ),
    ],
)  # fmt: skip
def test_the_reward_of_an_answer(name: str, task: Json, rewards: dict[str, float]) -> None:
    score = modules(name).tasks.score
    assert {answer: score(task, answer)[0] for answer in rewards} == pytest.approx(rewards)


def test_the_corpus_that_ships_is_the_one_that_is_made_and_a_file_gives_texts_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag, lines = modules("rag").tasks, (EXAMPLES / "rag" / "corpus.jsonl").read_text().splitlines()
    assert rag.corpus() == [json.loads(line)["text"] for line in lines]
    with pytest.raises(ValueError, match="for training"):
        rag.split(0, 240, 32)  # more questions than there are
    tasks, file = modules("reverse_text").tasks, tmp_path / "texts.txt"
    file.write_text("one\n\ntwo\none\nthree\n")
    monkeypatch.setenv("REVERSE_TEXTS", str(file))
    train, held_out = tasks.split(0, 200, 1)
    assert sorted(task["question"] for task in (*train, *held_out)) == ["one", "three", "two"]
    with pytest.raises(SystemExit, match="3 different lines; 4 are needed"):
        tasks.split(0, 200, 3)


# text_to_sql: what is right scores, what is wrong does not, and no SQL does harm

SQL = modules("text_to_sql").tasks


def test_the_right_sql_scores_and_neither_one_mistake_nor_what_the_other_split_asks_does() -> None:
    train, held_out = SQL.split(0, 140, 42)
    for task in train + held_out:
        assert SQL.score(task, task["sql"]) == (1.0, "the same rows")
        assert len(mistakes := SQL.near_misses(task)) >= 2
        assert [SQL.score(task, mistake)[0] for mistake in mistakes] == [0.0] * len(mistakes)
    for one, other in ((one, other) for one in train for other in held_out if one["database"] == other["database"]):
        assert SQL.score(one, other["sql"])[0] == SQL.score(other, one["sql"])[0] == 0


def test_partial_credit_is_given_in_training_only_and_less_than_for_what_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARTIAL_CREDIT", "1")
    train, held_out = SQL.split(0, 28, 7)
    earned = [[SQL.score(task, mistake)[0] for mistake in SQL.near_misses(task)] for task in train]
    assert all(SQL.score(task, task["sql"])[0] == 1 for task in train)
    assert all(0.1 <= max(rewards) <= 0.5 and rewards[-1] == 0 for rewards in earned), "the last names no table"
    assert max(map(max, earned)) > 0.3
    assert not any(SQL.score(task, mistake)[0] for task in held_out for mistake in SQL.near_misses(task))


def test_rows_are_compared_in_their_order_only_where_it_was_asked_for() -> None:
    task = {"database": "concerts", "sql": "SELECT name FROM singer WHERE age > 30"}
    assert SQL.score(task, "select s.name from singer as s where not s.age <= 30;")[0] == 1
    equal = {"database": "school", "sql": "SELECT name FROM student JOIN test USING (sid) WHERE grade > 20"}
    assert SQL.score(equal, equal["sql"].replace("SELECT", "SELECT DISTINCT"))[0] == 0, "as many equal rows"
    unordered = {"database": "shop", "sql": "SELECT name FROM product WHERE kind = 'toy'"}
    ordered = unordered | {"sql": unordered["sql"] + " ORDER BY price"}
    turned = ordered["sql"] + " DESC"
    assert SQL.score(unordered, ordered["sql"])[0] == SQL.score(unordered, turned)[0] == 1
    assert SQL.score(ordered, turned)[0] == SQL.score(ordered, unordered["sql"])[0] == 0
    endless = "SELECT a.name FROM singer AS a, singer AS b, singer AS c"
    assert len(modules("text_to_sql").database.run("concerts", endless)) == 100


HARMLESS = [
    "", ";", "I think that it is Ada.", "SELECT name FROM singer WHERE", "SELECT name FROM nobody", "SELECT ?",
    "SELECT 1; DROP TABLE singer", "SELECT '\0'", "SELECT '\ud800'", "DROP TABLE singer", "DELETE FROM singer",
    "UPDATE singer SET age = 1", "CREATE TABLE other(x)", "ATTACH '/tmp/other.db' AS other",
    "VACUUM INTO '/tmp/other.db'", "PRAGMA writable_schema = 1", "BEGIN", "SELECT load_extension('x')",
    "SELECT hex(randomblob(900000000))", "SELECT " + "(" * 5000,
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
    "SELECT COUNT(*) FROM " + ", ".join(f"concert AS c{i}" for i in range(12)),
]  # fmt: skip


def test_what_is_no_query_of_the_tables_is_harmless() -> None:
    task = {"database": "concerts", "sql": "SELECT COUNT(*) FROM singer"}
    for sql in HARMLESS:
        assert [SQL.score(task, asked)[0] for asked in (sql, task["sql"])] == [0, 1], sql


# agentflow and werewolf: their rules, what chance and the best play are worth, and rollouts


def test_the_best_planner_loses_to_nothing_but_the_verifier() -> None:
    """It may not err before the last turn: once for a question of one noun, twice for one of two."""
    flow, source = modules("agentflow"), random.Random(0)

    def reward(task: Json) -> float:
        def best(memory: list[str]) -> str:
            return str(flow.tasks.legal(task["counts"], memory)[0][0])

        return float(flow.tasks.score(task, flow.agent.flow(task, best, lambda *_: None, source))[0])

    _, tasks = flow.tasks.split(0, 0, 100)
    assert sum(map(reward, tasks * 40)) / 4000 == pytest.approx((0.9 + 0.81) / 2, abs=0.02)
    for task in tasks[:4]:
        steps = (flow.tasks.legal(task["counts"], [])[0][0], f"rhyme {next(iter(task['counts']))}")
        assert [flow.tasks.progress(task["counts"], [], step) for step in steps] == [1, 0]
    for line, result in {
        "facts cats": "4", "facts dragons": "unknown", "calc 3 * 8 + 2 * 4": "32", "calc 3 **8": "error",
        "calc __import__": "error", "rhyme cats": "nothing rhymes with cats", "dance": "error",
    }.items():  # fmt: skip
        assert flow.agent.execute(line) == result


def test_random_play_of_werewolf_is_worth_what_was_enumerated_and_seats_tell_nothing() -> None:
    wolf, source = modules("werewolf"), random.Random(1)

    def teachers(_: str, prompt: str, legal: Sequence[str]) -> str:
        name = str(wolf.teacher.reply({"messages": [{"role": "user", "content": prompt}]}, {}, source)["content"])
        assert name in legal
        return name

    _, deals = wolf.tasks.split(0, 0, 100)
    games = [source.choice(deals) for _ in range(20_000)]
    won = sum(wolf.tasks.score(task, wolf.agent.game(task, teachers, source))[0] for task in games)
    assert won / len(games) == pytest.approx(float(wolf.tasks.chance()), abs=0.01)
    for tasks in wolf.tasks.split(1, 180, 30):
        places = Counter((task["roles"].index("seer"), task["roles"].index("wolf")) for task in tasks)
        assert len(places) in (3, 9) and len({*places.values()}) == 1, "else a policy learns places"


@pytest.mark.parametrize(
    ("name", "agents", "actions"),
    [
        ("agentflow", {"planner"}, {"executor", "verifier", "generator"}),
        ("werewolf", {"seer", "villager-1", "villager-2"}, set()),
    ],
)
async def test_rollouts_through_the_proxy(
    name: str, agents: set[str], actions: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played by the teacher: each has its reward, its seats by name, and the programs' actions."""
    for rollout in await played_by_teacher(name, sys.executable, 8, tmp_path, monkeypatch):
        assert rollout["reward"] in (0, 1)
        assert {call["agent"] for call in rollout["calls"]} == agents
        assert {event["agent"] for event in rollout["events"]} == actions
        steps = [reward["name"] for reward in rollout["rewards"] if reward["call_id"]]
        assert steps == ["progress"] * (len(rollout["calls"]) if actions else 0)


# power_sampling: its chain against p^alpha worked out

POWER: Any = load_module(EXAMPLES / "power_sampling" / "sample.py")
END, LONGEST, ALPHA = 2, 4, 3.0
Tokens = tuple[int, ...]


def chances(prefix: Sequence[int]) -> tuple[float, float, float]:
    """Of 0, 1 and the end; a first 0 is likely, and followed by nothing that is."""
    if not prefix:
        return (0.6, 0.3, 0.1)
    return (0.4, 0.35, 0.25) if prefix[0] == 0 else (0.05, 0.9, 0.05)


def powers(prefix: Tokens = (), p: float = 1.0) -> dict[Tokens, float]:
    """What each answer's probability is, to the power."""
    if len(prefix) == LONGEST or END in prefix:
        return {prefix: p**ALPHA}
    return {
        answer: power
        for token, chance in enumerate(chances(prefix))
        for answer, power in powers((*prefix, token), p * chance).items()
    }


def test_answers_come_in_proportion_to_the_power_of_their_probability() -> None:
    source, expected = random.Random(0), powers()

    def ending(prefix: Sequence[int], tokens: int) -> Any:
        found, logprobs = [*prefix], list[float]()
        while len(logprobs) < tokens and END not in found:
            given = chances(found)
            found += source.choices(range(3), given)
            logprobs.append(math.log(given[found[-1]]))
        return POWER.Answer(tuple(found[len(prefix) :]), tuple(logprobs), END in found)

    def propose(prefix: Sequence[int], tokens: int) -> list[Any]:
        return [ending(prefix, tokens) for _ in range(3)]

    seen = Counter(POWER.power_sample(propose, ALPHA, LONGEST, source, moves=12).tokens for _ in range(4000))
    assert set(seen) <= set(expected)
    assert sum(abs(seen[one] / 4000 - power / sum(expected.values())) for one, power in expected.items()) < 0.08
