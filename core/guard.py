"""Runs one program and cleans up everything that it started: `guard.py LIFELINE_FD GRACE_S PROGRAM ARGS…`.

The lifeline is a pipe. Its other end closes when the supervisor closes it or is killed. Then the program gets SIGTERM,
and SIGKILL after GRACE_S. When it has ended, everything that it started is killed too, in whatever group or session.
SIGINT, SIGTERM and SIGHUP are passed on to the program; its exit code, or the signal that killed it, becomes the
guard's. The guard uses only the standard library, so it starts in 20 ms and can be sent to other machines as text.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANNOT_START = 126  # a shell's exit code for it
PRCTL, PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = ctypes.CDLL(None).prctl, 1, 36  # of Linux


def guard(lifeline: int, grace_s: float) -> None:
    """Fork, and return only in the child. This process guards the child, and exits as the child does."""
    this = os.getpid()
    adopt_orphans()
    wake, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # Signals are held back until there is a program to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *PASSED_ON):
        signal.signal(number, lambda *_: None)
    if child := os.fork():
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            code = _wait(child, lifeline, wake, grace_s)
            end_children()
            if code < 0:
                with suppress(OSError):
                    signal.signal(-code, signal.SIG_DFL)
                os.kill(this, -code)
        finally:
            os._exit(code)
    os.setsid()
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != this:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for held in (wake, writing, lifeline):
        os.close(held)
    for number in (signal.SIGCHLD, *PASSED_ON):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _wait(child: int, lifeline: int, wake: int, grace_s: float) -> int:
    """Return the child's exit code, negative for a signal; -SIGKILL if it outlives the lifeline by `grace_s`."""
    watched, until = [wake, lifeline], math.inf
    while True:
        left = None if until == math.inf else max(until - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], left)
        signals = {*os.read(wake, 512)} & {*PASSED_ON} if wake in ready else set()
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1])
        for number in signals:
            os.kill(child, number)
        if time.monotonic() >= until:
            return -signal.SIGKILL
        if lifeline in ready:
            watched, until = [wake], time.monotonic() + grace_s
            with suppress(ProcessLookupError):  # not yet a group of its own
                os.killpg(child, signal.SIGTERM)


def adopt_orphans() -> None:
    """Make this process adopt its descendants when their parents end."""
    PRCTL(PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill the children of this process, and all descendants, which it adopts."""
    with suppress(ChildProcessError):  # there is none any more
        while True:
            os.waitpid(-1, os.WNOHANG)
            if not sum(map(_killed, Path("/proc").glob("[0-9]*/stat"))):
                return  # those that are left belong to another user
            os.waitpid(-1, 0)


def _killed(stat: Path) -> bool:
    """If a /proc/PID/stat file describes a child of this process, kill the child and return True."""
    with suppress(OSError):
        if stat.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
            os.kill(int(stat.parent.name), signal.SIGKILL)
            return True
    return False


def become(command: list[str]) -> int:
    """Replace this process with a command. Return an exit code if it cannot be started."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
    return CANNOT_START


async def start_guarded(*command: str, grace_s: float, **options: Any) -> tuple[Any, int]:
    """Start a command under a guard. Return the guard's process and our end of its lifeline (a descriptor to close)."""
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


if __name__ == "__main__":
    guard(int(sys.argv[1]), float(sys.argv[2]))
    sys.exit(become(sys.argv[3:]))
