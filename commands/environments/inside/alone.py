"""Makes a process fit for others' code: without the user's variables, in a folder of its own, watched by another."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

KEPT = {
    *("PATH", "LANG", "TZ", "SHELL", "TERM", "NO_PROXY", "no_proxy", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("LIGHTNING_TASK", "LIGHTNING_ROLLOUT_ID", "LIGHTNING_URL"),
    *("SSL_CERT_FILE", "DOCKER_HOST", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
}
# Nothing is fetched that the command line did not name; and a generator that goes through a set does so as before.
SET = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux
HEARD = (signal.SIGCHLD, signal.SIGTERM)


def alone() -> None:
    """Remove all variables but those above, the user's keys among them."""
    for name in os.environ.keys() - KEPT:
        if not name.startswith("LC_"):
            del os.environ[name]
    os.environ.update(SET)


def watched(seconds: float, late: str, *, listing: bool) -> None:
    """Return in a grandchild, in an empty folder. The child between ends it after this time, or when this process ends.

    It also ends all that was started there, and removes the folder. `run` kills this process and its group alone.
    With `listing`, this process ends when its parent does. `late` says what took longer than `seconds`.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
    if listing:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if watcher := os.fork():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1]))
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)
    folder = tempfile.mkdtemp(prefix="lightning-environment-")
    if episode := os.fork():
        os._exit(_watch(episode, folder, seconds, late))
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = None
    os.chdir(folder)


def _watch(episode: int, folder: str, seconds: float, late: str) -> int:
    """Return the exit code, after all has ended."""
    until, code = time.monotonic() + seconds, None
    while code is None:
        heard = signal.sigtimedwait(HEARD, max(until - time.monotonic(), 0.0))
        if heard is None or heard.si_signo == signal.SIGTERM:
            code = 1
        elif (ended := os.waitpid(episode, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
    with suppress(ChildProcessError):  # until there is none: orphans become children of this process
        while True:
            os.waitpid(-1, os.WNOHANG)
            for status in Path("/proc").glob("[0-9]*/stat"):
                with suppress(OSError):
                    if status.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                        os.kill(int(status.parent.name), signal.SIGKILL)
            os.waitpid(-1, 0)
    shutil.rmtree(folder, ignore_errors=True)
    if heard is None:
        print(f"{late} took longer than {seconds:g} s", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code
