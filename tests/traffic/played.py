"""A model that is played: what it says to a request of any recorded API. Texts are random, calls fit the tools.

The same seed and request give the same answer; asked again, another one, as sampling would. At temperature 0, and now
and then at any, it is the likeliest one: what every rollout that asks the same question is told.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

GOES_ON = 0.6  # how often it calls tools where it has some
LIKELIEST = 0.15
LONGEST = 24  # messages of a conversation in which tools are called
_SYLLABLES = ["ba", "ce", "di", "fo", "gu", "ha", "ke", "li", "mo", "nu", "pa", "re", "si", "to", "vu", "za"]
WORDS = [a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in ("", "n", "r")]


@dataclass
class Said:
    """One answer: text, or calls of tools as (name, arguments), or both."""

    text: str | None = None
    calls: list[tuple[str, Json]] = field(default_factory=list)
    thought: str | None = None


@dataclass(frozen=True)
class Tool:
    name: str
    schema: Json


class PlayedModel:
    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._asked: Counter[str] = Counter()

    def answers(self, request: Json) -> list[Said]:
        """One for each choice that is asked for."""
        return [self._answer(request) for _ in range(request.get("n") or 1)]

    def _answer(self, request: Json) -> Said:
        asked = json.dumps([request.get("system"), request.get("instructions"), items(request)])
        self._asked[asked] += 1
        likeliest = random.Random(f"{self._seed} {re.sub(_ID, '', asked)}")
        sampled = random.Random(f"{self._seed} {asked} {self._asked[asked]}")
        greedy = request.get("temperature") == 0 or sampled.random() < LIKELIEST
        return say(request, likeliest if greedy else sampled)


_ID = r"(call|fc|toolu|msg|resp|rs)_[0-9a-f]+"


def say(request: Json, source: random.Random) -> Said:
    """An answer of the kind that the request wants."""
    said, tools, choice = Said(), list(tools_of(request)), _tool_choice(request)
    final = [tool for tool in tools if tool.name.startswith("final_")]
    others = [tool for tool in tools if tool not in final]
    calls = choice not in (None, "auto", "none") or (choice != "none" and _goes_on(request, source))
    if isinstance(schema := _output_schema(request), dict):
        said.text = json.dumps(_with_next_speaker(value(schema, source), request, source))
    elif names := re.findall(r"select the next (?:role|speaker).{0,40}from \[(.+?)\]", _all_text(request)):
        said.text = _one_of(names[-1], source)
    elif "<code>" in _all_text(request):
        said.text = _code(request, source)
    elif final and choice != "none" and not (others and _goes_on(request, source)):
        said.calls = [(final[0].name, value(final[0].schema, source))]
    elif others and calls:
        chosen = [tool for tool in tools if tool.name == choice] or others
        picked = [source.choice(chosen) for _ in range(1 if len(chosen) > 3 else source.choice((1, 1, 2)))]
        alone = next((tool for tool in picked if not tool.schema.get("properties")), None)  # a handoff, say
        said.calls = [(tool.name, value(tool.schema, source)) for tool in ([alone] if alone else picked)]
        said.text = sentence(source, 3, 12) if source.random() < 0.3 else None
    else:
        said.text = "\n\n".join(sentence(source, 6, 16) for _ in range(source.choice((1, 1, 1, 2, 3))))
    return said


def _goes_on(request: Json, source: random.Random) -> bool:
    return len(items(request)) < LONGEST and source.random() < GOES_ON


def _one_of(names: str, source: random.Random) -> str:
    return source.choice(re.split(r",\s*", names)).strip("'\" ")


def _with_next_speaker(found: Any, request: Json, source: random.Random) -> Any:
    """One of the team, where an orchestrator asks who is next."""
    names = re.findall(r"select from: (.+?)\)", _all_text(request))
    if names and isinstance(found, dict) and isinstance(found.get("next_speaker"), dict):
        found["next_speaker"]["answer"] = _one_of(names[-1], source)
    return found


def _code(request: Json, source: random.Random) -> str:
    """What an agent that writes programs expects."""
    last = len(items(request)) > LONGEST or source.random() > GOES_ON
    line = f'final_answer("{sentence(source, 4, 9)}")' if last else f'print(search(query="{sentence(source, 3, 8)}"))'
    return f"Thought: {sentence(source, 4, 12)}\n<code>\n{line}\n</code>"


def sentence(source: random.Random, least: int, most: int) -> str:
    return " ".join(source.choices(WORDS, k=source.randint(least, most))).capitalize() + "."


def value(schema: Json, source: random.Random, root: Json | None = None) -> Any:
    """A value that fits a JSON schema."""
    root = schema if root is None else root
    if isinstance(ref := schema.get("$ref"), str):
        return value(root.get("$defs", {})[ref.rsplit("/", 1)[1]], source, root)
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return value(schema[name][0], source, root)
    if schema.get("enum"):
        return source.choice(schema["enum"])
    match schema.get("type"):
        case "integer" | "number":
            return source.randint(0, 99)
        case "boolean":
            return source.random() < 0.5
        case "array":
            return [value(schema.get("items", {}), source, root) for _ in range(source.randint(1, 2))]
        case "object" | None if "properties" in schema or schema.get("type"):
            return {name: value(inner, source, root) for name, inner in schema.get("properties", {}).items()}
        case "null":
            return None
    return sentence(source, 3, 12)


def items(request: Json) -> list[Any]:
    found = request.get("messages", request.get("input"))
    return found if isinstance(found, list) else [found]


def _all_text(request: Json) -> str:
    return json.dumps([request.get("system"), request.get("instructions"), items(request)[:1], items(request)[-1:]])


def tools_of(request: Json) -> Iterator[Tool]:
    for tool in request.get("tools") or ():
        function = tool.get("function", tool)
        if function.get("name"):
            yield Tool(function["name"], function.get("parameters") or function.get("input_schema") or {})


def _tool_choice(request: Json) -> str | None:
    """The tool that must be called, or: none, auto, required."""
    choice = request.get("tool_choice")
    if isinstance(choice, dict):
        named = choice.get("name") or choice.get("function", {}).get("name")
        return str(named or choice.get("type"))
    return choice


def _output_schema(request: Json) -> Any:
    chat, responses = request.get("response_format") or {}, (request.get("text") or {}).get("format") or {}
    return chat.get("json_schema", {}).get("schema") or responses.get("schema")
