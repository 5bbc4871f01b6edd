"""How new weights reach vLLM on this machine: the one place that resolves `policy.publish: auto`."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..config.root import Config
from ..errors import ConfigError
from ..types import PublishMode


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is there to be used; looks at device files only, so that no part needs torch to know."""
    return Path("/dev/nvidia0").exists() or (Path("/dev/dxg").exists() and shutil.which("nvidia-smi") is not None)


def publish_mode(config: Config) -> PublishMode:
    """`lora` on a GPU, `merged` on a CPU (where a LoRA adapter makes vLLM ten times slower), unless configured.

    ConfigError if it is `merged` where agents have adapters of their own.
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
