"""Reads from a request or vLLM's parameters how an answer was sampled and whether its grammar can be replayed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..types import Sampling

Json = Mapping[str, Any]

# vLLM samples at this temperature where a lower one is asked for.
COLDEST = 0.01

# Where a request is silent, they count as this.
_NUMBERS = (
    ("temperature", 1.0), ("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0),
    ("min_p", 0.0), ("top_p", 1.0),
)  # fmt: skip

# With these in a schema vLLM takes another engine than xgrammar, unless it is told not to.
_OF_OTHER_ENGINES = frozenset(
    {"multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "patternProperties"}
)

_FORMATS = frozenset({
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
})  # fmt: skip


def sampling_of(parameters: Json) -> Sampling | None:
    """Return how vLLM samples with these parameters, or None if they are invalid or have `bad_words`.

    `parameters` are vLLM's own sampling parameters, or a request. Absent ones have the defaults of OpenAI's API. A
    request must have no grammar: vLLM builds it from several fields, which are not read here.
    """
    grammar, allowed = parameters.get("structured_outputs"), parameters.get("allowed_token_ids")
    biases = parameters.get("logit_bias") or {}
    if parameters.get("bad_words"):  # words have tokens by what comes before them
        return None
    try:
        numbers = {
            name: float(default if parameters.get(name) is None else parameters[name]) for name, default in _NUMBERS
        }
        if numbers["temperature"] > 0:
            numbers["temperature"] = max(numbers["temperature"], COLDEST)
        return Sampling(
            **numbers,
            allowed=None if allowed is None else tuple(sorted(map(int, allowed))),
            min_tokens=int(parameters.get("min_tokens") or 0),
            stop_tokens=tuple(sorted(map(int, parameters.get("stop_token_ids") or ()))),
            # vLLM bounds a bias to what OpenAI's API allows.
            bias=tuple(sorted((int(k), min(100.0, max(-100.0, float(v)))) for k, v in biases.items())),
            top_k=max(0, int(parameters.get("top_k") or 0)),
            grammar=None if grammar is None else json.dumps(grammar, sort_keys=True),
        )
    except (TypeError, ValueError, AttributeError):
        return None


def is_installed() -> bool:
    """Return whether grammars can be replayed here; xgrammar comes with vLLM."""
    return importlib.util.find_spec("xgrammar") is not None


def cannot_be_replayed(outputs: dict[str, Any]) -> str | None:
    """Return why a grammar (vLLM's structured outputs) cannot be replayed; None if it can."""
    if not is_installed():
        return "xgrammar is not installed"
    if outputs.get("disable_any_whitespace") or outputs.get("whitespace_pattern"):
        return "it has its own rules for whitespace"
    if outputs.get("grammar") and "::=" not in outputs["grammar"]:
        return "it is in Lark's notation"
    spec = outputs.get("json") or outputs.get("structural_tag")
    schema = json.loads(spec) if isinstance(spec, str) else spec
    return next((f"its schema has the keyword {name}" for name in _foreign(schema)), None)


def _foreign(schema: Any) -> Iterator[str]:
    """Yield keywords that make vLLM use another grammar engine. A property with the name of one counts too."""
    if isinstance(schema, dict):
        yield from _OF_OTHER_ENGINES & schema.keys()
        if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
            yield "format"
        if {"pattern", "format"} & schema.keys() and {"minLength", "maxLength"} & schema.keys():
            yield "pattern or format, together with a length"
        if isinstance(of := schema.get("allOf"), list) and len(of) > 1:
            yield "allOf"
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _foreign(inner)
