"""Writes checkpoints atomically and reads them. Settings that changed since a checkpoint are logged or refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ..core.config.policy import PolicyConfig
from ..core.config.section import Section
from ..core.config.trainer import TrainerConfig
from ..core.errors import ConfigError, NotSaved
from ..store.store import Store

CONFIG_FILE = "config.json"
WEIGHTS = "weights of policy.model"
ADAPTERS = "policy.adapters, their names"
RATE = "trainer.learning_rate"

# The weights and optimizer state in a checkpoint fit these values only.
FIXED = ("trainer.weights", ADAPTERS, WEIGHTS)
FIXED_OF_LORA = ("trainer.lora_rank", "trainer.lora_alpha", "trainer.lora_targets")
FINGERPRINTED = 256  # values of each tensor
Saved = dict[str, Any]


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory to fill. It takes the place of `target` when the block ends without an error.

    Everything is on disk before the rename, so a directory under its final name is complete, even after a power cut.
    Raises NotSaved if the disk is full or cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = (target.with_name(f".{target.name}.{suffix}") for suffix in ("tmp", "old"))
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*"), reverse=True):
            _sync(path)
        _sync(temporary)
        if target.exists():
            target.rename(replaced)
        temporary.rename(target)
        _sync(target.parent)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)  # half-written files only take space
        of_torch = any(name in str(error) for name in ("inline_container", "PytorchStreamWriter"))
        if of_torch or isinstance(error, OSError | SafetensorError):
            raise NotSaved(f"{target} cannot be written: {error}") from error
        raise
    shutil.rmtree(replaced, ignore_errors=True)


async def prune_checkpoints(store: Store, keep: int) -> None:
    """Delete all checkpoints except the newest `keep` and those of versions with files."""
    for step, checkpoint in await store.steps.old_checkpoints(keep):
        await asyncio.to_thread(shutil.rmtree, checkpoint, ignore_errors=True)
        await store.steps.forget_checkpoint(step)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def saved_config(trainer: TrainerConfig, policy: PolicyConfig, weights: str) -> Saved:
    """Return the settings to save with a checkpoint, by dotted name. API keys are left out."""
    keys: Saved = {"policy.adapters": policy.adapters, ADAPTERS: sorted(policy.adapters)}
    for name, section in (("trainer", trainer), *((section.name, section) for section in trainer.sections)):
        keys |= _flat(name, section)
    return keys | {"policy.model": policy.model, WEIGHTS: weights}


def write_config(directory: Path, config: Saved, rate: float) -> None:
    """Write the configuration, with the learning rate that `auto` stands for."""
    (directory / CONFIG_FILE).write_text(json.dumps(config | {RATE: rate}, indent=1))


def saved_rate(directory: Path) -> float | None:
    """Return the learning rate that a checkpoint was trained with; None if its configuration does not say."""
    rate = _read_config(directory).get(RATE)
    return None if rate is None else float(rate)


def config_changes(directory: Path, config: Saved) -> list[str]:
    """Return `key old → new` for each setting that changed since a checkpoint.

    Raises ConfigError if the saved configuration is damaged, or has a base model, adapters or `trainer.weights` (for
    LoRA also a rank, alpha or targets) other than `config`.
    """
    before, changes = _read_config(directory), dict[str, str]()
    for key, value in config.items():
        keeps_rate = key == RATE and value == "auto"  # the checkpoint's
        if before.get(key, value) != value and not keeps_rate:
            changes[key] = f"{key} {json.dumps(before[key])} → {json.dumps(value)}"
    for key in (*FIXED, *(FIXED_OF_LORA if config["trainer.weights"] == "lora" else ())):
        if key in changes:
            of_model = f" ({changes['policy.model']})" if key == WEIGHTS and "policy.model" in changes else ""
            raise ConfigError(
                f"the checkpoint {directory} does not fit the configuration: {changes[key]}{of_model}; set it back, or "
                "start over with another store.url and policy.directory (offline: another --dir)"
            )
    return [*changes.values()]


def _read_config(directory: Path) -> Saved:
    path = directory / CONFIG_FILE
    try:
        saved: Saved = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        raise ConfigError(f"{path} is damaged: restore it, or delete it to resume without comparing settings") from None
    return saved


def read_state(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Read a checkpoint. Raises ConfigError if it is damaged, or has weights of other names or shapes than `wanted`."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        shapes = {f"{own}: {name}": tuple(w.shape) for own, ws in state["adapters"].items() for name, w in ws.items()}
        state["step"], state["rng"]
    except Exception as error:  # half a file may make a reader raise anything
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"the checkpoint {path} is damaged ({what}): restore it from a backup, make an earlier policy version "
            "live (lightning-proxy policy promote), or start over with another store.url and policy.directory"
        ) from None
    if other := shapes.items() ^ wanted.items():
        name = min(other)[0]
        raise ConfigError(
            f"the checkpoint {path} does not fit the configuration: {name} is {shapes.get(name, 'missing')} in the "
            f"checkpoint and {wanted.get(name, 'missing')} in the configuration; restore the earlier values of "
            "policy.model, policy.adapters, trainer.weights, trainer.lora_rank and trainer.lora_targets"
        )
    return state


def fingerprint(model: nn.Module) -> str:
    """Return a digest of the base weights. It is the same in float32 and bfloat16."""
    digest = hashlib.sha256()
    for name, weights in model.named_parameters():
        if "lora_" not in name:
            part = weights.detach().flatten()[:FINGERPRINTED].to("cpu", torch.bfloat16)
            digest.update(f"{name.replace('.base_layer.', '.')} {tuple(weights.shape)}".encode())
            digest.update(part.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _flat(prefix: str, section: Section) -> Saved:
    """The values of a section by dotted name, without any `api_key`."""
    found: Saved = {}
    values = section.model_dump(mode="json")
    for name, value in section:
        if isinstance(value, Section):
            found |= _flat(f"{prefix}.{name}", value)
        elif name != "api_key":
            found[f"{prefix}.{name}"] = values[name]
    return found
