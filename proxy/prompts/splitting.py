"""Splits the rollouts that begin to use a prompt during a test between its two versions."""

from __future__ import annotations

from ..config.root import Config
from ..gate.sides import sides_of
from ..types import RolloutName
from .config import PromptKeys
from .prompt_tests import PromptTests


class PromptSplit:
    """Chooses the version of a prompt that a rollout keeps."""

    def __init__(self, config: Config, tests: PromptTests) -> None:
        self._gate, self._group_size = PromptKeys.of(config).prompts.gate, config.trainer.group_size
        self._tests = tests

    async def __call__(self, rollout: RolloutName, name: str, live: int, *, opens: bool = True) -> int:
        """Return the version for a rollout that uses the prompt for the first time. `opens`: it may be unknown yet."""
        test = await self._tests.of(name)
        if test is None or test.against != live or rollout.mode == "eval":
            return live
        sides = sides_of(test, self._gate, self._group_size)
        return await self._tests.assign(test, rollout, self._gate.max_rollouts, sides, opens=opens)
