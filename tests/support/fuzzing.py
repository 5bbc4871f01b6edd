"""What fuzzing tries: few examples and always the same in `make test`, many and new ones in `make test-all`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from hypothesis import HealthCheck, settings

SHARE = 10  # `make test` tries one example in ten

# The machine may be busy: what is slow is no fault.
_ANY_MACHINE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", derandomize=True, max_examples=20, **_ANY_MACHINE)
settings.register_profile("long", derandomize=False, **_ANY_MACHINE)


def examples(count: int, **more: Any) -> settings:
    """Settings for a test that is to have `count` examples, in place of 100, with `--hypothesis-profile=long`."""
    quick = settings().derandomize
    return settings(max_examples=max(count // SHARE, 1) if quick else count, **more)


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    """The pieces of a text between these places."""
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    return [text[a:b] for a, b in pairwise(places)]


# Other spellings of a path that a server might take for it.

INSERTED = (
    "%0a", "%0A", "%0d", "%0d%0a", "%00", "%09", "%0b", "%0c", "%1f", "%20", "%7f", "%c2%85", "%e2%80%a8", "%250a",
    "%e2%80%a9", "%3f", "%3Fx=1", "%23", "%23x", ";", ";x=1", "%3b", "/", "//", "%2f", "/.", "/./", "%2e", "/..",
    "/%2e%2e/", "\\", "%5c", "?", "?x=1", ".json", "%ef%bb%bf", "+", "*", "/x",
)  # fmt: skip
METHODS = ("POST", "GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND")


def spellings(path: str, rounds: int, seed: int = 0) -> Iterator[str]:
    """Yield raw paths: the path with something before, after or in it, in other letters, or percent-encoded."""
    for piece in INSERTED:
        yield path + piece
        yield f"{piece if piece.startswith('/') else '/' + piece}{path}"
        yield from (path[:at] + piece + path[at:] for at, char in enumerate(path) if char == "/")
    chance = random.Random(seed)
    for _ in range(rounds):
        letters = [_other(char, chance) if chance.random() < 0.2 else char for char in path]
        for _ in range(chance.randint(0, 2)):
            letters.insert(chance.randint(1, len(letters)), chance.choice(INSERTED))
        yield "".join(letters)


def _other(char: str, chance: random.Random) -> str:
    return chance.choice((char.upper(), f"%{ord(char):02x}", f"%{ord(char):02X}", f"%25{ord(char):02x}", quote(char)))
