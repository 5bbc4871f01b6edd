"""The teacher: its first SQL is right 60 % of the time, its second SQL mostly; it checks whether there is a result."""

import random
from typing import Any

import tasks

Json = dict[str, Any]
NO_RESULT = ("error", "nothing", "None")
RIGHT = {"Write": 0.6, "Rewrite": 0.85}


def reply(request: Json, task: Json, source: random.Random) -> Json:
    """The next message. The agent that asks is known by the first word that it is told."""
    system, asked = (message["content"] for message in request["messages"])
    asks = system.split()[0]
    if asks == "Check":
        result = asked.split("\n", 2)[2]
        return {"content": "no" if result.startswith(NO_RESULT) else "yes"}
    right = source.random() < RIGHT[asks]
    return {"content": task["sql"] if right else source.choice(tasks.near_misses(task))}
