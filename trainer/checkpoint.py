"""Checkpoint directories: written atomically, with the configuration, whose later changes are shown or refused."""

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
KIND = "trainer.weights"
RATE = "trainer.learning_rate"

# The weights and optimizer state in a checkpoint fit these values only.
FIXED = (KIND, ADAPTERS, WEIGHTS)
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
        if _is_disk_error(error):
            raise NotSaved(f"{target} cannot be written: {error}") from error
        raise
    shutil.rmtree(replaced, ignore_errors=True)


async def prune_checkpoints(store: Store, keep: int) -> None:
    """Keep the newest checkpoints, and those of policy versions that have files: training may continue from these."""
    for step, checkpoint in await store.steps.old_checkpoints(keep):
        await asyncio.to_thread(shutil.rmtree, checkpoint, ignore_errors=True)
        await store.steps.forget_checkpoint(step)


def _is_disk_error(error: Exception) -> bool:
    """Whether a file could not be written. PyTorch and safetensors have errors of their own for it."""
    in_torch = ("inline_container", "PytorchStreamWriter")
    return isinstance(error, OSError | SafetensorError) or any(name in str(error) for name in in_torch)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def saved_config(trainer: TrainerConfig, policy: PolicyConfig, weights: str) -> Saved:
    """Return every key of `trainer` and of features by its dotted name, with the policy's model and adapters."""
    keys = _flat("trainer", trainer)
    for section in trainer.sections:
        keys |= _flat(section.name, section)
    adapters = {"policy.adapters": policy.adapters, ADAPTERS: sorted(policy.adapters)}
    return keys | adapters | {"policy.model": policy.model, WEIGHTS: weights}


def write_config(directory: Path, config: Saved, rate: float) -> None:
    """Write the configuration, with the learning rate that `auto` stands for."""
    (directory / CONFIG_FILE).write_text(json.dumps(config | {RATE: rate}, indent=1))


def saved_rate(directory: Path) -> float | None:
    """Return the learning rate that a checkpoint was trained with; None if its saved configuration names none."""
    found = (_read_config(directory / CONFIG_FILE) or {}).get(RATE)
    return None if found is None else float(found)


def config_changes(directory: Path, config: Saved) -> list[str]:
    """Return `key old → new` for each key changed since a checkpoint; none if it has no saved configuration.

    Raises ConfigError if the checkpoint cannot be used with `config`: it has another rank, other adapters, or another
    base model.
    """
    before = _read_config(directory / CONFIG_FILE)
    if before is None:
        return []
    differing = [key for key in config if key in before and before[key] != config[key]]
    if config[RATE] == "auto" and RATE in differing:  # it keeps the checkpoint's
        differing.remove(RATE)
    fixed = [key for key in differing if key in FIXED or (key in FIXED_OF_LORA and config[KIND] == "lora")]
    if fixed:
        raise ConfigError(_refusal(directory, [KIND] if KIND in fixed else fixed, before, config))
    return [_change(key, before, config) for key in differing]


def _read_config(path: Path) -> Saved | None:
    if not path.is_file():
        return None
    try:
        found: Saved = json.loads(path.read_text())
    except ValueError:
        raise ConfigError(f"{path} is damaged: restore it, or delete it to continue without this check") from None
    return found


def read_state(path: Path, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Read a checkpoint. Raises ConfigError if it is damaged, or its weights have other names or `shapes`."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = _flat_shapes({own: {k: tuple(w.shape) for k, w in ws.items()} for own, ws in state["adapters"].items()})
        state["step"], state["rng"]
    except Exception as error:  # half a file may make a reader raise anything
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"the checkpoint {path} is damaged ({what}): restore it from a backup, or make an earlier policy version "
            "live (lightning-proxy policy promote), or start anew with another store.url and policy.directory"
        ) from None
    wanted = _flat_shapes(shapes)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ConfigError(
                f"the checkpoint {path} has weights of another shape: {name} is {found.get(name, 'missing')} in the "
                f"checkpoint and {wanted.get(name, 'missing')} in the configuration; restore the earlier values of "
                "policy.model, policy.adapters, trainer.weights, trainer.lora_rank and trainer.lora_targets"
            )
    return state


def _flat_shapes(shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    return {f"{adapter}: {name}": shape for adapter, own in shapes.items() for name, shape in own.items()}


def fingerprint(model: nn.Module) -> str:
    """Return a digest of the base weights. It is the same in float32 and bfloat16, and wherever the files are."""
    digest = hashlib.sha256()
    for name, weights in model.named_parameters():
        if "lora_" not in name:
            part = weights.detach().flatten()[:FINGERPRINTED].to("cpu", torch.bfloat16)
            digest.update(f"{name.replace('.base_layer.', '.')} {tuple(weights.shape)}".encode())
            digest.update(part.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _refusal(directory: Path, fixed: list[str], before: Saved, config: Saved) -> str:
    what = ", ".join(_change(key, before, config) for key in fixed)
    if WEIGHTS in fixed:
        what += f" (policy.model {before.get('policy.model')} → {config['policy.model']})"
    return (
        f"the checkpoint {directory} does not fit the configuration: {what}; set it back, or start anew with another "
        "store.url and policy.directory (offline: another --dir)"
    )


def _change(key: str, before: Saved, config: Saved) -> str:
    return f"{key} {json.dumps(before[key])} → {json.dumps(config[key])}"


def _flat(prefix: str, section: Section) -> Saved:
    """A section's keys by their dotted names, without those that are secret."""
    found: Saved = {}
    values = section.model_dump(mode="json")
    for name, value in section:
        if isinstance(value, Section):
            found |= _flat(f"{prefix}.{name}", value)
        elif name != "api_key":
            found[f"{prefix}.{name}"] = values[name]
    return found
