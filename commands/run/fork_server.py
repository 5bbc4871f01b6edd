"""A server that imports modules once and forks agent programs: `python fork_server.py GUARD [SCRIPT MODULE…]`.

With a SCRIPT, the agent's own interpreter runs this file, so only the standard library is used. `GUARD` is the path of
core/guard.py: each program has its own guard. The server writes {"ready": true}, then reads a JSON object per line:
{"id", "argv", "cwd", "env", "log"} starts a program with the file `log` as its stdout and stderr; {"kill": id} ends it.
With a SCRIPT, the program is that script, run in the fork; without one, it is the command `argv`. Answers are {"id",
"started": true}, and {"id", "code"} at the program's end; a negative code is the signal that killed the program. When
the server's stdin closes, it ends all programs and itself.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_S = 5.0  # for a program to end after SIGTERM, before SIGKILL


class Server:
    def __init__(self, guard: Any, script: str | None, requests: int, reports: int) -> None:
        self._guard, self._script = guard, script
        self._requests, self._reports = requests, reports
        self._running: dict[int, tuple[str, int]] = {}  # by a pipe that ends with the guard: id, process
        self._lifelines: dict[str, int] = {}
        self._buffer = b""
        self._poll = select.poll()

    def serve(self) -> None:
        """Serve requests until stdin closes and all programs have ended."""
        # Ctrl-C reaches every process of the terminal; `run` decides what it means for the programs.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._guard.adopt_orphans()  # of what the modules started
        self._poll.register(self._requests, select.POLLIN)
        is_open = True
        while is_open or self._running:
            for file, _ in self._poll.poll():
                if file != self._requests:
                    self._reap(file)
                elif not self._read():
                    is_open = False
                    self._poll.unregister(file)
                    for name in [*self._lifelines]:
                        self._kill(name)
        self._guard.end_children()

    def _read(self) -> bool:
        chunk = os.read(self._requests, 1 << 16)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                self._kill(request["kill"])
            else:
                self._start(request)
        return bool(chunk)

    def _start(self, request: dict[str, Any]) -> None:
        watched, lifeline = os.pipe()
        alive, held = os.pipe()  # the guard holds it to its own end
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            Path(request["log"]).write_text(f"{request['argv'][0]} cannot be started: {error.strerror}\n")
            for file in (watched, lifeline, alive, held):
                os.close(file)
            self._report(request["id"], code=self._guard.CANNOT_START)
            return
        if pid == 0:
            for file in (self._requests, self._reports, lifeline, alive, *self._lifelines.values(), *self._running):
                os.close(file)
            self._guard.guard(watched, GRACE_S)
            os.close(held)
            os._exit(self._run(request))
        os.close(watched)
        os.close(held)
        self._poll.register(alive, select.POLLIN)
        self._running[alive], self._lifelines[request["id"]] = (request["id"], pid), lifeline
        self._report(request["id"], started=True)

    def _kill(self, name: str) -> None:
        if (lifeline := self._lifelines.pop(name, None)) is not None:
            os.close(lifeline)

    def _reap(self, file: int) -> None:
        name, pid = self._running.pop(file)
        self._poll.unregister(file)
        os.close(file)
        self._kill(name)
        self._report(name, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _report(self, name: str, **how: Any) -> None:
        with suppress(BrokenPipeError):  # `run` was killed
            os.write(self._reports, json.dumps({"id": name, **how}).encode() + b"\n")

    def _run(self, request: dict[str, Any]) -> int:
        """In the program's process, become the command, or run the script and return its exit code."""
        try:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            if self._script is None:
                return int(self._guard.become(request["argv"]))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = request["argv"][1:]
            sys.path[0] = str(Path(self._script).absolute().parent)
            runpy.run_path(self._script, run_name="__main__")
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
            if not isinstance(code, int):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        # What the interpreter does at its end, without its slow teardown.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            return int(code) & 0xFF or 1
        return int(code) & 0xFF


def main(guard: str, script: str | None = None, *modules: str) -> None:
    spec = importlib.util.spec_from_file_location("lightning_guard", guard)  # no module of the agent's is hidden
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
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
