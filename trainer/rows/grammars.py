"""Tells which grammars of vLLM can be replayed. No torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

# With these in a schema vLLM takes another engine than xgrammar, unless it is told not to.
_OF_OTHER_ENGINES = frozenset(
    {"multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "patternProperties"}
)
_FORMATS = frozenset({
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
})  # fmt: skip


def is_installed() -> bool:
    """Return whether grammars can be replayed here; xgrammar comes with vLLM."""
    return importlib.util.find_spec("xgrammar") is not None


def cannot_be_replayed(outputs: dict[str, Any]) -> str | None:
    """Return why a grammar, as vLLM's structured outputs have it, cannot be replayed; None if it can."""
    if not is_installed():
        return "xgrammar is not installed"
    if outputs.get("disable_any_whitespace") or outputs.get("whitespace_pattern"):
        return "it has rules of its own for blanks"
    if outputs.get("grammar") and "::=" not in outputs["grammar"]:
        return "it is in Lark's notation"
    spec = outputs.get("json") or outputs.get("structural_tag")
    schema = json.loads(spec) if isinstance(spec, str) else spec
    return next((f"the keyword {name}" for name in _foreign(schema)), None)


def _foreign(schema: Any) -> Iterator[str]:
    """The keywords for which vLLM takes another engine; a property of such a name counts, too."""
    if isinstance(schema, dict):
        yield from _OF_OTHER_ENGINES & schema.keys()
        if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
            yield "format"
        if {"pattern", "format"} & schema.keys() and {"minLength", "maxLength"} & schema.keys():
            yield "pattern or format, with a length"
        if isinstance(of := schema.get("allOf"), list) and len(of) > 1:
            yield "allOf"
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _foreign(inner)
