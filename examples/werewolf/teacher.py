"""The teacher knows nothing but the form: it answers a random legal name. So RL begins with chance."""

import random
from typing import Any

Json = dict[str, Any]


def reply(request: Json, _: Json, source: random.Random) -> Json:
    """One of the names that the prompt ends with."""
    legal = request["messages"][-1]["content"].removesuffix(".").split(" or ")
    return {"content": source.choice([names.split()[-1] for names in legal])}
