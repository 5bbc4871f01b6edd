"""Decides what a caller may see of the record, for routes and for the feed, which the page reads.

A key that is made with `--scope own` sees the rollouts that were opened with it, and numbers made of these alone. What
the trainer, a gate or an optimisation made of everybody's rollouts stays out of what it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["policy", "version", "step", "status"]

# By kind: the core's fields about everybody's rollouts, and paths, with the values for a caller who sees only its own.
OF_ALL: Mapping[Kind, dict[str, Any]] = {
    "policy": {"last_step": None, "collapse": None},
    "version": {"path": None, "metrics": {}, "error": None},
    "step": {"checkpoint": None, "metrics": {}},
    "status": {
        "per_step": None,
        "untrainable": {},
        "standstill": None,
        "uncounted": None,
        "collapse": None,
        "verified": None,
        "plugins": [],
        "recent": None,
    },
}  # fmt: skip


class Sight(NamedTuple):
    """Whose rollouts a caller sees. `key_id`: those that were opened with this key; None: all.

    `siblings`: it sees those that a rollout was compared with, so far as it sees them at all.
    """

    key_id: str | None = None
    siblings: bool = True

    @property
    def own(self) -> bool:
        return self.key_id is not None

    def of(self, kind: Kind, view: dict[str, Any]) -> dict[str, Any]:
        """Return the part of this that the caller may see."""
        return view | OF_ALL[kind] if self.own else view
