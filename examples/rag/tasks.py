"""Questions of two hops over invented facts, and the evaluator: 0.9 for the answer, 0.1 for the format.

`python tasks.py` writes `corpus.jsonl`, the passages that the agent searches in.
"""

import itertools
import json
import random
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

Task = dict[str, Any]


def _names(*parts: str) -> tuple[str, ...]:
    """Every word of the first part with every word of the next."""
    return tuple(" ".join(words) for words in itertools.product(*(part.split() for part in parts)))


BOOKS = _names("The", "Silver Golden Blue Iron Glass Paper Winter Dark", "Tower Garden Mirror Bridge House Forest")
TOWNS = _names(
    "Tarn Brack Fenn Arden Marlow Selby Alden Dorn Merton Belford Dunmore Norden Pell Stowe Linden Colton "
    "Ashton Camden Wilton Easton Acton Elton Lund Vera Carn Glen Kell Mold Rand Wick Norton Dalton"
)
RIVERS = _names(
    "Arn Cal Gar Mar Nor Tam Var Tib Lim Tor Vol Isa Mel Sal Ren Lev "
    "Bal Ber Bol Dar Del Den Har Hel Ken Lat Mur Nav Ori Ros Sil Sol"
)
STREAMS = _names("Avon Yarrow Holm Velm Torrin Sable Elm Thorn Orr Lorne Albion Weston Corin Farrow Hudson Delta")
PEOPLE = _names(
    "Jon Ben Ann Tom Max Sam Kim Lee Ray Dan Jim Bob Lou Hal",
    "Moor Reed Lind Berg Frost Hill Wood Ford Bell Cook Fox Hart",
)
SPOUSES = _names("Leo Ian Amy Roy Ted Meg Eric Emma", "Nash Page Shaw Ward Webb Kent Holt Cole")
# What the corpus tells of a subject: who or what is its author, founder or river, the bridge.
ROLES = {
    "author": "The author of {} is {}.",
    "founder": "The founder of {} is {}.",
    "river": "The river of {} is the {}.",
}
# What it tells of a bridge; the question for it, and the words of the second query.
FACTS = {
    "born": ("{} was born in {}.", "Where was the {} of {} born?", "born"),
    "married": ("{} is married to {}.", "Who is the {} of {} married to?", "married to"),
    "buried": ("{} is buried in {}.", "Where is the {} of {} buried?", "buried"),
    "flow": ("The {} flows into the {}.", "What does the {} of {} flow into?", "flow into"),
}


def corpus() -> list[str]:
    """The passages, always the same. Those about settings are there for bad queries to find."""
    source = random.Random(1)
    passages = [f"{book} is set in {source.choice(TOWNS)}." for book in BOOKS]
    for role, subject, bridge, facts in _world():
        passages += [ROLES[role].format(subject, bridge)]
        passages += [FACTS[fact][0].format(bridge, answer) for fact, answer in facts.items()]
    source.shuffle(passages)
    return passages


def questions() -> list[Task]:
    """All questions that the corpus answers."""
    return [
        {"question": asked.format(role, subject), "hops": [f"{role} of {subject}", f"{bridge} {words}"],
         "bridge": bridge, "answer": answer}
        for role, subject, bridge, facts in _world()
        for fact, answer in facts.items()
        for _, asked, words in (FACTS[fact],)
    ]  # fmt: skip


def split(seed: int, train: int, held_out: int) -> tuple[list[Task], list[Task]]:
    """(train, held out): of different bridges, so that no held-out question has a hop in common with training."""
    source, made = random.Random(seed), questions()
    bridges = list(dict.fromkeys(task["bridge"] for task in made))
    source.shuffle(bridges)
    made.sort(key=lambda task: bridges.index(task["bridge"]))
    used = {task["bridge"] for task in made[:held_out]}
    rest = [task for task in made if task["bridge"] not in used]
    source.shuffle(rest)
    if len(rest) < train:
        raise ValueError(f"with {held_out} held-out questions, the corpus has {len(rest)} left for training")
    named = [{"task_id": f"question-{seed}-{i}", **task} for i, task in enumerate(made[:held_out] + rest[:train])]
    return named[held_out:], named[:held_out]


def score(task: Task, answer: str) -> tuple[float, str]:
    """(reward, comment): 0.9 · correct + 0.1 · format.

    correct: F1 of the words, as in the paper (arXiv 2508.03680), for some answers are names of two words. Compared is
    what is in the tags, or all of an answer without; format: 1 where there is nothing but `<answer>…</answer>`.
    """
    whole = re.fullmatch(r"\s*<answer>([^<>]+)</answer>\s*", answer)
    tagged = re.search(r"<answer>([^<>]+)</answer>", answer)
    correct = f1(tagged[1] if tagged else answer, task["answer"])
    reward = 0.9 * correct + 0.1 * bool(whole)
    comment = "correct" if correct == 1 else f"answered {answer[:80]!r}, not {task['answer']}"
    return round(reward, 4), comment if whole else f"{comment}; not in the format"


def f1(given: str, wanted: str) -> float:
    """Of the words of both, without case, punctuation and articles."""
    left, right = Counter(_words(given)), Counter(_words(wanted))
    return 2 * (left & right).total() / ((left.total() + right.total()) or 1)


def _words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def _world() -> list[tuple[str, str, str, dict[str, str]]]:
    """(role, subject, bridge, facts of the bridge), always the same."""
    source = random.Random(0)
    people, rivers = source.sample(PEOPLE, len(BOOKS) + len(TOWNS)), source.sample(RIVERS, len(TOWNS))
    spouses, authors, founders = source.sample(SPOUSES, len(BOOKS)), people[: len(BOOKS)], people[len(BOOKS) :]

    def places(*facts: str) -> dict[str, str]:
        return dict(zip(facts, source.sample(TOWNS, len(facts)), strict=True))

    return [
        *(("author", book, who, {"married": spouse, **places("born", "buried")})
          for book, who, spouse in zip(BOOKS, authors, spouses, strict=True)),
        *(("founder", town, who, places("born", "buried")) for town, who in zip(TOWNS, founders, strict=True)),
        *(("river", town, river, {"flow": source.choice(STREAMS)}) for town, river in zip(TOWNS, rivers, strict=True)),
    ]  # fmt: skip


def main() -> None:
    lines = [json.dumps({"text": passage}) + "\n" for passage in corpus()]
    Path(__file__).with_name("corpus.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
