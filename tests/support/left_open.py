"""What a test leaves open, what it asks of other machines, and what a killed run of the tests leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from uuid import uuid4

MARK = "TESTS_OF_LIGHTNING"  # own_environment of conftest.py takes LIGHTNING_… away from what a test starts
GRACE_S = 5.0  # most processes end when their parent has gone


def start_reaper() -> None:
    """Mark this process, and end what it started once it is gone, also when it was killed.

    An `up` with its vLLM would live on for hours. Every process that a run starts inherits its mark; this module, as a
    program of its own, waits until the run is gone, and ends those that still have the mark.
    """
    os.environ[MARK] = uuid4().hex
    watched, _held = os.pipe()  # nobody inherits the other end: it closes with this process
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, __file__, os.environ[MARK]]
    pid = os.posix_spawn(
        sys.executable, command, environment, setsid=True,
        file_actions=[(os.POSIX_SPAWN_DUP2, watched, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    assert pid
    os.close(watched)


def marked(mark: str) -> list[int]:
    """The processes with this mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def reap(mark: str) -> None:
    sys.stdin.buffer.read()  # until the run is gone
    deadline = time.monotonic() + GRACE_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# RFC 2606 and RFC 5737: never anybody's, so that a test may ask for them and find nothing.
NOBODY = (".invalid", ".test", ".example", "192.0.2.")
_watched: list[list[str]] = []


class Elsewhere(Exception):
    """An address that is not this machine's."""


def watch(addresses: list[str] | None) -> None:
    """From now on refuse what is not of this machine, and note it in `addresses`; None: refuse nothing."""
    _watched[:] = [] if addresses is None else [addresses]


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or event not in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        return
    host = arguments[1] if event != "socket.getaddrinfo" else arguments
    host = host[0] if isinstance(host, tuple) else None  # the address of a local socket is a path
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host is not None and not _is_here(host):
        _watched[0].append(f"{event} {host}")
        raise Elsewhere(f"{host} is not this machine: no test of `make test` needs the network")


def _is_here(host: str) -> bool:
    if host in ("", "localhost") or any(part in host for part in NOBODY):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


sys.addaudithook(_on_event)


SECONDS = 5.0  # for what is being closed by another thread or process
OURS = ("socket:", "pipe:", tempfile.gettempdir())
# multiprocessing keeps one for as long as the interpreter runs.
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
KEPT_PIPES: tuple[tuple[object, str], ...] = (
    (resource_tracker._resource_tracker, "_fd"),
    (forkserver._forkserver, "_forkserver_alive_fd"),
)


def open_files() -> dict[str, str]:
    """Files of temporary directories, pipes and sockets, by what they are and their number."""
    kept = {str(getattr(owner, name, None)) for owner, name in KEPT_PIPES}
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        if link.name in kept:
            continue
        with suppress(OSError):  # the directory's own
            target = str(link.readlink())
            if target.startswith(OURS) and not target.startswith(sys.prefix):  # packages keep theirs: fonts
                found[f"{link.name} {target}"] = f"{target} (file descriptor {link.name})"
    return found


def processes() -> dict[str, str]:
    """The children that run, by their id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        children = ""
        with suppress(OSError):  # a thread that has ended
            children = (task / "children").read_text()
        for pid in children.split():
            with suppress(OSError):  # a process that has ended hides no other
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command and not any(kept in command for kept in KEPT):  # one that has ended has no command
                    found[pid] = f"process {pid}: {command.strip()[:200]}"
    return found


class LeftOpen:
    """What a module's tests opened since it was made."""

    def __init__(self) -> None:
        gc.freeze()  # what is there is not this module's: a collection of all, torch included, takes a second
        self._before = set(_all())

    def at_last(self, seconds: float = SECONDS) -> list[str]:
        """What is still open when the module's own servers are gone.

        What only the garbage collector closes warned of itself after its test. By now it is a socket of a connection
        that was given up while it was made, which asyncio may forget.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        deadline = time.monotonic() + seconds
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _found(self) -> list[str]:
        return [f"{said} is left open" for key, said in _all().items() if key not in self._before]


def _all() -> dict[str, str]:
    kinds: tuple[Callable[[], dict[str, str]], ...] = (open_files, processes)
    return {key: said for kind in kinds for key, said in kind().items()}


if __name__ == "__main__":
    reap(sys.argv[1])
