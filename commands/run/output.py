"""The file of a program's output: bounded in size, and redacted as records are (`recording.redact`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ...core.config.root import Config
from ...core.redact import Redactor
from ...store.sqlite.file import make_private

PIECE = 1 << 16
MARK = 100  # bytes for the line that counts the bytes left out


@dataclass(frozen=True, slots=True)
class Keeping:
    """How many bytes of a program's output are kept, and what is redacted in it."""

    most: int = 10_000_000
    redact: Callable[[str], str] | None = None

    @classmethod
    def of(cls, config: Config) -> Keeping:
        redactor = Redactor(config.recording.redact, config.keys())
        return cls(int(config.run.log_mb * 1_000_000), redactor.text if redactor else None)


class ProgramLog:
    """Keeps the beginning and the last piece of more output than there may be. Redacts lines as they are written."""

    def __init__(self, path: Path, keeping: Keeping) -> None:
        make_private(path)
        self._path, self._redact = path, keeping.redact
        self._tail_size = min(PIECE, keeping.most // 2)
        self._room = max(keeping.most - self._tail_size - MARK, 0)  # for the beginning
        self._file = path.open("wb", buffering=0)
        self._line, self._tail, self._left_out = b"", bytearray(), 0

    def write(self, data: bytes) -> None:
        """Take a piece of the program's output."""
        if self._redact is None:
            self._keep(data)
            return
        self._line += data
        end = self._line.rfind(b"\n") + 1
        begun = self._line.rfind(b"-----BEGIN ", 0, end)
        if begun >= 0 and b"-----END " not in self._line[begun:end]:  # of a key only all of it is known as one
            end = begun
        if len(self._line) > PIECE:
            end = end or len(self._line)
        self._keep(self._redacted(self._line[:end]))
        self._line = self._line[end:]

    def close(self) -> None:
        """Write the end. Secrets that span lines are redacted now."""
        self._keep(self._redacted(self._line))
        if self._left_out:
            self._file.write(f"\n[{self._left_out} bytes left out: run.log_mb]\n".encode())
        self._file.write(self._tail)
        self._file.close()
        content = self._path.read_bytes() if self._redact is not None else b""
        if (redacted := self._redacted(content)) != content:
            self._path.write_bytes(redacted)

    def _redacted(self, data: bytes) -> bytes:
        if self._redact is None or not data:
            return data
        return self._redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def _keep(self, data: bytes) -> None:
        if head := data[: self._room]:
            self._file.write(head)
            self._room -= len(head)
        self._tail += data[len(head) :]
        if (over := len(self._tail) - self._tail_size) > 0:
            del self._tail[:over]
            self._left_out += over


@asynccontextmanager
async def piped(path: Path, keeping: Keeping) -> AsyncIterator[Path]:
    """Yield a named pipe: what programs write to it gets into the log. At the end takes what is still in the pipe."""
    loop, log = asyncio.get_running_loop(), ProgramLog(path, keeping)
    with TemporaryDirectory(prefix="lightning-output-") as directory:
        pipe = Path(directory) / "pipe"
        os.mkfifo(pipe, 0o600)
        reading = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # with a writer of ours, it never ends

        def read() -> bool:
            with suppress(BlockingIOError):
                log.write(os.read(reading, PIECE))
                return True
            return False

        loop.add_reader(reading, read)
        try:
            yield pipe
        finally:
            loop.remove_reader(reading)
            for _ in range(PIECE):  # what holds the pipe open may write for ever
                if not read():
                    break
            os.close(reading)
            log.close()


def last_line(log: Path) -> str:
    """Return the last line of a program's output that is not empty, at most 300 characters of it."""
    with suppress(OSError):
        for line in reversed(log.read_text(errors="replace").splitlines()):
            if line.strip():
                return line.strip()[:300]
    return "no output"
