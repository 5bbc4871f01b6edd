"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ...proxy.errors import NotSaved


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; it takes the place of `target` when the block ends without an error.

    Everything is on disk before the rename, so a directory under its final name is complete, also after a power cut.
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
        shutil.rmtree(temporary, ignore_errors=True)  # what is half written only takes space
        if _is_of_the_disk(error):
            raise NotSaved(f"{target} cannot be written: {error}") from error
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _is_of_the_disk(error: Exception) -> bool:
    """Whether a file could not be written; PyTorch and safetensors have errors of their own for it."""
    torchs = ("inline_container", "PytorchStreamWriter")
    return isinstance(error, OSError | SafetensorError) or any(name in str(error) for name in torchs)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
