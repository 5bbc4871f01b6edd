"""Which features this checkout has. Each can be deleted; tests of what it promises are skipped then."""

from __future__ import annotations

from support.paths import ROOT

# Commands, and what they are named after, that a feature brings.
COMMANDS = {
    "costs": "costs", "dashboard": "page", "environments": "environments", "experiment": "experiment",
    "optimize": "optimize", "prompts": "prompts", "rescore": "judge", "rewards": "judge", "rollouts rate": "judge",
}  # fmt: skip


def has(feature: str) -> bool:
    return (ROOT / "features" / feature).is_dir()


def is_there(command: str) -> bool:
    """Whether no feature that was deleted had this command."""
    return all(has(feature) for words, feature in COMMANDS.items() if f"{command} ".startswith(f"{words} "))
