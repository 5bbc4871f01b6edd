"""The program of a kind's environment: `play.py KIND` plays an episode; `names`, or `tasks NAME` and JSON, lists."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

from ....client import Rollout, current, task
from .alone import alone, own_folder
from .arguments import Arguments, Json, Wrong

MOST_WORDS = 1000  # characters of an error


def main() -> None:
    """Run the program. What is wrong is one line; what fails in an episode is a traceback, its last line the reason."""
    alone()
    name, *rest = sys.argv[1:]
    kind = importlib.import_module(f".{name}", __package__)
    try:
        with own_folder():
            if not rest:
                episode(kind)
                return
            with redirect_stdout(io.StringIO()):  # games print
                lines = list(names(kind) if rest[0] == "names" else tasks(kind, rest[1]))
        sys.stdout.writelines(f"{line}\n" for line in lines)
    except Wrong as error:
        sys.exit(str(error))
    except Exception as error:
        if not rest:
            raise
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split())[:MOST_WORDS])


def names(kind: Any) -> Iterator[str]:
    """Yield a line for each environment of the kind."""
    for name, about in kind.names():
        yield f"{name:28} {about}".rstrip()


def tasks(kind: Any, name: str) -> Iterator[str]:
    """Yield the tasks' lines, for the arguments on standard input. Say so if there are fewer than asked for."""
    arguments = Arguments(json.load(sys.stdin))
    wanted, made = arguments.tasks, 0
    for one in kind.tasks(name, arguments):
        yield json.dumps(one | arguments.shared | {"environment": f"{kind.__name__.rpartition('.')[2]}:{name}"})
        made += 1
    if made < wanted:
        print(f"{name} has {made} different tasks of split {arguments.split}, not {wanted}", file=sys.stderr)


def episode(kind: Any) -> None:
    """Play the task of this rollout, post its rewards, and end it. What it started ends with it: `run` sees to that."""
    played, run = task(), current()

    def late(*_: object) -> None:
        said = f"the episode took longer than {played['limit_s']:g} s (limit_s in --environment-args)"
        print(said, file=sys.stderr, flush=True)
        os._exit(1)  # others' threads may never end

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, played["limit_s"])
    run.event("note", name="environment", value=played.get("environment"))
    found = kind.play(played, run)
    measured = [{"name": name, "reward": value} for name, value in found.measured.items()]
    posts = [*measured, *_rewards(found.rewards, run)]
    run.control.post("/reward", [{"rollout_id": run.rollout_id, "final": False, **one} for one in posts], {})
    run.end()


def _rewards(seats: dict[str, float], run: Rollout) -> list[Json]:
    """The reward of one seat is the rollout's; that of each of several is its last call's."""
    if len(seats) == 1:
        return [{"reward": reward} for reward in seats.values()]
    calls = run.control.get(f"/rollouts/{run.rollout_id}", {})["calls"]
    last = {call["agent"]: call["call_id"] for call in calls if call["status"] == "ok"}
    return [{"reward": reward, "call_id": last[seat]} for seat, reward in seats.items() if seat in last]
