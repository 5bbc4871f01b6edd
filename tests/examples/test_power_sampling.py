"""The power sampling example: its chain against p^alpha worked out."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from support.paths import EXAMPLES, load_module

PROGRAM = EXAMPLES / "power_sampling" / "sample.py"
PROMPT, END, LONGEST = [7, 8], 2, 4
example: Any = load_module(PROGRAM)


def next_token(prefix: Sequence[int]) -> tuple[float, float, float]:
    """The chances of 0, 1 and the end; a first 0 is likely, and followed by nothing that is."""
    if not prefix:
        return (0.6, 0.3, 0.1)
    return (0.4, 0.35, 0.25) if prefix[0] == 0 else (0.05, 0.9, 0.05)


def ending(source: random.Random, prefix: Sequence[int], tokens: int) -> Any:
    found, logprobs = list(prefix), list[float]()
    while len(logprobs) < tokens and found[-1:] != [END]:
        chances = next_token(found)
        found += source.choices(range(3), chances)
        logprobs.append(math.log(chances[found[-1]]))
    return example.Answer(tuple(found[len(prefix) :]), tuple(logprobs), found[-1] == END)


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_answers_come_in_proportion_to_the_power_of_their_probability(alpha: float) -> None:
    source = random.Random(0)
    whole = [
        answer
        for length in range(1, LONGEST + 1)
        for answer in itertools.product(range(3), repeat=length)
        if (answer[-1] == END or length == LONGEST) and END not in answer[:-1]
    ]
    powers = [math.prod(next_token(one[:i])[token] for i, token in enumerate(one)) ** alpha for one in whole]

    def propose(prefix: Sequence[int], tokens: int) -> list[Any]:
        return [ending(source, prefix, tokens) for _ in range(3)]

    seen: Counter[tuple[int, ...]] = Counter(
        example.power_sample(propose, alpha, LONGEST, source, moves=12).tokens for _ in range(4000)
    )
    assert set(seen) <= set(whole)
    apart = sum(abs(seen[one] / 4000 - p / sum(powers)) for one, p in zip(whole, powers, strict=True)) / 2
    assert apart < 0.04
