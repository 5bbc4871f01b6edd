"""Decides how new weights reach vLLM, and checks that the store's versions fit `policy.model`."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

from ..core.config.root import Config
from ..core.config.server import StoreConfig
from ..core.errors import ConfigError
from ..core.records import PublishMode
from ..store.opening import first_value
from ..store.store import Store
from ..store.versions import DECIDED, NEWEST_CHECKPOINT

log = logging.getLogger(__name__)

DEVICES = Path("/dev")
SAVED = "config.json"  # of a checkpoint: every key of the trainer, and policy.model


def has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU that we may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if any(re.fullmatch(r"nvidia\d+", file.name) for file in DEVICES.glob("nvidia*")):
        return True
    return (DEVICES / "dxg").exists() and shutil.which("nvidia-smi") is not None


def publish_mode(config: Config) -> PublishMode:
    """Return how new weights reach vLLM: as configured, or for `auto` as recorded in the store.

    If nothing is recorded, this is `lora` on a GPU, and `merged` on a CPU, where LoRA makes vLLM ten times slower. For
    `auto`, full weights are always `merged`, and weights that a service trains are always `lora`. Raises ConfigError
    if `policy.adapters` is set but `auto` means `merged`.
    """
    if config.policy.publish != "auto":
        return config.policy.publish
    if config.trainer.weights == "full":
        return "merged"
    if not config.trainer.trains_here:
        return "lora"
    mode: PublishMode = first_value(config.store, DECIDED) or ("lora" if has_gpu() else "merged")
    if mode == "merged" and config.policy.adapters:
        raise ConfigError(
            "policy.adapters needs policy.publish: lora; here, policy.publish: auto means merged (because the store "
            "records it or there is no GPU), and merged weights hold one adapter"
        )
    return mode


async def decide(config: Config, store: Store, who: str) -> PublishMode:
    """Return the mode in which `who` publishes, recording it if needed. Log a warning if another was recorded."""
    mode = publish_mode(config)
    if mode == "merged" and config.merged_obstacle is not None:
        raise ConfigError(config.merged_obstacle)
    if (warning := await other_mode(store, who, mode)) is not None:
        log.warning("%s", warning)
    await store.versions.decide_mode(mode, who, configured=config.policy.publish != "auto")
    return mode


async def other_mode(store: Store, who: str, mode: PublishMode) -> str | None:
    """Return a warning if `who` publishes or serves in a mode other than the store's."""
    decided = await store.versions.mode()
    if decided is None or decided.mode == mode:
        return None
    since = datetime.fromtimestamp(decided.at).strftime("%Y-%m-%d %H:%M")
    return (
        f"policy.publish is {mode} for this {who}, and {decided.mode} for the {decided.decided_by} since {since}: give "
        "the proxy, the trainer and vLLM the same policy.publish, and start them again; versions published in one mode "
        "are not served in the other"
    )


def check_base_model(config: Config) -> None:
    """Raise ConfigError if the store's versions were trained on a model whose name differs from `policy.model`'s."""
    model, before = config.policy.model, trained_model(config.store)
    if model and before and Path(model).expanduser().name != Path(before).expanduser().name:
        store, directory = config.store.where, config.policy.directory.absolute()
        raise ConfigError(
            f"policy.model is {model}, and the policy versions in {store} were trained on {before}: set it back, or "
            f"start over with another store.url and policy.directory (now {directory}); `lightning-proxy policy "
            "export` saves the trained versions first"
        )


def trained_model(config: StoreConfig) -> str | None:
    """Return the model that the store's versions were trained on; None if there are none or it is unknown."""
    if (checkpoint := first_value(config, NEWEST_CHECKPOINT)) is None:
        return None
    try:
        model = json.loads((Path(checkpoint) / SAVED).read_text())["policy.model"]
    except (OSError, ValueError, LookupError, TypeError):  # the trainer reports the error when it loads the checkpoint
        return None
    return model if isinstance(model, str) else None
