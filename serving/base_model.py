"""Refuses another base model than the one that the store's policy versions were trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..core.config.root import Config
from ..core.config.server import StoreConfig
from ..core.errors import ConfigError
from ..store.versions import newest_checkpoint

SAVED = "config.json"  # of a checkpoint: every key of the trainer, and policy.model


def check_base_model(config: Config) -> None:
    """Raise ConfigError if `policy.model` is another model than that of the versions in the store.

    A model that is now in another place is known by the last part of its name. The trainer compares weights, too.
    """
    model, before = config.policy.model, trained_model(config.store)
    if model is None or before is None or _last_part(model) == _last_part(before):
        return
    store, directory = config.store.where, config.policy.directory.absolute()
    raise ConfigError(
        f"policy.model is {model}, and the policy versions in {store} were trained on {before}: set it back, or start "
        f"anew with another store.url and policy.directory (now {directory}); `lightning-proxy policy export` takes "
        "the trained versions along"
    )


def trained_model(config: StoreConfig) -> str | None:
    """Return the model that the store's versions were trained on; None if there are none, or it is not known."""
    checkpoint = newest_checkpoint(config)
    try:
        saved: Any = None if checkpoint is None else json.loads((Path(checkpoint) / SAVED).read_text())
    except (OSError, ValueError):  # opening it for good will give the error
        return None
    model = saved.get("policy.model") if isinstance(saved, dict) else None
    return model if isinstance(model, str) else None


def _last_part(model: str) -> str:
    return Path(model).expanduser().name
