"""The process that Ray's client runs in. It reads from stdin which programs to start or kill, and reports back."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray import exceptions as failures

from ...client import program
from ...core import guard

GUARD = Path(guard.__file__).read_text()  # sent along, for nodes without our package
PIECE = 1 << 16  # Ray sends less than 100 KB directly, without its object store
GRACE_S = 5.0  # for a program to end after SIGTERM, before SIGKILL
POLL_S = 0.2  # Ray interrupts a cancelled task only between two Python instructions
WAITS_S = 30.0  # until a line says that nothing starts
PROBE_S = 10.0
END_S = 10.0  # for a cancelled task to kill its program; then its worker is killed
GONE = (
    failures.NodeDiedError, failures.WorkerCrashedError, failures.LocalRayletDiedError, failures.OutOfMemoryError,
    failures.ObjectLostError,
)  # fmt: skip


def run_program(command: Sequence[str], env: Mapping[str, str]) -> Iterator[bytes | int]:
    """Run a program on a node. Yield b"" when it has begun, then its output in pieces, and finally its exit code."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_")}
    theirs, lifeline = os.pipe()
    with TemporaryDirectory(prefix="lightning-task-") as directory:
        try:
            # Not a function that the fork runs, which could hang: the process has threads.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", GUARD, str(theirs), f"{GRACE_S:g}", *command],
                env=program.variables(env, inherited, Path(directory) / "task.json"), pass_fds=(theirs,),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)
        assert process.stdout is not None
        output = process.stdout.fileno()  # at its end when the guard ends, which holds it, too
        try:
            piece = b""
            yield piece
            while True:
                while not select.select([output], [], [], POLL_S)[0]:
                    pass
                if not (piece := os.read(output, PIECE)):
                    break
                yield piece
                if len(piece) < PIECE:  # few pieces, none of them small
                    time.sleep(POLL_S)
        finally:
            os.close(lifeline)
            process.wait()
        yield process.returncode


class Driver:
    """Starts a Ray task for each program. `reports`: the file descriptor for reports to the parent."""

    def __init__(self, setup: Mapping[str, Any], reports: int) -> None:
        self._command, self._options, self._reports = setup["command"], setup["options"], reports
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._started: set[str] = set()
        self._task = ray.remote(run_program).options(
            **self._options, max_retries=0, num_returns="streaming", name="agent"
        )

    async def serve(self, requests: asyncio.StreamReader) -> None:
        """Serve requests until stdin closes; then end all programs."""
        patience = asyncio.create_task(self._say_if_all_wait())
        async for line in requests:
            request = json.loads(line)
            if "kill" not in request:
                self._runs[request["id"]] = asyncio.create_task(self._run(**request))
            elif run := self._runs.get(request["kill"]):
                run.cancel()
        for run in (patience, *self._runs.values()):
            if not run.cancelling():  # a second time would cancel `end`
                run.cancel()
        await asyncio.gather(patience, *self._runs.values(), return_exceptions=True)

    async def _run(self, id: str, env: Mapping[str, str], log: str) -> None:
        pieces = self._task.remote(self._command, env)
        code: int | None = None
        try:
            with open(log, "wb", buffering=0) as output:  # noqa: ASYNC230, PTH123
                async for reference in pieces:
                    piece = await reference
                    if isinstance(piece, int):
                        code = piece
                    elif piece:
                        output.write(piece)
                    else:
                        self._started.add(id)
                        self._report(id=id, started=True)
            self._report(id=id, code=code)
        except GONE as error:
            self._report(id=id, lost=f"Ray lost the run: {in_one_line(error).partition('. ')[0]}")
        except failures.RayError as error:
            self._report(failed=f"Ray cannot run the program: {in_one_line(error)}")
        except asyncio.CancelledError:
            await end(pieces)
            self._report(id=id, code=-signal.SIGTERM)
        finally:
            self._started.discard(id)
            del self._runs[id]

    async def _say_if_all_wait(self) -> None:
        """Report once if programs wait, but none has run for `WAITS_S` seconds."""
        since = time.monotonic()
        while time.monotonic() - since < WAITS_S:
            await asyncio.sleep(1.0)
            if self._started or not self._runs:
                since = time.monotonic()
        there = {name: n for name, n in ray.cluster_resources().items() if ":" not in name}
        why = f"perhaps no Ray node has room: a program needs {self._options}, the cluster has {there}"
        self._report(say=f"no program has started for {WAITS_S:g} s; {why}")

    def _report(self, **report: Any) -> None:
        with suppress(BrokenPipeError):  # `run` was killed
            os.write(self._reports, json.dumps(report).encode() + b"\n")


async def end(pieces: ray.ObjectRefGenerator) -> None:
    """Cancel a task. If it does not end within END_S, kill its worker, and wait as long again."""
    for force in (False, True):
        with suppress(failures.RayError, ValueError):
            ray.cancel(pieces, force=force)
        with suppress(TimeoutError):
            with suppress(failures.RayError):
                async with asyncio.timeout(END_S):
                    async for reference in pieces:
                        await reference
            return


def in_one_line(error: Exception) -> str:
    """The beginning of an error's message, in one line: Ray adds advice and a stack."""
    return " ".join(str(error).split())[:300]


def connect(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Join the cluster. Return the first report to the parent: the machines, or why the cluster cannot be used."""
    address = setup["address"]
    try:
        host, _, port = (os.environ.get("RAY_ADDRESS", "") if address == "auto" else address).rpartition(":")
        if host and port.isdecimal():  # unless something listens there, Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        ray.init(
            address=address, runtime_env=setup["runtime_env"] or None, include_dashboard=False,
            log_to_driver=False, logging_level=logging.ERROR,
        )  # fmt: skip
    except OSError:
        return {"failed": f"no Ray cluster answers at {address!r} (ray.address); start one: ray start --head"}
    except Exception as error:
        return {"failed": f"the Ray cluster cannot be used: {in_one_line(error)}"}
    return {"machines": sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})}


async def main() -> None:
    loop = asyncio.get_running_loop()
    reports = os.dup(1)
    os.dup2(2, 1)  # what Ray prints must not be taken for a report
    requests = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin.buffer)
    setup = json.loads(await requests.readline())
    answer = await asyncio.to_thread(connect, setup)
    os.write(reports, json.dumps(answer).encode() + b"\n")
    if "failed" not in answer:
        try:
            await Driver(setup, reports).serve(requests)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    # Ctrl-C reaches every process of the terminal; `run` decides what it means for the programs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ray.cloudpickle.register_pickle_by_value(program)
    # Ray logs nodes that die, in lines that would break a progress bar.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # noqa: PTH123
        asyncio.run(main())
