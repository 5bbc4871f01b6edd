"""Finds out which process listens on a port, where the system tells (Linux)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENS = "0A"  # the state of a socket in /proc/net/tcp
WORKER = "--multiprocessing-fork"  # in the command of a worker that Python's multiprocessing has started


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port. `is_left`: a worker that is about to end, since its supervisor is gone."""

    pid: int
    command: str
    is_left: bool


def holder_of(port: int) -> Holder | None:
    """Return the process that listens on this port, a supervisor before its workers; None if nobody can tell."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    found = {pid: _command(pid) for pid in _processes() if sockets and _has_one_of(pid, sockets)}
    if not found:
        return None
    pid = min(found, key=lambda pid: (WORKER in found[pid], pid))
    return Holder(pid, found[pid], WORKER in found[pid])


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port, at whatever address."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _processes() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(path.name) for path in PROC.iterdir() if path.name.isdigit())


def _has_one_of(pid: int, sockets: set[str]) -> bool:
    """Whether a process has one of these sockets open. Those of other users keep that to themselves."""
    with suppress(OSError):
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if str(descriptor.readlink()) in sockets:
                    return True
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
