"""The trainer's features: what they are asked before anything is loaded, and who may have a hook."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin, check, open_plugins


class _Guiding(TrainerPlugin):
    closed = 0

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        async def guide(batch: Any) -> Any:
            return batch

        yield TrainerHooks(guide=guide)
        self.closed += 1


def core() -> Any:
    nothing: Any = None
    return TrainerCore(Config(), nothing, nothing, Run())


async def test_the_hooks_of_all_rooms_come_together_and_are_closed_at_the_end() -> None:
    guiding = _Guiding(Config())
    async with open_plugins([TrainerPlugin(Config()), guiding], core()) as hooks:
        assert hooks.guide is not None and hooks.sift is hooks.publisher is hooks.tune is None
        assert not guiding.closed
    assert guiding.closed


async def test_two_features_with_the_same_hook_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 features have the trainer's hook guide, which only one may have"):
        async with open_plugins([_Guiding(Config()), _Guiding(Config())], core()):
            pass


def test_a_method_of_fine_tuning_is_refused_under_a_launcher() -> None:
    with pytest.raises(ConfigError, match="--method kto runs in one process: start it without a launcher"):
        check(Config(), Run("kto", launched=True))
    check(Config(), Run(launched=True))


def test_torch_is_not_loaded_to_know_the_methods() -> None:
    """It reads the environment once, which `train` prepares after it has checked the configuration."""
    code = (
        "import sys; from lightning_proxy.core.config.root import Config\n"
        "from lightning_proxy.trainer.plugins import Run, check, methods\n"
        "check(Config(), Run('sft')); print(*methods(), 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["rl", "sft", "dpo", "kto", "False"]
