"""Measures how much of a model's files is on this disk already, while vLLM downloads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

DOWNLOAD_DIR = "--download-dir"


def downloaded(model: str, vllm_args: Sequence[str] = ()) -> int:
    """Return the bytes of the model's files in the cache of the Hugging Face hub, half-written ones included."""
    found = 0
    for folder, _, files in os.walk(_cache(vllm_args) / f"models--{model.replace('/', '--')}"):
        for file in files:
            path = Path(folder, file)
            try:
                found += 0 if path.is_symlink() else path.stat().st_size
            except OSError:  # renamed meanwhile: it is complete
                continue
    return found


def _cache(vllm_args: Sequence[str]) -> Path:
    for option, value in zip_longest(vllm_args, vllm_args[1:], fillvalue=""):
        if option == DOWNLOAD_DIR:
            return Path(value)
        if option.startswith(f"{DOWNLOAD_DIR}="):
            return Path(option.partition("=")[2])
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
