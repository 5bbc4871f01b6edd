"""The program of a kind: `play.py KIND` plays an episode, `play.py KIND names` lists environments.

`play.py KIND tasks NAME` prints tasks; it reads their arguments from standard input, as JSON. A kind is a module with
`names()`, `tasks(NAME, ARGUMENTS)` and `play(TASK, ROLLOUT)`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import io
import json
import signal
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from ....client import current, task
from .alone import alone, own_folder

Json = dict[str, Any]
SPLITS = ("train", "held_out")
HELD_OUT = 5  # one question in five
ONLY_RECORDED = {"X-Recording": "only"}  # of a call that nothing may learn from
HERE = Path.cwd()  # before an episode goes to its own folder
MOST_WORDS = 1000  # characters of an error
LONGEST_S = 3600  # an episode that hangs ends then


def main() -> None:
    """Run the program. It reports an error in one line, but an unexpected error of an episode by a traceback."""
    alone()
    name, *rest = sys.argv[1:]
    kind = importlib.import_module(f".{name}", __package__)
    try:
        with own_folder():
            if not rest:
                episode(kind)
                return
            with redirect_stdout(io.StringIO()):  # games print
                if rest[0] == "names":
                    lines = [f"{name:28} {about}".rstrip() for name, about in kind.names()]
                else:
                    lines = tasks(kind, rest[1])
        sys.stdout.writelines(f"{line}\n" for line in lines)
    except Wrong as error:
        sys.exit(str(error))
    except Exception as error:
        if not rest:
            raise
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split())[:MOST_WORDS])


def tasks(kind: Any, name: str) -> list[str]:
    """Return tasks as lines of JSON, for the arguments on standard input. Warn if there are fewer than requested."""
    arguments = Arguments(json.load(sys.stdin))
    lines = [json.dumps(one | arguments.shared) for one in kind.tasks(name, arguments)]
    if len(lines) < arguments.tasks:
        fewer = f"{name} has only {len(lines)} different tasks of split {arguments.split}, not {arguments.tasks}"
        print(fewer, file=sys.stderr)
    return lines


def episode(kind: Any) -> None:
    """Play this rollout's task, post the rewards and end the rollout."""
    signal.alarm(LONGEST_S)
    run = current()
    found = kind.play(task(), run)
    posts: list[Json] = [{"name": name, "reward": value} for name, value in found.measured.items()]
    if len(found.rewards) == 1:  # of one seat: the rollout's
        posts += [{"reward": reward} for reward in found.rewards.values()]
    else:  # of each seat: its last call's
        calls = run.control.get(f"/rollouts/{run.rollout_id}")["calls"]
        last = {call["agent"]: call["call_id"] for call in calls if call["status"] == "ok"}
        posts += [{"reward": value, "call_id": last[seat]} for seat, value in found.rewards.items() if seat in last]
    run.control.post("/reward", [{"rollout_id": run.rollout_id, "final": False, **one} for one in posts], {})
    run.end()


class Scores(NamedTuple):
    """The result of an episode: the reward of each learning seat, by agent name, and other measurements."""

    rewards: dict[str, float]
    measured: dict[str, float]


class Wrong(Exception):
    """The user's input cannot be used. The text says why."""


class Arguments:
    """The arguments of `tasks`. Keys used here are taken out; the others, in `left`, go to the environment."""

    def __init__(self, given: Json) -> None:
        self.left = dict(given)
        self.tasks = self.take("tasks", 100)
        self.seed = self.take("seed", 0)
        self.split = self.take("split", "train")
        if self.split not in SPLITS or self.tasks < 1:
            raise Wrong(f"split must be {' or '.join(SPLITS)}, and tasks at least 1; got {self.split!r}, {self.tasks}")
        sampling = {"temperature": 1.0, "max_tokens": 1024} | self.take("sampling", {})
        # In each task's line, for the program that plays it.
        self.shared: Json = {"model": self.take("model", "policy"), "sampling": sampling}

    def take(self, key: str, default: Any) -> Any:
        """Remove a key and return its value, or else the default. Raises Wrong for a value of the wrong type."""
        value, kind = self.left.pop(key, default), type(default)
        if default is not None and type(value) is not kind:
            raise Wrong(f"{key} must be of type {kind.__name__}, such as {default!r}; got {value!r}")
        return value

    def has(self, text: str) -> bool:
        """Return whether this split has the task that `text` identifies. No task is in both splits."""
        return (int(digest(text), 16) % HELD_OUT == 0) == (self.split == "held_out")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def require_known(name: str, names: Collection[str], what: str) -> None:
    """Raise Wrong, with the nearest names, unless the name is known."""
    if name not in names:
        near = difflib.get_close_matches(name, names, 3) or [one for one in names if name.lower() in one.lower()][:3]
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise Wrong(f"there is no {what} {name!r}{hint}")
