"""Reads the `usage` of an answer of any API as counts of tokens. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

Json = dict[str, Any]


class Used(NamedTuple):
    """Tokens of calls. `input` counts those that were read from a cache (`cached`) or written to it (`kept`), too.

    `reasoning`: those of `output` that the agent may not have seen.
    """

    input: int = 0
    cached: int = 0
    kept: int = 0
    output: int = 0
    reasoning: int = 0

    def plus(self, other: Used) -> Used:
        """Return the sum of both."""
        return Used(*(a + b for a, b in zip(self, other, strict=True)))


def used(usage: Any) -> Used | None:
    """Return the tokens that a `usage` counts; None if it counts none.

    Anthropic's `input_tokens` leave out what a cache had: 10 beside `cache_read_input_tokens` 90 are an input of 100.
    """
    if not isinstance(usage, dict) or not usage.keys() & {"prompt_tokens", "input_tokens", "total_tokens"}:
        return None
    of_input = _object(usage, "prompt_tokens_details") or _object(usage, "input_tokens_details")
    of_output = _object(usage, "completion_tokens_details") or _object(usage, "output_tokens_details")
    read, kept = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    apart = read + kept if "prompt_tokens" not in usage else 0
    return Used(
        input=_count(usage, "prompt_tokens", "input_tokens") + apart,
        cached=read or _count(of_input, "cached_tokens"),
        kept=kept,
        output=_count(usage, "completion_tokens", "output_tokens"),
        reasoning=_count(of_output, "reasoning_tokens"),
    )


def _object(value: Json, name: str) -> Json:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _count(value: Json, *names: str) -> int:
    """The first of these that is a count; anything else is none."""
    found = next((value[name] for name in names if name in value), 0)
    return found if type(found) is int and 0 < found < 2**53 else 0
