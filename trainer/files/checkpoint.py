"""Checkpoint directories: they are written atomically, and old ones are removed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ...core.errors import NotSaved
from ...store.store import Store


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
