"""A werewolf game in small: the policy plays seer and villagers, a program is the wolf, and the referee knows all.

Run by `lightning-proxy run`. A name that is not legal costs its call a quarter, and a legal one is drawn in its place.
"""

import random
from collections.abc import Callable, Sequence

import tasks
from ask import ask

from lightning_proxy import client

SYSTEM = "Werewolf: one of four players is the wolf. Answer with a name."
Choose = Callable[[str, str, Sequence[str]], str]


def game(task: tasks.Task, choose: Choose, source: random.Random) -> str:
    """Who is hanged after one night. `choose(seat, prompt, legal names)` is a player's line."""
    players = dict(zip(task["players"], task["roles"], strict=True))
    seer, wolf = (next(name for name, role in players.items() if role == wanted) for wanted in ("seer", "wolf"))
    others = [name for name in players if name != seer]

    def turn(seat: str, name: str, told: str, verb: str, legal: Sequence[str]) -> str:
        prompt = f"{task['question']} You are {name}, a {seat.partition('-')[0]}. {told}{verb} {' or '.join(legal)}."
        return choose(seat, prompt, legal)

    looked = turn("seer", seer, "", "Look at", others)
    seen = f"You saw the wolf: {looked}. " if looked == wolf else f"{looked} is innocent. "
    accused = turn("seer", seer, seen, "Accuse", others)
    framed = source.choice([name for name in players if name not in (wolf, accused)])
    lie = tasks.LIES if source.random() < tasks.TELL else tasks.ACCUSES
    accusations = [(accused, tasks.ACCUSES.format(accused)), (framed, lie.format(framed))]
    source.shuffle(accusations)
    heard = "".join(f'"{words}" ' for _, words in accusations)
    legal = [name for name, _ in accusations]
    villagers = [name for name, role in players.items() if role == "villager"]
    votes = [turn(f"villager-{i}", name, heard, "Vote for", legal) for i, name in enumerate(villagers, 1)]
    return source.choice(votes)


def solve(task: tasks.Task) -> str:
    """Who is hanged in a game that the policy plays."""
    source = random.Random()

    def choose(seat: str, prompt: str, legal: Sequence[str]) -> str:
        name, call_id = ask(seat, SYSTEM, prompt, max_tokens=6)
        if name in legal:
            return name
        client.emit_reward(tasks.ILLEGAL, call_id=call_id, final=False, comment=f"answered {name[:80]!r}")
        return source.choice(legal)

    return game(task, choose, source)
