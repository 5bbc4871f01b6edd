"""An agent sends its whole history again at every turn; the store has it once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from contract.scripted import CHAT, Json, calls, sampled, scripted, told, user

TURNS = 50
TOOLS = [{"name": "search", "description": "look for it " * 50}]


def words(source: random.Random, count: int) -> str:
    return " ".join(f"{source.getrandbits(24):06x}" for _ in range(count))


@pytest.mark.sqlite
def test_fifty_turns_take_about_twice_what_is_new_in_them(tmp_path: Path) -> None:
    """New are every text, once, and each token's id and log-probability. Answers and results are there twice."""
    source, prompt, unique, sizes = random.Random(0), list(range(700)), 0, []
    with scripted(tmp_path) as model:
        messages: list[Json] = [user(words(source, 250))]
        for number in range(TURNS + 1):
            text, query, result = words(source, 160), words(source, 40), words(source, 480)
            answer = calls((f"call_{number:032x}", {"query": query}), name="search", text=text)
            ids = list(range(number, number + 120))
            request = {"model": "policy", "tools": TOOLS, "max_tokens": 9, "messages": messages}
            model.ask(f"/rollouts/r{CHAT}", request, sampled(answer, prompt, ids))
            if number:
                unique += len(text + query + result) + 3 * 4 * 120
            if number in (0, TURNS):
                info = model.proxy.run("store", "info", "--json").json
                sizes.append(info["bytes"] - info["free"])
            messages = [*messages, answer, told(f"call_{number:032x}", result)]
            prompt = [*prompt, *ids, *range(number, number + 120)]
        last = model.proxy.rollout("r")["calls"][-1]["request"]["messages"]
        assert last == messages[:-2] and len(last) == 2 * TURNS + 1
    assert sizes[1] - sizes[0] < 3 * unique, "sent again, it would be 25 times"
