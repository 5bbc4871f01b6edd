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
        return Used(
            self.input + other.input,
            self.cached + other.cached,
            self.kept + other.kept,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


def used(usage: Any) -> Used | None:
    """Return the tokens that a `usage` counts; None if it counts none.

    Anthropic's `input_tokens` leave out what a cache had: 10 beside `cache_read_input_tokens` 90 are an input of 100.
    Some providers (xAI, Gemini) count reasoning in `total_tokens` alone.
    """
    if not isinstance(usage, dict) or not (
        "prompt_tokens" in usage or "input_tokens" in usage or "total_tokens" in usage
    ):
        return None
    given, said = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
    read, kept = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    first = _count(usage, f"{given}_tokens") + (read + kept if given == "input" else 0)
    found = read or _count(_object(usage, f"{given}_tokens_details"), "cached_tokens")
    return Used(
        input=first,
        cached=found or _count(usage, "prompt_cache_hit_tokens"),  # DeepSeek's
        kept=kept,
        output=max(_count(usage, f"{said}_tokens"), _count(usage, "total_tokens") - first),
        reasoning=_count(_object(usage, f"{said}_tokens_details"), "reasoning_tokens"),
    )


def _object(value: Json, name: str) -> Json:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _count(value: Json, name: str) -> int:
    """The count of this name; anything else is none."""
    found = value.get(name)
    return found if type(found) is int and 0 < found < 2**53 else 0
