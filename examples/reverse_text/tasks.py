"""Texts to write backwards, and the evaluator: how alike an answer and the reversed text are."""

import os
import random
import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

Task = dict[str, Any]
NAMES = ("Ann", "Ben", "Cem", "Dora", "Emil", "Fay", "Gus", "Hilda")
VERBS = ("sold", "drew", "lost", "found", "carried", "washed", "hid", "praised")
KINDS = ("green", "old", "heavy", "broken", "tiny", "silver", "wet", "odd")
THINGS = ("maps", "lamps", "boats", "chairs", "letters", "stones", "clocks", "baskets")
PLACES = ("at the river", "in town", "by the mill", "on the hill", "near the church", "after lunch", "in winter")


def split(seed: int, train: int, held_out: int) -> tuple[list[Task], list[Task]]:
    """(train, held out): different texts. They are the lines of the file that REVERSE_TEXTS names, or made."""
    source, texts = random.Random(seed), dict[str, None]()
    if file := os.environ.get("REVERSE_TEXTS"):
        texts = dict.fromkeys(line.strip() for line in Path(file).read_text().splitlines() if line.strip())
        if len(texts) <= held_out:
            raise SystemExit(f"{file}: {len(texts)} different lines; {held_out + 1} are needed at least")
        texts = dict.fromkeys(source.sample([*texts], min(len(texts), train + held_out)))
    while not file and len(texts) < train + held_out:
        texts[_sentence(source)] = None
    tasks = [{"task_id": f"text-{seed}-{i}", "question": text} for i, text in enumerate(texts)]
    return tasks[held_out:], tasks[:held_out]


def score(task: Task, answer: str) -> tuple[float, str]:
    """(reward, comment). 2m / n, where m letters of n match in order, by difflib; 0 without the tags.

    By hand: "abc" answered with "cab". Its reverse is "cba", and "c" and the "a" behind it match: 2 · 2 / 6 = 0.67.
    """
    found = re.search(r"<reversed_text>(.*?)</reversed_text>", answer, re.DOTALL)
    if found is None:
        return 0.0, "no <reversed_text>…</reversed_text>"
    right, text = task["question"][::-1], found[1].strip()
    reward = SequenceMatcher(None, text, right).ratio()
    return reward, "exact" if reward == 1 else f"{text[:80]!r} is not {right[:80]!r}"


def _sentence(source: random.Random) -> str:
    name, verb, kind, thing, place = (source.choice(words) for words in (NAMES, VERBS, KINDS, THINGS, PLACES))
    return f"{name} {verb} {source.randint(2, 9)} {kind} {thing} {place}."
