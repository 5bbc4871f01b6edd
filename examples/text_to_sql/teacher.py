"""The teacher: its first SQL is right 60 % of the time, its check always is, its second SQL mostly."""

import random
from typing import Any

import tasks

Json = dict[str, Any]
RIGHT = {"Write": 0.6, "Rewrite": 0.85}


def reply(request: Json, task: Json, source: random.Random) -> Json:
    """The next message. The agent that asks is known by the first word that it is told."""
    system, asked = (message["content"] for message in request["messages"])
    asks = system.split()[0]
    if asks == "Check":
        sql = asked.split("\n")[1]
        return {"content": "yes" if tasks.score(task, sql)[0] else "no"}
    right = source.random() < RIGHT[asks]
    return {"content": task["sql"] if right else source.choice(tasks.near_misses(task))}
