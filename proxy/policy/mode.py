"""Decides how new weights reach vLLM on this machine when `policy.publish` is `auto`."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ..config.root import Config
from ..errors import ConfigError
from ..types import PublishMode

DEVICES = Path("/dev")


def has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU that we may use. Device files are looked at, so torch is not needed.

    A container may have any of them: /dev/nvidia3 alone, say.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if any(re.fullmatch(r"nvidia\d+", file.name) for file in DEVICES.glob("nvidia*")):
        return True
    return (DEVICES / "dxg").exists() and shutil.which("nvidia-smi") is not None


def publish_mode(config: Config) -> PublishMode:
    """Return the configured publish mode; for `auto`, `lora` on a GPU and `merged` on a CPU.

    On a CPU, a LoRA adapter makes vLLM ten times slower. ConfigError if it is `merged` where agents have adapters of
    their own.
    """
    if config.policy.publish != "auto":
        return config.policy.publish
    if has_gpu():
        return "lora"
    if config.policy.adapters:
        raise ConfigError(
            "policy.adapters needs policy.publish: lora; without a GPU, policy.publish: auto means merged, and merged "
            "weights are those of one adapter"
        )
    return "merged"
