"""`serve`: runs the proxy in one uvicorn process, or in several over one store."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from uvicorn import Config as Uvicorn
from uvicorn import Server
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from ..core.config.root import Config
from ..core.errors import LightningError
from ..core.guard import PR_SET_PDEATHSIG, PRCTL
from ..proxy.gateway.server import ServerProtocol, calls_at_once, files_allowed, raise_limit
from ..serving.mode import check_base_model, publish_mode
from .formats import address, how_it_ended
from .lines import CallLines, LogFormat, say, set_up
from .system.processes import require_free_port

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..core.config.server import ProxyConfig


UVICORN: dict[str, Any] = {
    "http": ServerProtocol,
    "ws": "none",
    "log_level": "warning",
    "log_config": None,  # ours: lines.set_up
    "access_log": False,
    # The upstream's own `server` and `date` are passed on; a second one of each would not be transparent.
    "server_header": False,
    "date_header": False,
    "proxy_headers": False,  # nobody asks for the client's address
    # Longer than any client keeps an idle connection: none is closed just as a request comes in.
    "timeout_keep_alive": 75,
    "timeout_worker_healthcheck": 30,  # a worker takes seconds to start on a busy machine
}

log = logging.getLogger(__name__)


def uvicorn_options(proxy: ProxyConfig) -> dict[str, Any]:
    return UVICORN | {"host": proxy.host, "port": proxy.port, "timeout_graceful_shutdown": proxy.stop_timeout_s}


def serve(config: Config, log_format: LogFormat = "text") -> None:
    """Serve until SIGINT or SIGTERM.

    Raise LightningError for a wrong configuration, a port in use, missing keys, or workers that cannot start. A single
    process that cannot start prints the reason and raises typer.Exit.
    """
    from ..proxy.plugins import check_plugins
    from ..store.keys import require_keys

    publish_mode(config)  # show their ConfigErrors before anything starts
    check_base_model(config)
    asyncio.run(check_plugins(config))
    asyncio.run(require_keys(config))
    require_free_port(config.proxy.host, config.proxy.port, "proxy.port")
    set_up(log_format)
    raise_limit()
    if config.proxy.workers == 1:
        _serve_here(config, log_format)
        return
    from ..proxy.gateway.metrics import SHARED

    with tempfile.TemporaryDirectory(prefix="lightning-metrics-") as shared:
        os.environ[SHARED] = shared  # the workers are new processes, not forks
        _serve_in_workers(config, partial(_worker, config, log_format))


def _serve_here(config: Config, log_format: LogFormat) -> None:
    lines = _lines(config, log_format)
    server = OneServer(Uvicorn(_app(config, lines), **uvicorn_options(config.proxy)), config)
    # Having ended as it was asked to, uvicorn raises the signal again: SIGTERM is then no failure either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        server.run()
    lines.flush()
    if not server.started:
        raise typer.Exit(STARTUP_FAILURE)


def _serve_in_workers(config: Config, worker: Callable[[], ASGIApp]) -> None:
    """Serve in several workers under uvicorn's supervisor, which replaces a worker that dies."""
    uvicorn = Uvicorn(worker, factory=True, workers=config.proxy.workers, **uvicorn_options(config.proxy))
    listener = uvicorn.bind_socket()
    listener.listen(uvicorn.backlog)  # clients that come before the workers do wait for them
    supervisor = SeveralServers(uvicorn, sockets=[listener])
    _say_serving(config, listener.getsockname()[1])
    supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise LightningError("a worker of the proxy could not start; see its output above")


def _say_serving(config: Config, port: int) -> None:
    url = f"http://{address(config.proxy.host, port)}/v1"
    kept = config.store.where if config.store.is_postgres else config.store.path
    say(f"serving: OPENAI_BASE_URL={url}; records in {kept}; Ctrl-C stops", event="serving", url=url)
    files = files_allowed()
    calls = calls_at_once(files) * config.proxy.workers
    limit = f"{files:,} files may be open (ulimit -Hn)" + " in each worker" * (config.proxy.workers > 1)
    say(f"at most {calls:,} calls at once, since {limit}", calls=calls, files=files)


def _worker(config: Config, log_format: LogFormat) -> ASGIApp:
    from ..proxy.gateway.metrics import SHARED

    set_up(log_format, Path(os.environ[SHARED]))
    supervisor = parent_process()
    assert supervisor is not None
    # Killed with it: it would keep the port, and nobody could stop it. What was acknowledged is in the store.
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor.pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal reaches all; the supervisor passes it on
    return _app(config, _lines(config, log_format))


def _lines(config: Config, log_format: LogFormat) -> CallLines:
    from ..core.redact import Redactor

    redact = config.recording.redact.model_copy(update={"secrets": True})  # a log is read by more than the store is
    return CallLines(Redactor(redact, config.keys()).text, each=log_format == "text")  # JSON is kept for long


def _app(config: Config, lines: CallLines) -> ASGIApp:
    from ..proxy.app import create_app

    logging.getLogger("uvicorn.error").addFilter(_is_fault)
    gc.freeze()  # imported modules stay; collecting them again and again cost a tenth of the throughput
    gc.set_threshold(10_000, 20, 20)  # calls leave hardly any cycles to look for
    return _plain(create_app(config, (lines.call_ended,)))


def _plain(app: ASGIApp) -> ASGIApp:
    """The app. If one of our errors keeps it from starting, one line says why."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            error = sys.exc_info()[1]  # Starlette sends the traceback of what it has just caught
            if message["type"] == "lifespan.startup.failed" and isinstance(error, LightningError):
                typer.echo(f"lightning-proxy: {error.message}", err=True)
                message["message"] = ""
            await send(message)

        await app(scope, receive, tell if scope["type"] == "lifespan" else send)

    return called


def _is_fault(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's line about a failed start and the traceback of a call that was cut off, else True."""
    if record.msg == "Application startup failed. Exiting.":
        return False
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class OneServer(Server):
    """A server in this process, which reports when it serves and, when it stops, how many calls it waits for."""

    def __init__(self, uvicorn: Uvicorn, config: Config) -> None:
        super().__init__(uvicorn)
        self._ours = config

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            _say_serving(self._ours, self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: Any = None) -> None:
        if running := len(self.server_state.tasks):
            calls = "1 call is" if running == 1 else f"{running} calls are"
            wait = f"for at most {self._ours.proxy.stop_timeout_s:g} s more; press Ctrl-C again to stop at once"
            say(f"stopping: {calls} under way, {wait}", event="stopping", running=running)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            asyncio.get_running_loop().call_soon_threadsafe(self._cut_off)  # uvicorn would skip the app's clean-up
        else:
            super().handle_exit(sig, frame)

    def _cut_off(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


class SeveralServers(Multiprocess):
    def keep_subprocess_alive(self) -> None:
        before = [*self.processes]
        super().keep_subprocess_alive()
        for old, new in zip(before, self.processes, strict=True):
            if old is not new:
                log.error("worker %s died (%s): another was started", old.pid, how_it_ended(old.exitcode or 0))

    def terminate_all(self) -> None:
        def cut_off(*_: Any) -> None:
            for worker in self.processes:
                worker.kill()

        signal.signal(signal.SIGINT, cut_off)  # a second Ctrl-C
        for listener in self.sockets:
            listener.close()  # else clients that come now would wait for workers that take no more
        super().terminate_all()
