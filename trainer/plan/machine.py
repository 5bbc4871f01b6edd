"""Reads the inputs of a plan: the model's config.json, and the memory of this machine's GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .memory import GIB

ASKING_S = 20.0
ASK = ("nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits")
# Of cgroups, versions 2 and 1.
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

Cards = dict[int, float]


def cards() -> Cards:
    """Return the memory of each visible GPU in GiB, by its number; nothing without nvidia-smi."""
    if shutil.which(ASK[0]) is None:
        return {}
    try:
        listing = subprocess.run(ASK, check=True, capture_output=True, text=True, timeout=ASKING_S).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {int(index): float(mib) / 1024 for index, mib in re.findall(r"^(\d+), *([\d.]+)", listing, re.MULTILINE)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return {int(n): found[int(n)] for n in visible.split(",") if n.strip().isdigit() and int(n) in found}


def machine_memory() -> float:
    """Return this machine's memory in GiB, or what its container may use of it."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # another kernel; `max`
            limits.append(float(Path(file).read_text()))
    return min(limits) / GIB


def cards_like(text: str) -> Cards:
    """Return the cards that `8x80` describes: eight GPUs of 80 GiB. `24` is one card; `1x24,1x48` are two."""
    found: list[float] = []
    for part in text.lower().split(","):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)", part.strip())
        if match is None or not float(match[2]):
            raise ConfigError(f"--gpus: {text!r} is not like 1x24 or 8x80 (cards x GiB of each)")
        found += [float(match[2])] * int(match[1] or 1)
    if not found:
        raise ConfigError(f"--gpus: {text!r} has no card")
    return dict(enumerate(found))


def model_config(model: str, *, download: bool = True) -> dict[str, Any] | None:
    """Return the model's config.json, from its directory or from the hub; None if it cannot be had.

    Without `download`, only what was fetched before is looked at.
    """
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else _from_hub(model, download)
    try:
        found = json.loads(file.read_text()) if file else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _from_hub(model: str, download: bool) -> Path | None:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        return Path(hf_hub_download(model, "config.json")) if download else None
    except Exception:  # no such package, no network, no such model: loading the model gives a better message
        return None
