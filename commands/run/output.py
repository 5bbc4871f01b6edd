"""Writes a program's output to a file: limited in size, and redacted as records are (`recording.redact`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ...core.config.root import Config
from ...core.redact import Redactor
from ...store.sqlite.file import make_private

Redact = Callable[[str], str]

MOST = 10_000_000  # bytes of a program's output
PIECE = 1 << 16
MARK = 100  # bytes for the line that counts the bytes left out


def redaction(config: Config) -> Redact | None:
    """Return the function that redacts a program's output; None if nothing is redacted."""
    redactor = Redactor(config.recording.redact, config.keys())
    return redactor.text if redactor else None


class ProgramLog:
    """Redacts output and writes it to a file. If it exceeds `most` bytes, only its beginning and end are kept."""

    def __init__(self, path: Path, redact: Redact | None = None, most: int = MOST) -> None:
        make_private(path)
        self._path, self._redact = path, redact
        self._tail_size = min(PIECE, most // 2)
        self._room = max(most - self._tail_size - MARK, 0)  # for the beginning
        self._file = path.open("wb", buffering=0)
        self._line, self._tail, self._left_out = b"", bytearray(), 0

    def write(self, data: bytes) -> None:
        data = self._line + data
        end = len(data) if self._redact is None else data.rfind(b"\n") + 1
        begun = data.rfind(b"-----BEGIN ", 0, end)
        if self._redact is not None and begun >= 0 and b"-----END " not in data[begun:end]:  # only a whole key is known
            end = begun
        if len(data) > PIECE:
            end = end or len(data)
        self._keep(self._redacted(data[:end]))
        self._line = data[end:]

    def close(self) -> None:
        """Write the rest. Secrets that span two pieces are redacted now."""
        self._keep(self._redacted(self._line))
        if self._left_out:
            self._file.write(f"\n[{self._left_out} bytes left out]\n".encode())
        self._file.write(self._tail)
        self._file.close()
        if self._redact is not None:
            self._path.write_bytes(self._redacted(self._path.read_bytes()))

    def _redacted(self, data: bytes) -> bytes:
        if self._redact is None:
            return data
        return self._redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def _keep(self, data: bytes) -> None:
        head = data[: self._room]
        self._file.write(head)
        self._room -= len(head)
        self._tail += data[len(head) :]
        if (over := len(self._tail) - self._tail_size) > 0:
            del self._tail[:over]
            self._left_out += over


@asynccontextmanager
async def piped(path: Path, redact: Redact | None) -> AsyncIterator[Path]:
    """Yield a named pipe. What programs write to it is redacted and kept in the file at `path`."""
    loop, log = asyncio.get_running_loop(), ProgramLog(path, redact)
    with TemporaryDirectory(prefix="lightning-output-") as directory:
        pipe = Path(directory) / "pipe"
        os.mkfifo(pipe, 0o600)
        reading = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # with a writer of ours, it never ends

        def read() -> None:
            log.write(os.read(reading, PIECE))

        loop.add_reader(reading, read)
        try:
            yield pipe
        finally:
            loop.remove_reader(reading)
            with suppress(BlockingIOError):
                for _ in range(PIECE):  # what holds the pipe open may write for ever
                    read()
            os.close(reading)
            log.close()


def last_line(log: Path) -> str:
    """Return the last non-empty line of a program's output, cut to 300 characters; `no output` if there is none."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()] if log.exists() else []
    return next((line[:300] for line in reversed(lines) if line), "no output")
