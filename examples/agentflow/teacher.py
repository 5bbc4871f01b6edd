"""The teacher knows nothing but the form: it writes a random legal line. So RL begins with chance."""

import random
from typing import Any

import tasks

Json = dict[str, Any]


def reply(request: Json, task: Json, source: random.Random) -> Json:
    """A random tool, and a random one of its legal lines."""
    memory = request["messages"][-1]["content"].splitlines()[1:]
    return {"content": source.choice(source.choice(tasks.legal(task["counts"], memory)))}
