"""Runs one program and makes sure that it ends with its supervisor: `guard.py LIFELINE_FD PROGRAM ARGS…`.

When the other end of the lifeline closes, because the supervisor let go or was killed, the program's entire process
group ends. Signals are passed on to the program; its exit code, or the signal that killed it, becomes the guard's.
It uses only the standard library, so that it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILL_AFTER = 0.5  # seconds between SIGTERM and SIGKILL once nobody waits for the program


def main(lifeline: int, argv: list[str]) -> int:
    """Run `argv` to its end and return its exit code, negative for a signal."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Signals are held back until there is a program to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    program = _spawn(argv)
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: os.kill(program, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    try:
        return _wait(program, lifeline, wake_read)
    finally:
        _signal_group(program, signal.SIGKILL)


def _spawn(argv: list[str]) -> int:
    try:
        return os.posix_spawnp(
            argv[0],
            argv,
            os.environ,
            setpgroup=0,
            setsigmask=[],
            setsigdef=[*PASSED_ON, signal.SIGCHLD, signal.SIGPIPE],
        )
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


def _wait(program: int, lifeline: int, wake: int) -> int:
    watched, timeout = [lifeline, wake], None
    while True:
        ready, _, _ = select.select(watched, [], [], timeout)
        done, status = os.waitpid(program, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if wake in ready:
            os.read(wake, 512)
        if not ready:
            _signal_group(program, signal.SIGKILL)
        if lifeline in ready:
            _signal_group(program, signal.SIGTERM)
            watched, timeout = [wake], KILL_AFTER


def _signal_group(program: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, number)


if __name__ == "__main__":
    lifeline_fd = int(sys.argv[1])
    os.set_inheritable(lifeline_fd, False)
    code = main(lifeline_fd, sys.argv[2:])
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
