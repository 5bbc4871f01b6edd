"""What a Ray task does: it runs one agent program on its node. Sent there by value, so it needs only Python."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ...client.program import variables
from ...core import guard

GUARD = Path(guard.__file__).read_text()  # sent along, for nodes without our package
PIECE = 1 << 16  # Ray sends less than 100 KB directly, without its object store
GRACE_S = 5.0  # for a program to end after SIGTERM, before SIGKILL
LATE = "late"
POLL_S = 0.2  # Ray interrupts a cancelled task between two steps of Python only


def run_program(
    command: Sequence[str], env: Mapping[str, str], limit_s: float | None = None
) -> Iterator[bytes | int | str]:
    """Yield an empty piece once it has started, its output in pieces, and at the end its exit code.

    A program that runs for `limit_s` is ended, and `LATE` comes in place of its exit code.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with open(reading, "rb", buffering=0), TemporaryDirectory(prefix="lightning-task-") as directory:  # noqa: PTH123
        try:
            process, lifeline = _start(command, env, Path(directory) / "task.json", writing)
        finally:
            os.close(writing)
        late = False
        try:
            yield b""
            until = math.inf if limit_s is None else time.monotonic() + limit_s
            while process.poll() is None:
                if piece := _gather(reading, process):
                    yield piece
                if not late and time.monotonic() >= until:
                    late = True
                    os.close(lifeline)
        finally:
            if not late:
                os.close(lifeline)
            process.wait()
        while piece := _read(reading):
            yield piece
        yield LATE if late else process.returncode


def _start(
    command: Sequence[str], env: Mapping[str, str], task_file: Path, output: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Start it under a guard, which ends it when the second number returned, a file, is closed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_")}
    theirs, lifeline = os.pipe()
    os.set_blocking(output, True)
    try:
        # Not a function that the fork runs, which could hang: the process has threads.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(theirs), f"{GRACE_S:g}", *command],
            env=variables(env, inherited, task_file), pass_fds=(theirs,), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(theirs)
    return process, lifeline


def _gather(reading: int, process: subprocess.Popen[bytes]) -> bytes:
    """The output of a moment, in few pieces, none of them large."""
    gathered, until = b"", time.monotonic() + POLL_S
    while len(gathered) < PIECE and (left := until - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        if not (piece := _read(reading, PIECE - len(gathered))):
            with suppress(subprocess.TimeoutExpired):  # closed by a program that keeps running
                process.wait(left)
            break
        gathered += piece
    return gathered


def _read(reading: int, most: int = PIECE) -> bytes:
    with suppress(BlockingIOError):
        return os.read(reading, most)
    return b""
