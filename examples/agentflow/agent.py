"""AgentFlow in small: a planner that is a model; an executor, a verifier and a generator that are programs.

Run by `lightning-proxy run`. What the programs do is recorded as actions of their names.
"""

import random
import re
from collections.abc import Callable
from math import prod

import tasks
from ask import ask

from lightning_proxy import client

SYSTEM = "Write the next step: facts NOUN, calc EXPRESSION or rhyme NOUN."
TURNS = 3
ERRS = 0.1  # how often the verifier says the contrary
Tell = Callable[[str, str, object], None]


def execute(line: str) -> str:
    """What the tool of a line says."""
    tool, _, argument = line.partition(" ")
    if tool == "facts":
        return str(tasks.LEGS.get(argument, "unknown"))
    if tool == "calc" and re.fullmatch(r"\d{1,4}( [*+] \d{1,4})*", argument):
        return str(sum(prod(map(int, term.split("*"))) for term in argument.split("+")))
    return f"nothing rhymes with {argument}" if tool == "rhyme" else "error"


def is_enough(task: tasks.Task, memory: list[str], source: random.Random) -> bool:
    """The verifier: all facts are there and something was computed of them. It does not know the answer."""
    is_computed = re.fullmatch(r"calc .* -> \d+", memory[-1]) is not None
    true = is_computed and task["counts"].keys() <= tasks.known(memory).keys()
    return true != (source.random() < ERRS)


def generate(memory: list[str]) -> str:
    """The last number that was computed; nothing if there is none."""
    numbers = [line.rpartition(" -> ")[2] for line in memory if line.startswith("calc ")]
    return numbers[-1] if numbers else ""


def flow(task: tasks.Task, plan: Callable[[list[str]], str], tell: Tell, source: random.Random) -> str:
    """The answer, after at most three turns of planner, executor and verifier."""
    memory: list[str] = []
    for _ in range(TURNS):
        line = plan(memory)
        memory.append(f"{line} -> {execute(line)}")
        tell("executor", line, memory[-1])
        enough = is_enough(task, memory, source)
        tell("verifier", memory[-1], enough)
        if enough:
            break
    answer = generate(memory)
    tell("generator", "\n".join(memory), answer)
    return answer


def solve(task: tasks.Task) -> str:
    """The flow's answer to `task["question"]`."""

    def plan(memory: list[str]) -> str:
        text, call_id = ask("planner", SYSTEM, "\n".join((task["question"], *memory)), max_tokens=24)
        line = text.partition("\n")[0]
        # Counts where trainer.reward_weights names it.
        worth = tasks.progress(task["counts"], memory, line)
        client.emit_reward(worth, name="progress", call_id=call_id, final=False)
        return line

    def tell(agent: str, given: str, result: object) -> None:
        with client.agent(agent):
            client.emit_action(agent, given, result)

    return flow(task, plan, tell, random.Random())
