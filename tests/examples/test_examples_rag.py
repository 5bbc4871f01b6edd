"""What comes with examples/rag: its corpus, its questions, the evaluator, the teacher. The agent needs a framework."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from support.examples import EXAMPLES, modules

PASSAGES = [json.loads(line)["text"] for line in (EXAMPLES / "rag" / "corpus.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    return modules("rag").tasks


@pytest.fixture(scope="module")
def teacher() -> ModuleType:
    return modules("rag").teacher


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def bm25(passages: list[str]) -> Callable[[str], list[tuple[float, str]]]:
    """A search for the best passages, with the parameters that the agent's package has."""
    bags = [Counter(words(passage)) for passage in passages]
    found = Counter(word for bag in bags for word in bag)
    mean = sum(bag.total() for bag in bags) / len(bags)
    weights: dict[str, dict[int, float]] = {word: {} for word in found}
    for i, bag in enumerate(bags):
        for word, count in bag.items():
            rarity = max(math.log((len(bags) - found[word] + 0.5) / (found[word] + 0.5)), 0.0)
            weights[word][i] = rarity * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * bag.total() / mean))

    def search(query: str) -> list[tuple[float, str]]:
        ranks: Counter[int] = Counter()
        for word in words(query):
            ranks.update(weights.get(word, {}))
        return [(rank, passages[i]) for i, rank in ranks.most_common(2)]

    return search


RANKED = bm25(PASSAGES)


def best(query: str) -> str:
    return RANKED(query)[0][1]


def alone(query: str) -> str:
    """The best passage, which no other equals."""
    (first, passage), (second, _) = RANKED(query)
    assert first > second + 0.01
    return passage


def rollout(teacher: ModuleType, task: dict[str, Any], source: random.Random) -> tuple[list[str], str]:
    """(queries, answer) of the teacher, with the tool results that the agent would get."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    queries: list[str] = []
    while "tool_calls" in (said := teacher.reply({"messages": messages}, task, source)):
        queries.append(json.loads(said["tool_calls"][0]["function"]["arguments"])["query"])
        messages += [{"role": "assistant", **said}, {"role": "tool", "content": best(queries[-1])}]
    return queries, said["content"]


def test_the_corpus_that_ships_is_the_one_that_tasks_makes(tasks: ModuleType) -> None:
    assert tasks.corpus() == PASSAGES
    assert len(set(PASSAGES)) == len(PASSAGES)


def test_the_gold_queries_find_the_gold_passages(tasks: ModuleType) -> None:
    for task in tasks.questions():
        first, second = (alone(query) for query in task["hops"])
        subject = task["hops"][0].split(" of ", 1)[1]
        assert subject in first and first.endswith(f" {task['bridge']}.")
        assert task["bridge"] in second and second.endswith(f" {task['answer']}.")


def test_no_question_can_be_answered_with_one_search_for_its_words(tasks: ModuleType) -> None:
    for task in tasks.questions():
        assert not best(task["question"]).endswith(f" {task['answer']}.")


@pytest.mark.parametrize("seed", range(3))
def test_training_and_held_out_questions_share_no_bridge(tasks: ModuleType, seed: int) -> None:
    train, held_out = tasks.split(seed, 200, 32)
    assert (len(train), len(held_out)) == (200, 32)
    assert not {task["bridge"] for task in train} & {task["bridge"] for task in held_out}
    assert len({task["question"] for task in train + held_out}) == 232
    assert len({task["task_id"] for task in train + held_out}) == 232
    assert tasks.split(seed, 200, 32) == (train, held_out) != tasks.split(seed + 1, 200, 32)


def test_more_questions_than_there_are_cannot_be_had(tasks: ModuleType) -> None:
    with pytest.raises(ValueError, match="for training"):
        tasks.split(0, 240, 32)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<answer>Amy Webb</answer>", 1.0),
        (" <answer> the amy webb. </answer>\n", 1.0),
        ("<answer>Amy Kent</answer>", 0.55),
        ("<answer>Ann Moor</answer>", 0.1),
        ("Amy Webb", 0.9),
        ("It is <answer>Amy Webb</answer>", 0.9),
        ("<answer>Amy Webb</answer><answer>Amy Webb</answer>", 0.9),
        ("Ann Moor is married to Amy Webb.", 0.4),
        ("<answer></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_for_the_answer_and_for_its_format(tasks: ModuleType, answer: str, reward: float) -> None:
    assert tasks.score({"answer": "Amy Webb"}, answer)[0] == pytest.approx(reward)


def test_a_comment_says_what_was_wrong(tasks: ModuleType) -> None:
    assert tasks.score({"answer": "Tarn"}, "<answer>Tarn</answer>")[1] == "correct"
    assert tasks.score({"answer": "Tarn"}, "Fenn")[1] == "answered 'Fenn', not Tarn; not in the format"


def test_the_teacher_is_right_about_60_percent_of_the_time(tasks: ModuleType, teacher: ModuleType) -> None:
    source, questions = random.Random(0), tasks.questions() * 2
    rewards = [tasks.score(task, rollout(teacher, task, source)[1])[0] for task in questions]
    assert 0.55 < sum(reward == 1 for reward in rewards) / len(rewards) < 0.65


def test_the_teacher_makes_mistakes_of_every_kind(tasks: ModuleType, teacher: ModuleType) -> None:
    source, seen = random.Random(0), set()
    for task in tasks.questions() * 2:
        queries, answer = rollout(teacher, task, source)
        seen |= {
            "bad query" * (queries[0] != task["hops"][0]),
            "one search" * (len(queries) == 1),
            "the bridge" * (answer == f"<answer>{task['bridge']}</answer>"),
            "no format" * ("<answer>" not in answer),
        }
    assert seen == {"", "bad query", "one search", "the bridge", "no format"}


class Unerring(random.Random):
    def random(self) -> float:
        return 0.0


def test_the_teacher_copies_from_the_passages(tasks: ModuleType, teacher: ModuleType) -> None:
    task = next(task for task in tasks.questions() if task["question"].endswith("born?"))
    assert rollout(teacher, task, Unerring())[0] == task["hops"]
    other = [{"role": "tool", "content": "The author of The Blue Tower is Zoe Zimmer."}]
    call = teacher.reply({"messages": other}, task, Unerring())["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"query": "Zoe Zimmer born"}
    other += [{"role": "tool", "content": "Zoe Zimmer was born in Zell."}]
    assert teacher.reply({"messages": other}, task, Unerring())["content"] == "<answer>Zell</answer>"
