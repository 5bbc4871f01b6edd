"""The teacher: calls the calculator, rightly 60 % of the time, and repeats its result."""

import json
import random
from typing import Any

Json = dict[str, Any]
RIGHT = 0.6
MISREAD = str.maketrans("+-*", "*+-")


def reply(request: Json, task: Json, source: random.Random) -> Json:
    """The next message."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return {"content": last["content"]}
    asked = task["expression"] if source.random() < RIGHT else task["expression"].translate(MISREAD)
    call = {"name": "calculator", "arguments": json.dumps({"expression": asked})}
    return {"tool_calls": [{"id": f"call_{source.getrandbits(60)}", "type": "function", "function": call}]}
