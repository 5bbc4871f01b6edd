"""Runs one program and outlives neither it nor the supervisor: `guard.py LIFELINE_FD PROGRAM ARGS…`.

Leads a process group of its own. When the other end of the lifeline closes, because the supervisor let go or was
killed, what is left of the group is killed. Signals are passed on to the program. Standard library only: starts in 20 ms.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from types import FrameType

SUPERVISOR_GONE = 0.2  # seconds that the group has between SIGTERM and SIGKILL once nobody waits for it


def main(lifeline: int, argv: list[str]) -> int:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        # In the guard's group, so that killing the group reaches its children too.
        program = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=[signal.SIGCHLD])
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        return 127
    _pass_on(program)
    while True:
        ready, _, _ = select.select([lifeline, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 512)
        done, status = os.waitpid(program, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if lifeline in ready:
            _end_group(program)


def _pass_on(program: int) -> None:
    def forward(number: int, _: FrameType | None) -> None:
        os.kill(program, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)


def _end_group(program: int) -> None:
    os.kill(program, signal.SIGTERM)
    select.select([], [], [], SUPERVISOR_GONE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    lifeline_fd = int(sys.argv[1])
    os.set_inheritable(lifeline_fd, False)
    code = main(lifeline_fd, sys.argv[2:])
    # Whatever the program left behind in its group goes with it; a program killed by a signal is reported as such.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    if code < 0:
        os.kill(os.getpid(), -code if -code != signal.SIGTERM else signal.SIGKILL)
    sys.exit(code)
