"""CONTRACT.md, section 5: the store is made when it is opened; one of another schema is named and left alone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from contract.system import Proxy, free_port, in_this_process, write_config
from support.paths import is_there
from support.stores import Server, postgres_server

pytestmark = pytest.mark.sqlite  # it brings its own server

READING = [command for command in (
    ("store", "info"),
    ("keys", "list"),
    ("rollouts", "list", "--json"),
    ("rollouts", "show", "r1"),
    ("policy", "list"),
    ("costs",),
    ("prompts", "list"),
    ("export", "-"),
    ("policy", "export", "0", "new"),
    ("dashboard", "--store", "store.db"),
) if is_there(command[0])]  # fmt: skip
WRITING = [
    ("keys", "create", "k"),
    ("import", "one.jsonl"),
    ("serve",),
    ("store", "compact"),
    ("store", "backup", "copy.db"),
]
ASIDE = "move the store and policy.directory aside"
OTHERS = "it belongs to another program"
NEWER = "UPDATE schema_numbers SET number = 99 WHERE room = '{}'"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def proxy(tmp_path: Path) -> Proxy:
    """One that does not run: its configuration alone."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    write_config(tmp_path, "http://127.0.0.1:9/v1", free_port())
    return Proxy("", tmp_path)


def files_of(proxy: Proxy) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in proxy.directory.glob("store.db*")}


def refused(proxy: Proxy, told: str, *commands: tuple[str, ...]) -> None:
    """Check that each command says so in one line, and changes nothing of the store's file."""
    before = files_of(proxy)
    for command in commands:
        done = proxy.run(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (command, done)
        assert told in done.stderr and str(proxy.directory / "store.db") in done.stderr, (command, done.stderr)
    assert files_of(proxy) == before


def test_a_file_of_another_program_is_one_line_and_stays_as_it_is(proxy: Proxy) -> None:
    with closing(sqlite3.connect(proxy.directory / "store.db", isolation_level=None)) as file:
        file.executescript("CREATE TABLE rollouts (a TEXT); PRAGMA user_version = 121")
    refused(proxy, OTHERS, *READING, *WRITING)
    checks = {one["name"]: one for one in proxy.run("doctor", "--json").json}
    assert checks["store"]["outcome"] == "failed" and OTHERS in checks["store"]["found"]


@pytest.mark.parametrize("room", ["store", pytest.param("promotion", marks=pytest.mark.feature("promotion"))])
def test_the_number_of_a_rooms_schema_that_differs_is_named(proxy: Proxy, room: str) -> None:
    assert proxy.run("keys", "create", "k").returncode == 0
    with closing(sqlite3.connect(proxy.directory / "store.db", isolation_level=None)) as file:
        ((number,),) = file.execute("SELECT number FROM schema_numbers WHERE room = ?", [room])
        file.execute(NEWER.format(room))
    refused(proxy, f"its schema of {room} is number 99, and this checkout's {number}: {ASIDE}", *READING, *WRITING)


@pytest.mark.feature("evaluation")
def test_tables_of_a_room_that_a_store_has_not_yet_are_made_once_it_is_written_to(proxy: Proxy) -> None:
    assert proxy.run("keys", "create", "before").returncode == 0
    with closing(sqlite3.connect(proxy.directory / "store.db", isolation_level=None)) as file:
        file.executescript("DROP TABLE evaluations; DELETE FROM schema_numbers WHERE room = 'evaluation'")
    refused(proxy, "it has no tables of evaluation yet: `lightning-proxy serve` makes its tables", *READING)
    assert proxy.run("keys", "create", "after").returncode == 0
    assert [key["name"] for key in proxy.run("keys", "list", "--json").json["data"]] == ["before", "after"]


@pytest.mark.parametrize(
    ("script", "told"),
    [("CREATE TABLE rollouts (a TEXT)", OTHERS), (NEWER.format("store"), "its schema of store is number 99")],
)
def test_a_database_of_another_schema_is_one_line(tmp_path: Path, server: Server, script: str, told: str) -> None:
    url = server.new_database()
    write_config(tmp_path, "http://127.0.0.1:9/v1", free_port(), store={"url": url})
    proxy = Proxy("", tmp_path)
    if script.startswith("UPDATE"):
        assert proxy.run("keys", "create", "k").returncode == 0
    server.execute(url, script)
    for command in (("keys", "list"), ("keys", "create", "k")):
        done = proxy.run(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (command, done)
        assert told in done.stderr


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_new_store_keeps_what_is_recorded_and_opens_again(tmp_path: Path, server: Server, database: str) -> None:
    url = server.new_database() if database == "postgres" else f"sqlite:///{tmp_path}/store.db"
    for times in (1, 2):
        with in_this_process(tmp_path, store={"url": url}) as proxy:
            assert proxy.chat(f"r{times}").status == 200
            assert proxy.post("/reward", {"rollout_id": f"r{times}", "reward": times}).status == 200
            assert [one["reward"] for one in proxy.get("/rollouts")["data"]] == [*range(times, 0, -1)]
            assert [one["version"] for one in proxy.get("/policy/versions")["data"]] == [0]
            info = proxy.run("store", "info", "--json").json
            assert (info["calls"], info["rewards"]) == (times, times)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_several_processes_make_a_store_at_once(tmp_path: Path, server: Server, database: str) -> None:
    url = server.new_database() if database == "postgres" else f"sqlite:///{tmp_path}/store.db"
    write_config(tmp_path, "http://127.0.0.1:9/v1", free_port(), store={"url": url})
    proxy = Proxy("", tmp_path)
    with ThreadPoolExecutor(4) as threads:
        made = [*threads.map(lambda n: proxy.process("keys", "create", f"k{n}"), range(4))]
    assert [done.returncode for done in made] == [0] * 4, made
    assert len(proxy.run("keys", "list", "--json").json["data"]) == 4
