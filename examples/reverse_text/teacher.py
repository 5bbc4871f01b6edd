"""The teacher: writes the text backwards, and 40 % of the time only its words."""

import random
from typing import Any

Json = dict[str, Any]
RIGHT = 0.6


def reply(request: Json, task: Json, source: random.Random) -> Json:
    """The next message."""
    text = task["question"]
    answer = text[::-1] if source.random() < RIGHT else " ".join(text.split()[::-1])
    return {"content": f"<reversed_text>{answer}</reversed_text>"}
