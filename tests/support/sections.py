"""Two sections of the configuration, with the keys that side rooms add."""

from __future__ import annotations

from lightning_proxy.core.config.root import Config

_CONFIG = Config()
PolicyConfig, TrainerConfig = type(_CONFIG.policy), type(_CONFIG.trainer)
