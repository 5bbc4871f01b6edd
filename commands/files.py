"""Reads files by line or Parquet row, and writes files and directories that appear only once complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, LightningError


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each non-empty line, or of each row of a Parquet file as JSON.

    Lines end at LF, CR or CRLF only: `splitlines` would also split at U+2028, which JSON strings may hold. Raises
    ConfigError if the file cannot be read, and LightningError if the package for Parquet is missing.
    """
    try:
        with path.open("rb") as start:
            is_parquet = start.read(4) == b"PAR1"
        if is_parquet or path.suffix == ".parquet":
            yield from _parquet_rows(path)
            return
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if text := line.strip("\ufeff \t\r\n"):  # a byte-order mark begins files that were saved on Windows
                    yield number, text
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, str]]:
    pa = pyarrow()
    try:
        number, file = 0, pa.parquet.ParquetFile(path)
        texts = [field.name for field in file.schema_arrow if field.type == pa.json_()]
        for batch in file.iter_batches(256):
            for row in batch.to_pylist():
                number += 1
                row |= {name: json.loads(row[name]) for name in texts if row[name] is not None}
                yield number, json.dumps(row, ensure_ascii=False, default=str)
    except pa.ArrowException as error:
        raise ConfigError(f"cannot read {path} as Parquet: {error}") from None


def pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise LightningError("Parquet needs pyarrow: pip install 'lightning-proxy[parquet]'") from None
    return pyarrow


def is_stream(path: Path) -> bool:
    """Return whether the target is written in place, as standard output (`-`), a pipe or a device is."""
    return str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir())


@contextmanager
def written(target: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `target` if no error is raised. For a stream, yield `target` itself.

    Raise LightningError if `target` cannot be written. BrokenPipeError is passed on: the reader has closed the pipe.
    """
    part = target if is_stream(target) else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        if part != target:
            if target.is_dir() and part.is_dir():
                target.rmdir()
            part.replace(target)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LightningError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        if part != target:
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):
                part.unlink()


def save_json(data: Any, path: Path) -> None:
    with written(path) as file:
        file.write_text(json.dumps(data, indent=1) + "\n")
