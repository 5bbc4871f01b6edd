"""What a Ray task does: it runs one agent program on its node. Sent there by value, so it needs only Python."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from .....client.no_proxy import reached_directly

# Becomes the program, which the kernel kills if the task's process dies. A function that the fork runs could hang: the
# process has threads.
LAUNCH = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(parent):
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", flush=True)
os._exit(126)
"""
CANNOT_START = 126
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
    os.set_blocking(writing, True)
    try:
        try:
            process = _start(command, env, writing)
        except OSError as error:  # a task too long for the environment
            yield f"{command[0]} cannot be started: {error.strerror}\n".encode()
            yield CANNOT_START
            return
        finally:
            os.close(writing)
        try:
            yield b""
            until, late = math.inf if limit_s is None else time.monotonic() + limit_s, False
            while process.poll() is None:
                if piece := _gather(reading, process):
                    yield piece
                if time.monotonic() >= until:
                    os.killpg(process.pid, signal.SIGKILL if late else signal.SIGTERM)
                    until, late = time.monotonic() + GRACE_S, True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while piece := _read(reading):
            yield piece
        yield LATE if late else process.returncode
    finally:
        os.close(reading)


def _start(command: Sequence[str], env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_")}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *command],
        env=inherited | reached_directly(env, inherited),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


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
