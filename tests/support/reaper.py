"""Ends what a run of the tests left behind, also when it was killed: an `up` with its vLLM lives on for hours.

Every process that a run starts inherits its mark. This program, beside it, waits until the run is gone, and ends those
that still have the mark.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

MARK = "TESTS_OF_LIGHTNING"  # own_environment of conftest.py takes LIGHTNING_… away from what a test starts
GRACE_S = 5.0  # most processes end when their parent has gone


def start() -> None:
    """Mark this process, and watch over what it starts until it is gone."""
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


def main(mark: str) -> None:
    sys.stdin.buffer.read()  # until the run is gone
    deadline = time.monotonic() + GRACE_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
