"""Chooses what a few steps are to teach: a word that the model says sometimes, or a shorter answer. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SELDOM, OFTEN = 0.2, 0.8


class RolloutText(NamedTuple):
    """All that the model said in a rollout: its text, and the number of its tokens."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Aim:
    """A synthetic reward: 1 for answers with the `word`; without one, more for fewer tokens of at most `longest`."""

    word: str | None
    longest: int = 1
    is_letter: bool = False

    def reward(self, answer: RolloutText) -> float:
        """Return the reward of an answer, between 0 and 1."""
        if self.word is None:
            return max(0.0, 1 - answer.tokens / self.longest)
        return float(self.word in (_letters if self.is_letter else _words)(answer.text))

    def tells_apart(self, groups: Sequence[Sequence[RolloutText]]) -> bool:
        """Return whether siblings have different rewards."""
        return any(len({self.reward(answer) for answer in group}) > 1 for group in groups)

    def __str__(self) -> str:
        if self.word is None:
            return "more for a shorter answer"
        return f'1 for an answer with the {"letter" if self.is_letter else "word"} "{self.word}"'


def aim_of(groups: Sequence[Sequence[RolloutText]]) -> Aim:
    """Return what tells siblings apart best: a word, else a letter, that 20 % to 80 % of the answers have, else length.

    >>> group = [RolloutText(text, 3) for text in ("a red fox", "a grey fox", "one red ant", "fox")]
    >>> str(aim_of([group]))
    '1 for an answer with the word "red"'
    """
    for find, is_letter in ((_words, False), (_letters, True)):
        found = [[find(answer.text) for answer in group] for group in groups]
        if (word := _tells_apart(found)) is not None:
            return Aim(word, is_letter=is_letter)
    return Aim(None, max(answer.tokens for group in groups for answer in group) or 1)


def _tells_apart(groups: Sequence[Sequence[set[str]]]) -> str | None:
    """The piece that differs most among siblings; of several the first by name."""
    total = sum(map(len, groups))
    score: dict[str, float] = {}
    for piece in sorted(set().union(*(pieces for group in groups for pieces in group))):
        shares = [sum(piece in pieces for pieces in group) / len(group) for group in groups if group]
        counted = sum(piece in pieces for group in groups for pieces in group)
        if SELDOM <= counted / total <= OFTEN:
            score[piece] = sum(share * (1 - share) for share in shares)
    best = max(score, key=lambda piece: score[piece], default=None)
    return best if best is not None and score[best] > 0 else None


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[^\W_]+", text.lower()) if len(word) > 1}


def _letters(text: str) -> set[str]:
    return {letter for letter in text.lower() if letter.isalpha()}


def by_task(named: Iterable[tuple[str, str]], answers: Mapping[str, RolloutText]) -> Iterator[list[RolloutText]]:
    """Yield the answers of each task's rollouts. `named`: rollouts with their tasks."""
    tasks: dict[str, list[RolloutText]] = {}
    for rollout_id, task_id in named:
        tasks.setdefault(task_id, []).append(answers[rollout_id])
    yield from tasks.values()
