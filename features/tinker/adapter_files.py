"""Writes the adapter that a Tinker service returns as a directory in PEFT's format, which vLLM loads."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from peft import LoraConfig
from safetensors.torch import load, save_file
from torch import Tensor

from ...core.errors import PublishError
from ...trainer.checkpoint import atomic_directory
from ...trainer.weights import MARKER

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")

Weights = dict[str, Tensor]


def files_of_archive(content: bytes) -> dict[str, bytes]:
    """Return the adapter's files in a tar archive, by their last name. Nothing is extracted to the disk."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        found = {}
        for member in archive:
            name = PurePosixPath(member.name).name
            if name in (WEIGHTS_FILE, CONFIG_FILE) and (file := archive.extractfile(member)) is not None:
                found[name] = file.read()
        return found


def read_adapter(files: Mapping[str, bytes]) -> tuple[Weights, dict[str, Any]]:
    """Return the weights under PEFT's names, and the service's configuration. PublishError if they are others."""
    missing = [name for name in (WEIGHTS_FILE, CONFIG_FILE) if name not in files]
    if missing:
        raise PublishError(
            f"the training service returned no {' and no '.join(missing)}: {', '.join(files) or 'nothing'}"
        )
    weights = load(files[WEIGHTS_FILE])
    unknown = sorted(name for name in weights if not _NAME.fullmatch(name))
    if unknown or not weights:
        raise PublishError(
            f"the training service returned weights that are no LoRA adapter in PEFT's format: {unknown[:3]}"
        )
    return weights, json.loads(files[CONFIG_FILE])


def write_adapter(weights: Weights, theirs: Mapping[str, Any], model: str, directory: Path) -> None:
    """Write the adapter of `model`. `directory` appears atomically, with a marker file."""
    targets = {match[1].rsplit(".", 1)[-1] for name in weights if (match := _NAME.fullmatch(name))}
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=int(theirs["r"]),
        lora_alpha=int(theirs["lora_alpha"]),
        target_modules=sorted(targets),
        base_model_name_or_path=model,
        inference_mode=True,
    )
    with atomic_directory(directory) as temporary:
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        config.save_pretrained(str(temporary))
        (temporary / MARKER).touch()
