"""Questions about legs, what a planner may write, and the evaluator: exact match."""

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

Task = dict[str, Any]
_NOUNS = {
    2: "bird duck hen eagle owl parrot swan pigeon crow",
    3: "stool tripod",
    4: "cat dog cow horse goat lion tiger bear camel rabbit frog lizard table chair zebra rat",
    6: "ant bee beetle moth cricket hornet",
    8: "spider scorpion",
    10: "crab lobster prawn",
}
LEGS = {f"{noun}s": legs for legs, nouns in _NOUNS.items() for noun in nouns.split()}
COUNTS = range(2, 21)


def split(seed: int, train: int, held_out: int) -> tuple[list[Task], list[Task]]:
    """(train, held out): no noun and no count is in both."""
    source = random.Random(seed)
    nouns, counts = source.sample([*LEGS], len(LEGS)), source.sample(COUNTS, len(COUNTS))
    return (
        _questions(f"legs-{seed}", source, nouns[10:], counts[6:], train),
        _questions(f"legs-{seed}-held-out", source, nouns[:10], counts[:6], held_out),
    )


def _questions(name: str, source: random.Random, nouns: list[str], counts: list[int], number: int) -> list[Task]:
    """Every second one has two nouns."""
    found: dict[str, Task] = {}
    while len(found) < number:
        kinds = 1 + len(found) % 2
        asked = dict(zip(source.sample(nouns, kinds), source.sample(counts, kinds), strict=True))
        question = f"How many legs have {' and '.join(f'{n} {noun}' for noun, n in asked.items())}?"
        answer = sum(n * LEGS[noun] for noun, n in asked.items())
        found.setdefault(question, {"question": question, "counts": asked, "answer": answer})
    return [{"task_id": f"{name}-{i}", **task} for i, task in enumerate(found.values())]


def score(task: Task, answer: str) -> tuple[float, str]:
    """(reward, comment). 1 for the right number, else 0."""
    right = answer == str(task["answer"])
    return float(right), "exact" if right else f"answered {answer[:80]!r}, not {task['answer']}"


def known(memory: Sequence[str]) -> dict[str, int]:
    """The nouns of which the memory has the legs: `facts cats -> 4`."""
    found = (re.fullmatch(r"facts (\w+) -> (\d+)", line) for line in memory)
    return {line[1]: int(line[2]) for line in found if line}


def legal(counts: Mapping[str, int], memory: Sequence[str]) -> list[list[str]]:
    """What makes sense next, a list for each tool: expressions once all legs are known, one of them right."""
    legs = known(memory)
    facts = [f"facts {noun}" for noun in counts if noun not in legs]
    terms = [[f"{n} {sign} {legs[noun]}" for sign in "*+"] for noun, n in counts.items() if not facts]
    calcs = [f"calc {' + '.join(parts)}" for parts in itertools.product(*terms) if parts]
    return [lines for lines in (facts, calcs, [f"rhyme {noun}" for noun in counts]) if lines]


def progress(counts: Mapping[str, int], memory: Sequence[str], line: str) -> float:
    """1 for a line that the answer needs next, else 0."""
    missing = counts.keys() - known(memory).keys()
    needed = {f"facts {noun}" for noun in missing} or {legal(counts, memory)[0][0]}
    return float(line in needed)
