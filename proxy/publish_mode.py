"""How new weights reach vLLM on this machine: the one place that resolves `policy.publish: auto`."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning_proxy.proxy.config import Config
from lightning_proxy.proxy.types import PublishMode


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is there to be used; looks at device files only, so that no part needs torch to know."""
    return Path("/dev/nvidia0").exists() or (Path("/dev/dxg").exists() and shutil.which("nvidia-smi") is not None)


def publish_mode(config: Config) -> PublishMode:
    """`lora` on a GPU, `merged` on a CPU (where a LoRA adapter makes vLLM ten times slower), unless configured."""
    if config.policy.publish != "auto":
        return config.policy.publish
    return "lora" if has_gpu() else "merged"
