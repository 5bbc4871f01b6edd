"""What vLLM's own code makes of the pieces that its parsers say, as events of /v1/responses."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

from openai.types.responses.tool import Tool
from pydantic import TypeAdapter
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta

Json = dict[str, Any]

TOOLS = TypeAdapter(list[Tool])
CALLS = [
    ("add", '{"a": 1}'),
    ("patch", json.dumps({"input": '+ \u00e9\U0001f600\n"a"'})),
    ("patch", '{"x": 1}'),
    ("mail__send", "{}"),
]


def some_deltas(seed: int) -> list[Json]:
    """What parsers say piece by piece, in any order; now and then several things at once, or nothing."""
    random = Random(seed)
    deltas: list[Json] = []
    for index in range(random.randint(1, 5)):
        what = random.choice(["reasoning", "content", "calls", "both", "nothing"])
        if what == "calls":
            deltas += _call(random, index)
        elif what == "both":
            deltas.append({"reasoning": "hm", "content": random.choice(["", "so"])})
        elif what == "nothing":
            deltas.append({})
        else:
            deltas += [{what: random.choice(["", "a", "\u00e9\n"])} for _ in range(random.randint(1, 3))]
    return deltas


def _call(random: Random, index: int) -> list[Json]:
    name, arguments = random.choice(CALLS)
    cuts = sorted(random.choices(range(len(arguments) + 1), k=random.randint(0, 4)))
    pieces: list[Json] = [{"arguments": arguments[i:j]} for i, j in pairwise([0, *cuts, len(arguments)])]
    pieces[0]["name"] = name
    calls: list[Json] = [{"index": index, "function": piece} for piece in pieces]
    calls[0]["id"] = f"call_{index}"
    return [{"tool_calls": [call]} for call in calls]


def vllms_events(tools: list[Json], deltas: list[Json]) -> list[Json]:
    processor = SimpleStreamingEventProcessor(tools=TOOLS.validate_python(tools))
    events: list[Any] = []
    for part in (part for delta in deltas for part in split_delta(DeltaMessage.model_validate(delta))):
        state, call = processor.resolve_target_state(part)
        if state.name != "NONE":
            if processor.needs_transition(state, call):
                events += [*processor.close_current(), *processor.open(state, call)]
            events += processor.emit_delta(part, None)  # type: ignore[arg-type]  # no log-probabilities
    return [json.loads(event.model_dump_json(by_alias=True)) for event in [*events, *processor.close_current()]]
