"""The program of a kind's environment: `play.py KIND` plays an episode; with `names` or `tasks NAME JSON` it lists."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import Any

from ....client import Rollout, current
from .alone import alone
from .arguments import Arguments, Json, Wrong

MOST_WORDS = 1000  # characters of an error


def main() -> None:
    """Run the program. What is wrong is one line; what fails in an episode is a traceback, its last line the reason."""
    alone()
    name, *rest = sys.argv[1:]
    kind = importlib.import_module(f".{name}", __package__)
    try:
        if not rest:
            episode(kind)
            return
        with own_folder(), redirect_stdout(io.StringIO()):  # games print
            lines = list(names(kind) if rest[0] == "names" else tasks(kind, *rest[1:]))
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


def tasks(kind: Any, name: str, given: str) -> Iterator[str]:
    """Yield the tasks' lines. Say so if there are fewer than asked for."""
    arguments = Arguments(json.loads(given))
    wanted, made = arguments.tasks, 0
    for task in kind.tasks(name, arguments):
        yield json.dumps(task | arguments.shared)
        made += 1
    if made < wanted:
        print(f"{name} has {made} different tasks of split {arguments.split}, not {wanted}", file=sys.stderr)


def episode(kind: Any) -> None:
    """Play the task of this rollout, post its rewards, and end it."""
    task, run = json.loads(os.environ["LIGHTNING_TASK"]), current()
    with own_folder(), limited(task["limit_s"]):
        found = kind.play(task, run)
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


@contextmanager
def own_folder() -> Iterator[None]:
    """Work in an empty folder, which is also HOME and where temporary files go. It is removed at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    with tempfile.TemporaryDirectory(prefix="lightning-environment-", ignore_cleanup_errors=True) as folder:
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        os.chdir(folder)
        yield


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after this time, and again each second: others' code may catch it."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the episode took longer than {seconds:g} s (limit_s in --environment-args)")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
