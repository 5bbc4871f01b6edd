"""Commands that read leave the store as it is, whatever release has made it, and say in one line if they cannot."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from contract.system import free_port
from support.command_line import Done, lightning

READING = [
    ("store", "info"),
    ("store", "info", "--json"),
    ("keys", "list"),
    ("rollouts", "list"),
    ("rollouts", "list", "--json"),
    ("rollouts", "show", "import-"),
    ("rollouts", "diff", "import-", "import-"),
    ("policy", "list"),
    ("costs",),
    ("prompts", "list"),
    ("export", "-"),
    ("export", "-", "--kind", "sft"),
    ("export", "-", "--kind", "atif"),
    ("policy", "export", "0", "new"),
    ("dashboard", "--store", "store.db"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The file of a store that nobody uses, with one rollout; the configuration beside it names it."""
    config = f"store: {{url: 'sqlite:///{tmp_path}/store.db'}}\nproxy: {{port: {free_port()}}}\n"
    (tmp_path / "config.yaml").write_text(config)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert ran(tmp_path, "import", "one.jsonl").returncode == 0
    return tmp_path / "store.db"


def ran(directory: Path, *command: str) -> Done:
    return lightning(*command, cwd=directory)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("PRAGMA user_version = 101", "an earlier lightning-proxy"),
        ("DROP TABLE room_migrations", "an earlier lightning-proxy"),
        ("PRAGMA user_version = 9999", "a newer lightning-proxy"),
        ("UPDATE room_migrations SET number = 9999", "a newer lightning-proxy"),
        ("PRAGMA user_version = 13", "a lightning-proxy before 0.1.0"),
    ],
)
def test_a_store_of_another_schema_is_one_line_and_stays_as_it_is(store: Path, change: str, told: str) -> None:
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        connection.execute(change)
    there, before = sorted(store.parent.glob("store.db*")), store.read_bytes()
    for command in READING:
        done = ran(store.parent, *command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (command, done)
        assert told in done.stderr and str(store) in done.stderr, (command, done.stderr)
    checks = {one["name"]: one for one in json.loads(ran(store.parent, "doctor", "--json").stdout)}
    assert checks["store"]["outcome"] == "failed" and told in checks["store"]["found"]
    ran(store.parent, "status")
    assert (sorted(store.parent.glob("store.db*")), store.read_bytes()) == (there, before)
