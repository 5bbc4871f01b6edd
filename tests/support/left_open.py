"""What a test leaves: open files, pipes and sockets, and running processes."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SECONDS = 5.0  # for what is being closed by another thread or process
OURS = ("socket:", "pipe:", tempfile.gettempdir())
# multiprocessing keeps one for as long as the interpreter runs.
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def open_files() -> dict[str, str]:
    """Files of temporary directories, pipes and sockets, by what they are and their number."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the directory's own
            target = str(link.readlink())
            if target.startswith(OURS):
                found[f"{link.name} {target}"] = f"{target} (file descriptor {link.name})"
    return found


def processes() -> dict[str, str]:
    """The children that run, by their id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (task / "children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command and not any(kept in command for kept in KEPT):  # one that has ended has no command
                    found[pid] = f"process {pid}: {command.strip()[:200]}"
    return found


class LeftOpen:
    """Compares with what was open when it was made."""

    def __init__(self) -> None:
        self._before = _all()

    def now(self) -> list[str]:
        """What was opened since and is not closed. What nobody refers to is collected, and warns of itself."""
        if self._new():
            gc.collect()
        deadline = time.monotonic() + SECONDS
        while (new := self._new()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return sorted(new.values())

    def _new(self) -> dict[str, str]:
        return {key: said for key, said in _all().items() if key not in self._before}


def _all() -> dict[str, str]:
    kinds: tuple[Callable[[], dict[str, str]], ...] = (open_files, processes)
    return {key: said for kind in kinds for key, said in kind().items()}
