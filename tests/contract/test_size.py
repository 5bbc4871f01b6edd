"""An agent sends its whole history again at every turn; the store has it once, whatever the dialect."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import CHAT, MESSAGES, RESPONSES, Json, said, sampled, scripted, user

TURNS = 50
TOOLS = [{"name": "search", "description": "look for it " * 50}]


def words(source: random.Random, count: int) -> str:
    return " ".join(f"{source.getrandbits(24):06x}" for _ in range(count))


def turn(path: str, name: str, text: str, query: str, result: str) -> tuple[Any, list[Json]]:
    """An answer that calls a tool, and what the agent sends back after it: the answer and the result."""
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": name, "name": "search", "arguments": query}
        part = {"type": "output_text", "text": text}
        output: list[Json] = [{"type": "message", "role": "assistant", "content": [part]}, call]
        return output, [*output, {"type": "function_call_output", "call_id": name, "output": result}]
    if path == MESSAGES:
        used = {"type": "tool_use", "id": name, "name": "search", "input": {"query": query}}
        told = {"type": "tool_result", "tool_use_id": name, "content": result}
        content = [{"type": "text", "text": text}, used]
        return content, [said(content), user([told])]
    made = [{"id": name, "type": "function", "function": {"name": "search", "arguments": query}}]
    message = said(text, tool_calls=made)
    return message, [message, {"role": "tool", "tool_call_id": name, "content": result}]


@pytest.mark.sqlite
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_fifty_turns_take_about_twice_what_is_new_in_them(path: str, tmp_path: Path) -> None:
    """New are every text, once, and each token's id and log-probability. Answers and results are there twice."""
    source, prompt, unique = random.Random(0), list(range(700)), 0
    sizes, name = [], "input" if path == RESPONSES else "messages"
    with scripted(tmp_path) as model:
        request: Json = {"model": "policy" if path == CHAT else "m", "tools": TOOLS, "max_tokens": 9}
        request[name] = [user(words(source, 250))]
        for number in range(TURNS + 1):
            texts = words(source, 160), words(source, 40), words(source, 480)
            answer, back = turn(path, f"call_{number:032x}", *texts)
            ids = list(range(number, number + 120))
            model.ask(f"/rollouts/r{path}", request, sampled(answer, prompt, ids) if path == CHAT else answer)
            if number:
                unique += sum(map(len, texts)) + 3 * 4 * 120 * (path == CHAT)
            if number in (0, TURNS):
                info = model.proxy.run("store", "info", "--json").json
                sizes.append(info["bytes"] - info["free"])
            request = request | {name: [*request[name], *back]}
            prompt = [*prompt, *ids, *range(number, number + 120)]
        last = model.proxy.rollout("r")["calls"][-1]["request"][name]
        assert last == request[name][: len(last)] and len(last) > 2 * TURNS
    assert sizes[1] - sizes[0] < 3 * unique, "sent again, it would be 25 times"
