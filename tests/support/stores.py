"""Where a test's store is: a file, or with `--store postgres` a database of a server that many tests share."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lightning_proxy.store.database import Database, Transaction, Work

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
        self._process: subprocess.Popen[bytes] | None = None
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
        while self._ask("SELECT 1", check=False) != 0:
            assert self._process.poll() is None and time.monotonic() < until, (self.directory / "log").read_text()
            time.sleep(0.02)

    def pids(self) -> Iterator[int]:
        """The server's processes."""
        assert self._process is not None
        yield self._process.pid
        for children in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            yield from map(int, children.read_text().split())

    def stop(self) -> None:
        """End it in its own good order, without waiting for its clients."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(20)

    def kill(self) -> None:
        """End it and its helpers at once, as after a fault: what was not on the disk is gone."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(20)

    def new_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"t{uuid4().hex}"
        self._ask(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, url: str, sql: str) -> None:
        self._run("psql", "-qX", "-d", url, "-c", sql)

    def _ask(self, sql: str, *, check: bool = True) -> int:
        return self._run(
            "psql", "-qX", "-h", str(self.directory), "-U", "lightning", "-c", sql, "postgres", check=check
        )

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
