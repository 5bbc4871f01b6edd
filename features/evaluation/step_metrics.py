"""The metrics of an evaluation (`evaluation`), in trackers alone: name, unit and meaning, by group."""

from __future__ import annotations

GROUPS = {
    "eval": (
        ("eval_reward", "reward", "mean reward of held-out tasks"),
        ("eval_low", "reward", "lower end of its 95 % interval"),
        ("eval_high", "reward", "upper end of its 95 % interval"),
        ("eval_step", "number", "the step that made the evaluated version"),
    ),
}  # fmt: skip
