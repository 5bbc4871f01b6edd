"""A fork server for agent programs, `python preload.py SCRIPT MODULE…`: it imports modules once and forks per run.

The agent's own interpreter runs it, so it needs only the standard library. It reads one JSON object a line on stdin:
{"id", "script", "argv", "cwd", "env", "log", "limit_s"} starts a program whose stdout and stderr go to the file `log`,
{"kill": id} ends one. It writes {"id", "code"} for each that ended; a negative code is the signal that killed it.
A program that runs for `limit_s` (null: no limit) is ended, and reported as {"id", "late": true}.
When its stdin closes, it ends all programs and itself.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

GRACE_S = 5.0  # for a program to end after SIGTERM, before SIGKILL


class Server:
    """Forks programs as asked and reports how they ended."""

    def __init__(self, requests: int, reports: int) -> None:
        self._requests, self._reports = requests, reports
        self._running: dict[int, str] = {}
        self._until: dict[int, float] = {}  # when programs with a limit get their next signal
        self._late: set[int] = set()
        self._buffer = b""

    def serve(self) -> None:
        """Serve requests until stdin closes."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C reaches every process of the terminal; `run` decides what it means for the programs.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open_ = True
        while open_:
            ready, _, _ = select.select([self._requests, wake_read], [], [], self._end_late())
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._requests in ready:
                open_ = self._read()
        for pid in self._running:
            _kill_group(pid)

    def _read(self) -> bool:
        chunk = os.read(self._requests, 1 << 16)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return bool(chunk)

    def _handle(self, request: dict[str, Any]) -> None:
        if "kill" in request:
            for pid, name in self._running.items():
                if name == request["kill"]:
                    _kill_group(pid)
            return
        pid = os.fork()
        if pid == 0:
            os.close(self._requests)
            os.close(self._reports)
            os._exit(_run(request))
        self._running[pid] = request["id"]
        if (limit_s := request.get("limit_s")) is not None:
            self._until[pid] = time.monotonic() + limit_s

    def _end_late(self) -> float | None:
        """End programs that have run for too long, and return the seconds until the next one has."""
        now = time.monotonic()
        for pid in [pid for pid, until in self._until.items() if until <= now]:
            _kill_group(pid, signal.SIGKILL if pid in self._late else signal.SIGTERM)
            self._late.add(pid)
            self._until[pid] = now + GRACE_S
        return max(min(self._until.values()) - now, 0.0) if self._until else None

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _kill_group(pid)  # what the program left behind
            self._until.pop(pid, None)
            how = {"late": True} if pid in self._late else {"code": os.waitstatus_to_exitcode(status)}
            self._late.discard(pid)
            report = {"id": self._running.pop(pid), **how}
            os.write(self._reports, json.dumps(report).encode() + b"\n")


def _run(request: dict[str, Any]) -> int:
    """In the forked child: run the script as `python script.py` would, and return its exit code."""
    try:
        _become(request)
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    return code if _finish() else code or 1


def _become(request: dict[str, Any]) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = [request["script"], *request["argv"]]
    sys.path[0] = str(Path(request["script"]).absolute().parent)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _finish() -> bool:
    """Do what the interpreter does at its end, without its slow teardown. False if output was lost."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return False
    return True


def _kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    # If the child has not called setsid yet, there is no group to kill, only the child.
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, number)
            return
        except (ProcessLookupError, PermissionError):
            continue


def main(script: str, modules: list[str]) -> None:
    sys.path[0] = str(Path(script).absolute().parent)  # not that of this file: the modules are the agent's
    reports = os.dup(1)
    os.dup2(2, 1)  # what a module prints on import must not be taken for a report
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise the first collection in each child copies every page
    os.write(reports, b'{"ready": true}\n')
    Server(os.dup(0), reports).serve()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
