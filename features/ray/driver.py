"""The process that Ray's client lives in. It reads from stdin which tasks to start, and reports how they ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from typing import Any

import ray
from ray import exceptions as failures

from ...client import program
from . import task as sent

WAITS_S = 30.0  # until a line says that no node has room
LOOK_S = 1.0
PROBE_S = 10.0
END_S = 10.0  # for a cancelled task to kill its program; then its worker is killed
GONE = (
    failures.NodeDiedError,
    failures.WorkerCrashedError,
    failures.LocalRayletDiedError,
    failures.OutOfMemoryError,
    failures.ObjectLostError,
)


class Driver:
    """One task for each program. `reports` is where the parent reads."""

    def __init__(self, setup: Mapping[str, Any], reports: int) -> None:
        self._command, self._options = setup["command"], setup["options"]
        self._reports = reports
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, float] = {}  # since when
        self._program = ray.remote(sent.run_program).options(
            **self._options, max_retries=0, num_returns="streaming", name="agent"
        )

    async def serve(self, requests: asyncio.StreamReader) -> None:
        """Serve requests until stdin closes; then end all programs."""
        patience = asyncio.create_task(self._tell_of_waiting())
        async for line in requests:
            request = json.loads(line)
            if "kill" in request:
                if run := self._runs.get(request["kill"]):
                    run.cancel()
            else:
                run = asyncio.create_task(self._run(**request))
                self._runs[request["id"]] = run
        for run in (patience, *self._runs.values()):
            if not run.cancelling():  # a second time would cancel `end`
                run.cancel()
        await asyncio.gather(patience, *self._runs.values(), return_exceptions=True)

    async def _run(self, id: str, env: Mapping[str, str], log: str, limit_s: float | None) -> None:
        self._waiting[id] = time.monotonic()
        try:
            self._report({"id": id, **await self._outcome(id, env, log, limit_s)})
        finally:
            self._waiting.pop(id, None)
            del self._runs[id]

    async def _outcome(self, name: str, env: Mapping[str, str], log: str, limit_s: float | None) -> dict[str, Any]:
        pieces = self._program.remote(self._command, env, limit_s)
        try:
            code = await self._follow(name, pieces, log)
            return {"late": True} if code == sent.LATE else {"code": code}
        except GONE as error:
            return {"lost": f"Ray lost the run: {in_one_line(error).partition('. ')[0]}"}
        except failures.RayError as error:
            return {"failed": f"Ray cannot run the program: {in_one_line(error)}"}
        except asyncio.CancelledError:
            await end(pieces)
            raise

    async def _follow(self, name: str, pieces: ray.ObjectRefGenerator, log: str) -> int | str:
        code: int | str | None = None
        with open(log, "wb", buffering=0) as output:  # noqa: ASYNC230, PTH123
            async for reference in pieces:
                piece = await reference
                self._waiting.pop(name, None)
                if isinstance(piece, bytes):
                    output.write(piece)
                else:
                    code = piece
        assert code is not None
        return code

    async def _tell_of_waiting(self) -> None:
        """Report once that nothing runs, though programs have waited for long."""
        longest_s = 0.0
        while longest_s < WAITS_S:
            await asyncio.sleep(LOOK_S)
            nothing_runs = len(self._waiting) == len(self._runs)
            longest_s = time.monotonic() - min(self._waiting.values()) if self._waiting and nothing_runs else 0.0
        there = {name: n for name, n in ray.cluster_resources().items() if ":" not in name}
        message = f"no Ray node has room for a program, which needs {self._options}; the cluster has {there}"
        self._report({"say": message})

    def _report(self, report: Mapping[str, Any]) -> None:
        os.write(self._reports, json.dumps(report).encode() + b"\n")


async def end(pieces: ray.ObjectRefGenerator) -> None:
    """Cancel a task, and wait until its program is dead."""
    for force in (False, True):
        with suppress(failures.RayError, ValueError):
            ray.cancel(pieces, force=force)
        try:
            async with asyncio.timeout(END_S):
                async for reference in pieces:
                    await reference
                return
        except failures.RayError:
            return
        except TimeoutError:
            continue


def in_one_line(error: Exception) -> str:
    """An error's message, without Ray's advice and stack."""
    return " ".join(str(error).split())[:300]


def connect(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Join the cluster. Return the parent's first line: the machines, or why there are none."""
    try:
        require_listener(os.environ.get("RAY_ADDRESS", "") if setup["address"] == "auto" else setup["address"])
        ray.init(
            address=setup["address"],
            runtime_env=setup["runtime_env"] or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    except OSError:
        where = setup["address"]
        return {"failed": f"no Ray cluster answers at {where!r} (ray.address); start one: ray start --head"}
    except Exception as error:
        return {"failed": f"the Ray cluster cannot be used: {in_one_line(error)}"}
    return {"machines": sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})}


def require_listener(address: str) -> None:
    """Raise OSError unless something listens there. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()


async def main() -> None:
    loop = asyncio.get_running_loop()
    reports = os.dup(1)
    os.dup2(2, 1)  # what Ray prints must not be taken for a report
    requests = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin.buffer)
    setup = json.loads(await requests.readline())
    answer = await asyncio.to_thread(connect, setup)
    os.write(reports, json.dumps(answer).encode() + b"\n")
    if "failed" in answer:
        return
    try:
        await Driver(setup, reports).serve(requests)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    # Ctrl-C reaches every process of the terminal; `run` decides what it means for the programs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in (sent, program):
        ray.cloudpickle.register_pickle_by_value(module)
    # Ray logs nodes that die, in lines that would break a progress bar.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # noqa: PTH123
        asyncio.run(main())
