"""What a test leaves: open files, pipes and sockets, and running processes."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

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
    """What a module's tests opened since it was made, with the test that did."""

    def __init__(self) -> None:
        gc.freeze()  # what is there is not this module's: a collection of all, torch included, takes a second
        self._before = set(_all())
        self._by: dict[str, str] = {}

    def after(self, test: str) -> None:
        """Called at the end of each test. What is open and nobody refers to warns of itself, in this test."""
        new = _all().keys() - self._before - self._by.keys()
        if new:
            gc.collect(1)  # young objects: a full collection takes long once torch is there
        self._by |= dict.fromkeys(new, test)

    def at_last(self, seconds: float = SECONDS) -> list[str]:
        """What is still open when the module's own servers are gone.

        What only the garbage collector closes is told of after its test. By now it is a socket whose connection was
        given up while it was made, which asyncio may forget.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        deadline = time.monotonic() + seconds
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _found(self) -> list[str]:
        new = {key: said for key, said in _all().items() if key not in self._before}
        return [f"{self._by.get(key, 'the module')} left {said} open" for key, said in new.items()]


def _all() -> dict[str, str]:
    kinds: tuple[Callable[[], dict[str, str]], ...] = (open_files, processes)
    return {key: said for kind in kinds for key, said in kind().items()}
