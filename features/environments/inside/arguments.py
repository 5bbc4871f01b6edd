"""What `--environment-args` says, and what the kinds share to make tasks of it."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]
SPLITS = ("train", "held_out")
HELD_OUT = 5  # one question in so many
ONLY_RECORDED = {"X-Recording": "only"}  # of a call that nothing may learn from
HERE = Path.cwd()  # before an episode goes to its own folder


class Scores(NamedTuple):
    """What an episode found: the reward of each seat that learns, by the agent's name, and what else was measured."""

    rewards: dict[str, float]
    measured: dict[str, float]


class Wrong(Exception):
    """What the user wrote cannot be used. The text says why."""


class Arguments:
    """The keys of ours are taken one by one; what is `left` is for the environment."""

    def __init__(self, given: Json) -> None:
        self.left = dict(given)
        self.tasks = self.take("tasks", 100)
        self.seed = self.take("seed", 0)
        self.split = self.take("split", "train")
        if self.split not in SPLITS or self.tasks < 1:
            raise Wrong(f"split is {' or '.join(SPLITS)}, and tasks is 1 or more")
        sampling = {"temperature": 1.0, "max_tokens": 1024} | self.take("sampling", {})
        limit_s = self.take("limit_s", 600.0)
        if limit_s <= 0:
            raise Wrong(f"limit_s is more than 0, got {limit_s:g}")
        # In each task's line, for the program that plays it.
        self.shared: Json = {
            "model": self.take("model", "policy"), "sampling": sampling, "limit_s": limit_s,
        }  # fmt: skip

    def take(self, key: str, default: Any) -> Any:
        """Return the key's value. Wrong if it is of another type than the default; with None, any is right."""
        value = self.left.pop(key, default)
        kind = type(default)
        if isinstance(value, int) and kind is float:
            value = float(value)
        if default is not None and type(value) is not kind:
            raise Wrong(f"{key} is {kind.__name__}, as in {default!r}; got {value!r}")
        return value

    def has(self, text: str) -> bool:
        """Return whether this split has the question: its hash decides, so none is in both."""
        return (int(digest(text), 16) % HELD_OUT == 0) == (self.split == "held_out")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def require_known(name: str, names: Collection[str], what: str) -> None:
    """Raise Wrong with the names that are nearest."""
    if name not in names:
        near = difflib.get_close_matches(name, names, 3) or [one for one in names if name.lower() in one.lower()][:3]
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise Wrong(f"there is no {what} {name!r}{hint}")
