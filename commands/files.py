"""Files that commands read line by line, and files and directories that appear only once they are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.errors import ConfigError, LightningError


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of a text that is not empty, with its number. ConfigError if the file cannot be read.

    Lines end at line breaks only: JSON strings may hold U+2028, where `splitlines` would split them.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if text := line.strip("\ufeff \t\r\n"):  # a byte-order mark begins files that were saved on Windows
                    yield number, text
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is no text in UTF-8") from None


def is_stream(path: Path) -> bool:
    """Whether it is written in place: standard output (`-`), a pipe or a device."""
    return str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir())


@contextmanager
def written(target: Path) -> Iterator[Path]:
    """Yield where to write a file or a directory, which becomes `target` if the block ends without an error.

    Raise LightningError if it cannot be written. BrokenPipeError passes: the reader of a pipe has closed it.
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
