"""Runs one program and makes sure that nothing of it stays: `guard.py LIFELINE_FD GRACE_S PROGRAM ARGS…`.

The lifeline is a pipe whose other end closes when the supervisor lets go, or is killed. Then the program gets SIGTERM,
and SIGKILL after the grace. Once it has ended, all that it started ends too, in whatever group or session it is.
Signals are passed on to the program; its exit code, or the signal that killed it, becomes the guard's.
It uses only the standard library, so that it starts in 20 ms, and can be sent to other machines as text.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANNOT_START = 126  # what a shell answers
PRCTL, PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = ctypes.CDLL(None).prctl, 1, 36  # of Linux


def guard(
    ended: Callable[[int | None], int], lifeline: int | None, grace_s: float, limit_s: float | None = None
) -> None:
    """Return in a child process, in a session of its own. This one guards it, and exits with `ended(code)`.

    A negative code is the signal that killed the child; None means that it ran for `limit_s` and was ended. Without a
    `lifeline`, the signals that would be passed on end it as a closed lifeline does.
    """
    this = os.getpid()
    adopt_orphans()
    wake, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # Signals are held back until there is a program to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *PASSED_ON):
        signal.signal(number, lambda *_: None)
    if child := os.fork():
        status = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            code = _wait(child, lifeline, wake, grace_s, limit_s)
            end_children()
            status = ended(code)
        finally:
            os._exit(status)
    os.setsid()
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != this:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for held in (wake, writing, lifeline):
        if held is not None:
            os.close(held)
    for number in (signal.SIGCHLD, *PASSED_ON):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _wait(child: int, lifeline: int | None, wake: int, grace_s: float, limit_s: float | None) -> int | None:
    until, is_ending, is_late = math.inf if limit_s is None else time.monotonic() + limit_s, False, False
    watched = [wake] if lifeline is None else [wake, lifeline]
    while True:
        left = None if until == math.inf else max(until - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], left)
        signals = {*os.read(wake, 512)} & {*PASSED_ON} if wake in ready else set()
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return None if is_late else os.waitstatus_to_exitcode(ended[1])
        if lifeline is not None:
            for number in signals:
                os.kill(child, number)
        is_over = time.monotonic() >= until
        if is_ending and is_over:
            return None if is_late else -signal.SIGKILL
        if not is_ending and (is_over or lifeline in ready or (lifeline is None and signals)):
            is_ending, is_late, until, watched = True, is_over, time.monotonic() + grace_s, [wake]
            with suppress(ProcessLookupError):  # not yet a group of its own
                os.killpg(child, signal.SIGTERM)


def adopt_orphans() -> None:
    """From now on, what this process started becomes its child when its own parent ends."""
    PRCTL(PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill the children of this process, and theirs, which it adopts."""
    with suppress(ChildProcessError):  # there is none any more
        while True:
            os.waitpid(-1, os.WNOHANG)
            if not sum(map(_killed, Path("/proc").glob("[0-9]*/stat"))):
                return  # those that are left belong to another user
            os.waitpid(-1, 0)


def _killed(stat: Path) -> bool:
    """Kill the process of a file in /proc if it is a child of this one."""
    with suppress(OSError):
        if stat.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
            os.kill(int(stat.parent.name), signal.SIGKILL)
            return True
    return False


def become(command: list[str]) -> int:
    """Run a command in the place of this process. Return an exit code if it cannot be started."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
    return CANNOT_START


async def start_guarded(*command: str, grace_s: float, **options: Any) -> tuple[Any, int]:
    """Start a command under a guard. Return the guard's process, and our end of its lifeline: a file to close."""
    import asyncio

    theirs, lifeline = os.pipe()
    guarded = (sys.executable, "-I", "-S", __file__, str(theirs), f"{grace_s:g}")
    try:
        process = await asyncio.create_subprocess_exec(
            *guarded, *command, pass_fds=(theirs,), start_new_session=True, **options
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(theirs)
    return process, lifeline


def end_alike(code: int | None) -> int:
    """End this process as its child has ended."""
    assert code is not None  # there is no limit
    if code < 0:
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    guard(end_alike, int(sys.argv[1]), float(sys.argv[2]))
    sys.exit(become(sys.argv[3:]))
