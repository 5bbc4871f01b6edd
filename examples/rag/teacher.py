"""The teacher: searches twice and copies the name that ends a passage; 60 % of its rollouts are without a mistake."""

import json
import random
import re
from typing import Any

import tasks

Json = dict[str, Any]
RIGHT = 0.6 ** (1 / 3)  # of each of the three messages


def reply(request: Json, task: Json, source: random.Random) -> Json:
    """The next message: the first search, the second or the answer."""
    found = [str(message["content"]) for message in request["messages"] if message["role"] == "tool"]
    right = source.random() < RIGHT
    if not found:
        return _search(task["hops"][0] if right else _useless(task, source), source)
    name = last_name(found[-1])
    if len(found) == 1 and right:
        return _search(task["hops"][1].replace(task["bridge"], name), source)
    if len(found) == 1:
        return {"content": tagged(source.choice((name, source.choice(tasks.TOWNS))))}
    return {"content": tagged(name) if right else source.choice((name, found[-1]))}


def last_name(passage: str) -> str:
    """`Ann Moor` of `The author of The Blue Tower is Ann Moor.`"""
    return re.sub(r"^.* (?:is|in|to|into) (?:the )?|\.$", "", passage)


def tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _useless(task: Json, source: random.Random) -> str:
    """A query that does not say what is asked of the subject, or not of which."""
    role, subject = task["hops"][0].split(" of ", 1)
    return source.choice((role, subject))


def _search(query: str, source: random.Random) -> Json:
    call = {"name": "search", "arguments": json.dumps({"query": query})}
    return {"tool_calls": [{"id": f"call_{source.getrandbits(60)}", "type": "function", "function": call}]}
