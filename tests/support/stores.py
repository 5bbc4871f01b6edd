"""Where a test's store is: a file, or with `--store postgres` a database of a server; and the store's statements."""

from __future__ import annotations

import ast
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lightning_proxy.store.database import Database, Transaction, Work
from lightning_proxy.store.reports import NEWEST
from lightning_proxy.store.rollouts import ROLLOUT_FILTERS, page_of
from support.paths import ROOT

# Debian keeps the server's programs off the PATH.
PLACES = [*os.environ.get("PATH", "").split(os.pathsep), *map(str, sorted(Path("/").glob("usr/lib/postgresql/*/bin")))]
INITDB = shutil.which("initdb", path=os.pathsep.join(PLACES))
NO_SERVER = "PostgreSQL's server (initdb) is not installed"
SETTINGS = {"fsync": "off", "listen_addresses": "", "shared_buffers": "32MB", "max_connections": "60"}
# Ends the connections by which this database's works are done alone.
END_LOCKS = """
SELECT pg_terminate_backend(pid) FROM pg_locks
WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND pid IN (SELECT pid FROM pg_stat_activity WHERE state = 'idle')
"""


class Server:
    """A server that is reached by a socket in its directory. `settings`: postgresql.conf's."""

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        assert INITDB is not None, NO_SERVER
        self.directory = directory
        self._programs = Path(INITDB).resolve().parent
        self._settings = SETTINGS | settings
        # The server refuses to run as root.
        self._user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() == 0:
            shutil.chown(directory, self._user, pwd.getpwnam(self._user).pw_gid)
        self._process: Any = None
        self._run("initdb", "-D", f"{directory}/data", "-U", "lightning", "-A", "trust", "--no-sync", "-E", "UTF8")

    def url(self, database: str) -> str:
        return f"postgresql://lightning@/{database}?host={self.directory}"

    def start(self) -> None:
        settings = [f"-c{name}={value}" for name, value in self._settings.items()]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", f"{self.directory}/data", "-k", self.directory, *settings],
                stdout=log, stderr=log, **self._as_user(),
            )  # fmt: skip
        until = time.monotonic() + 20
        while self.execute(self.url("postgres"), "SELECT 1", check=False) != 0:
            assert self._process.poll() is None and time.monotonic() < until, (self.directory / "log").read_text()
            time.sleep(0.02)

    def pids(self) -> Iterator[int]:
        """The server's processes."""
        yield self._process.pid
        for children in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            yield from map(int, children.read_text().split())

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End it in its own good order, without waiting for its clients."""
        self._process.send_signal(number)
        self._process.wait(20)

    def kill(self) -> None:
        """End it and its helpers at once, as after a fault: what was not on the disk is gone."""
        self.stop(signal.SIGQUIT)

    def new_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"t{uuid4().hex}"
        self.execute(self.url("postgres"), f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, url: str, sql: str, *, check: bool = True) -> int:
        return self._run("psql", "-qX", "-d", url, "-c", sql, check=check)

    def _run(self, program: str, *arguments: str, check: bool = True) -> int:
        done = subprocess.run(
            [str(self._programs / program), *arguments], capture_output=True, text=True, **self._as_user()
        )
        assert not check or done.returncode == 0, done.stderr
        return done.returncode

    def _as_user(self) -> dict[str, Any]:
        here: dict[str, Any] = {"cwd": self.directory, "env": {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}}
        return here | ({"user": self._user, "group": pwd.getpwnam(self._user).pw_gid} if os.geteuid() == 0 else {})


@contextmanager
def postgres_server(**settings: str) -> Iterator[Server]:
    """Start a server, and end it and its directory after the block. Skip the test where there is none to start."""
    if INITDB is None:
        pytest.skip(NO_SERVER)
    pytest.importorskip("asyncpg", reason="asyncpg is not installed (the extra `postgres`)")
    directory = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        server = Server(directory, settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


server: Server | None = None
_made: dict[Path, str] = {}


def store_url(directory: Path) -> str:
    """Return the address of the store that belongs to a directory."""
    if server is None:
        return f"sqlite:///{directory}/store.db"
    return _made.get(directory) or _made.setdefault(directory, server.new_database())


class _UndoneError(Exception):
    """Undoes a transaction."""


def do_again(database: Database) -> None:
    """Have every transaction undone when it is almost done, and done again, as where another got in its way."""
    write = database.write

    async def twice(work: Work[Any], size: int = 0) -> Any:
        async def undone(db: Transaction) -> None:
            await work(db)
            raise _UndoneError

        with suppress(_UndoneError):
            await write(undone, size)
        return await write(work, size)

    database.write = twice  # type: ignore[method-assign]


# The statements of the store and of features, wherever they stand in their modules.

TEMPLATE = re.compile(r"\{\w+\}")
ORDINARY = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH RECURSIVE)\s")


def pages() -> dict[str, str]:
    """The statements that are put together when they are run, by what they filter."""
    names = ("", "status", "task_id", "mode", "key_id", "agent")
    return {f"page by {name or 'nothing'}": page_of([name]) for name in names} | {
        f"tasks by {name or 'nothing'}": NEWEST.format(filters=ROLLOUT_FILTERS.get(name, ""))
        for name in ("", "mode", "task_id", "key_id")
    }


def statements() -> Iterator[tuple[str, str]]:
    """Every statement of the store: module constants by name, those that stand in a method by their first words."""
    for path in sorted(path for top in ("store", "features") for path in (ROOT / top).rglob("*.py")):
        # Those of PostgreSQL are ways of one database to say the same; what has none may need an extra.
        if "postgres" in path.parts or not ORDINARY.search(path.read_text()):
            continue
        module = import_module(".".join(("lightning_proxy", *path.relative_to(ROOT).with_suffix("").parts)))
        tree = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        named = {name: value for name, value in vars(module).items() if isinstance(value, str)}
        for name, several in vars(module).items():
            if isinstance(several, tuple):
                named |= {f"{name} {n}": one for n, one in enumerate(several) if isinstance(one, str)}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                    named[node.value[:60]] = node.value
        yield from ((name, text) for name, text in named.items() if ORDINARY.match(text) and not TEMPLATE.search(text))
