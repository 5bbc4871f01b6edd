"""A server that forks agent programs, `python fork_server.py GUARD [SCRIPT MODULE…]`, warm if it imports modules first.

The agent's own interpreter runs it, so it needs only the standard library. `GUARD` is core/guard.py: every program
has a guard of its own. It reads one JSON object a line on stdin: {"id", "argv", "cwd", "env", "log", "limit_s"} starts
a program whose stdout and stderr go to the file `log`, {"kill": id} ends one. With a SCRIPT, the program is that
script, run in the fork; without one, it is the command `argv`.
It writes {"id", "code"} for each that ended; a negative code is the signal that killed it.
A program that runs for `limit_s` (null: no limit) is ended, and reported as {"id", "late": true}.
When its stdin closes, it ends all programs and itself.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

GRACE_S = 5.0  # for a program to end after SIGTERM, before SIGKILL


class Server:
    """Forks programs as asked. Their guards report how they ended."""

    def __init__(self, guard: Any, script: str | None, requests: int, reports: int) -> None:
        self._guard, self._script = guard, script
        self._requests, self._reports = requests, reports
        self._running: dict[int, str] = {}  # by the guard's process
        self._lifelines: dict[str, int] = {}
        self._buffer = b""

    def serve(self) -> None:
        """Serve requests until stdin closes."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C reaches every process of the terminal; `run` decides what it means for the programs.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._guard.adopt_orphans()  # of what the modules started
        open_ = True
        while open_:
            ready, _, _ = select.select([self._requests, wake_read], [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._requests in ready:
                open_ = self._read()
        for lifeline in self._lifelines.values():
            os.close(lifeline)
        for pid in self._running:
            os.waitpid(pid, 0)
        self._guard.end_children()

    def _read(self) -> bool:
        chunk = os.read(self._requests, 1 << 16)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return bool(chunk)

    def _handle(self, request: dict[str, Any]) -> None:
        if "kill" in request:
            if (lifeline := self._lifelines.pop(request["kill"], None)) is not None:
                os.close(lifeline)
            return
        watched, lifeline = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            os.close(watched)
            os.close(lifeline)
            Path(request["log"]).write_text(f"{request['argv'][0]} cannot be started: {error.strerror}\n")
            self._report(request["id"], {"code": self._guard.CANNOT_START})
            return
        if pid == 0:
            for held in (self._requests, lifeline, *self._lifelines.values()):
                os.close(held)
            self._guard.guard(partial(self._ended, request["id"], watched), watched, GRACE_S, request["limit_s"])
            os._exit(self._run(request))
        os.close(watched)
        self._running[pid], self._lifelines[request["id"]] = request["id"], lifeline

    def _reap(self) -> None:
        for pid, name in [*self._running.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._running[pid]
                if (lifeline := self._lifelines.pop(name, None)) is not None:
                    os.close(lifeline)
                if status:  # the guard was killed before it could report; its program ended with it
                    self._report(name, {"code": os.waitstatus_to_exitcode(status)})

    def _ended(self, name: str, watched: int, code: int | None) -> int:
        """In the guard: report how its program ended, unless that was asked for, or the server has died."""
        if not select.select([watched], [], [], 0)[0]:
            self._report(name, {"late": True} if code is None else {"code": code})
        return 0

    def _report(self, name: str, how: dict[str, Any]) -> None:
        os.write(self._reports, json.dumps({"id": name, **how}).encode() + b"\n")

    def _run(self, request: dict[str, Any]) -> int:
        """In the program's process: become the command, or run the script as `python script.py` would."""
        os.close(self._reports)
        try:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            if self._script is None:
                code = self._guard.become(request["argv"])
            else:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sys.argv = request["argv"][1:]
                sys.path[0] = str(Path(self._script).absolute().parent)
                runpy.run_path(self._script, run_name="__main__")
                code = 0
        except SystemExit as end:
            code = 0 if end.code is None else end.code
            if not isinstance(code, int):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        return code & 0xFF if _finish() else code & 0xFF or 1


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


def main(guard: str, script: str | None = None, *modules: str) -> None:
    found = importlib.util.spec_from_file_location("lightning_guard", guard)  # no module of the agent's is hidden
    assert found is not None and found.loader is not None
    found.loader.exec_module(module := importlib.util.module_from_spec(found))
    reports = os.dup(1)
    os.dup2(2, 1)  # what a module prints on import must not be taken for a report
    if script is not None:
        sys.path[0] = str(Path(script).absolute().parent)  # not that of this file: the modules are the agent's
        for name in modules:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # otherwise the first collection in each child copies every page
    os.write(reports, b'{"ready": true}\n')
    Server(module, script, os.dup(0), reports).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
