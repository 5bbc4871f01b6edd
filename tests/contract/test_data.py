"""CONTRACT.md, section 5: records go out and come in, are copied, moved and looked at; the store and its schema."""

from __future__ import annotations

import json
import random
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import CHAT, Scripted, calls, said, sampled, scripted, told, user
from contract.system import (
    Done,
    Json,
    Process,
    Proxy,
    Served,
    free_port,
    in_this_process,
    lightning,
    ok,
    write_config,
)
from support.paths import has, is_there
from support.stores import Server, postgres_server

pytestmark = pytest.mark.sqlite  # it brings its own server
LOOKS = [*filter(is_there, (
    "rollouts list", "rollouts list --json", "rollouts list --grep add --json", "rollouts show one:1 --json",
    "rollouts diff one:1 two", "policy list --json", "costs --by rollout --json", "store info --json", "export -",
    "export - --kind sft", "prompts list --json",
))]  # fmt: skip
PLAIN: Json = {"messages": [user("q"), said("a")]}
OPEN = json.dumps(PLAIN)[:-1] + ", "
PATHS = [
    "/rollouts?limit=1000", "/rollouts/one:1?requests=whole", "/rollouts/one:1/transitions", "/rollouts/two",
    "/tasks", "/policy", "/policy/versions", "/status", *(["/prompts"] if has("prompts") else []),
    *(["/costs?by=rollout"] if has("costs") else []),
]  # fmt: skip
GO = user("go")
READING = [command for command in (
    ("store", "info"), ("keys", "list"), ("rollouts", "list", "--json"), ("rollouts", "show", "r1"), ("policy", "list"),
    ("costs",), ("prompts", "list"), ("export", "-"), ("policy", "export", "0", "new"),
    ("dashboard", "--store", "store.db"),
) if is_there(command[0])]  # fmt: skip
WRITING = [("keys", "create", "k"), ("import", "one.jsonl"), ("serve",), ("store", "compact"),
           ("store", "backup", "copy.db")]  # fmt: skip
OTHERS = "it belongs to another program"
NEWER = "UPDATE schema_numbers SET number = 99 WHERE room = '{}'"


def fill(proxy: Proxy) -> None:
    """Two rewarded rollouts, one of them held out; one that runs, and one that was discarded."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    first, last = calls(("k1", {"a": 2}), name="add"), said("It is 4.")
    proxy.vllm.answer = lambda body: last if body["messages"][-1]["role"] == "tool" else first
    asked = [{"role": "system", "content": "Add."}, user("2 + 2?")]
    for messages in (asked, [*asked, first, told("k1", "4")]):
        proxy.chat("one:1/tasks/t1/agents/adder", *messages, tools=[tool])
    for name, mode in (("two", "eval"), ("running", "train"), ("given-up", "train")):
        body = {"model": "policy", "messages": [user("add")]}
        assert proxy.post(f"/rollouts/{name}{CHAT}", body, X_Rollout_Mode=mode).status == 200
    proxy.post("/reward", [{"rollout_id": "one:1", "reward": 0.5}, {"rollout_id": "two", "reward": 1}])
    proxy.post("/rollouts/given-up/end", {"status": "discarded"})
    for text in ("You add.", "You add well.") if has("prompts") else ():
        assert proxy.post("/prompts", {"name": "writer", "text": text}).status == 200


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with in_this_process(tmp_path_factory.mktemp("filled")) as proxy:
        fill(proxy)
        yield proxy


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


def rows_of(text: str) -> list[Json]:
    return [*map(json.loads, text.splitlines())]


def files(directory: Path, pattern: str = "*") -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob(pattern)) if path.is_file()}


def test_commands_that_look_show_the_same_of_a_store_alone_and_leave_it_as_it_is(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        fill(proxy)
        before = {command: ok(proxy.run(*command.split())).stdout for command in LOOKS}
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("proxy: {port: 9}\n")
    for command in (*LOOKS, "keys list", "keys purge", "keys revoke nobody", "dashboard", "status", "store compact"):
        assert "Traceback" not in lightning(*command.split(), cwd=empty).stderr
    assert [*files(empty)] == [str(empty / "config.yaml")], "none is made"
    at_rest = files(tmp_path)
    for command in LOOKS:
        done = ok(proxy.run(*command.split()))
        if command not in ("rollouts list", "store info --json"):  # which show ages, and a log
            assert done.stdout == before[command], command
        if not command.startswith(("store", "export")):
            assert f"no proxy answers at {proxy.url}: showing the store" in done.stderr
    assert files(tmp_path) == at_rest
    refused = proxy.run("rollouts", "end", "running")
    assert refused.returncode == 1 and "start it with `lightning-proxy serve`" in refused.stderr


def test_transitions_go_out_as_the_api_has_them(filled: Proxy) -> None:
    rows = rows_of(ok(filled.run("export", "-", "--task", "t1")).stdout)
    wanted = filled.get("/rollouts/one:1/transitions")["data"]
    assert len(wanted) == 3, "two calls and a tool"
    for row, one in zip(rows, wanted, strict=True):
        for name in ("t", "kind", "agent", "call_id", "reward", "done"):
            assert row[name] == one[name], name
        assert row["action"].items() <= one["action"].items(), "a row holds its token ids once"
    first, _, last = rows
    assert (first["rollout_id"], first["task_id"], last["rollout_reward"]) == ("one:1", "t1", 0.5)
    assert (last["prompt_token_ids"], last["response_token_ids"], last["logprobs"]) == ([1, 2, 3], [5, 6], [-0.5, -1.5])
    assert (last["policy_version"], last["done"], last["usage"]["completion_tokens"]) == (0, True, 2)


def test_a_failed_export_leaves_the_old_file_and_nothing_else(filled: Proxy, tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("old")
    for target in ("old.jsonl", "nowhere/new.jsonl", "old.jsonl/new.jsonl", "."):
        more = ("--since", "then") if target == "old.jsonl" else ()
        done = filled.run("export", tmp_path / target, *more)
        assert done.returncode in (1, 2) and done.stderr.splitlines()[-1].startswith("lightning-proxy: "), done
    full = filled.run("export", "/dev/full")
    assert full.returncode == 1 and "Traceback" not in full.stderr
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"old.jsonl": "old"}


def elsewhere(directory: Path) -> Callable[..., Done]:
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(f"store: {{url: 'sqlite:///{directory}/store.db'}}\nproxy: {{port: 9}}\n")
    return lambda *arguments: lightning("--config", directory / "config.yaml", *arguments, cwd=directory)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_goes_out_comes_in_as_the_same_conversations_and_once(filled: Proxy, suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    file, other = tmp_path / f"rows.{suffix}", elsewhere(tmp_path / "other")
    ok(filled.run("export", file, "--kind", "sft", "--mode", "all", "--status", "completed"))
    assert ok(other("import", file)).stderr == f"2 rollouts imported from {file}\n"
    assert ok(other("import", file)).stderr == f"0 rollouts imported from {file}, 2 were already in the store\n"
    facts = ("messages", "tools", "task_id", "mode", "status", "reward", "model")
    there, here = (
        sorted(({fact: row[fact] for fact in facts} for row in rows_of(ok(done).stdout)), key=str)
        for done in (run("export", "-", "--kind", "sft", "--mode", "all") for run in (other, filled.run))
    )
    assert there == here and len(here) == 2


def test_a_wrong_line_is_named_and_nothing_is_imported(tmp_path: Path) -> None:
    wrong: list[tuple[Json | str, str]] = [
        ("{", "line 2: "),
        ({"prompt": "a"}, "line 2: it is not an object with a list of `messages`"),
        ({"messages": [GO]}, "line 2: it needs an assistant message"),
        ({"messages": [GO | {"role": "robot"}]}, "line 2: message 1: `role` must be"),
        (PLAIN | {"reward": 10**400}, "line 2: `reward` is not a finite number"),
        (PLAIN | {"reward": 20_000}, "conversation 2: reward: 20000 is outside of rewards.range"),
        (f'{OPEN}"reward": NaN}}', "line 2: NaN is not JSON"),
        (PLAIN | {"task_id": "a b"}, "line 2: task_id must be"),
        (PLAIN | {"mode": "test"}, "line 2: `mode` must be train or eval"),
        (f'{OPEN}"x": {"[" * 5000}{"]" * 5000}}}', "line 2: nested too deeply"),
        ({"messages": [*PLAIN["messages"], {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "message 3: `tool_ca"),
    ]
    file, run = tmp_path / "rows.jsonl", elsewhere(tmp_path)
    for row, why in wrong:
        file.write_text(f"{json.dumps(PLAIN)}\n{row if isinstance(row, str) else json.dumps(row)}\n")
        done = run("import", file)
        assert (done.returncode, done.stderr.count("\n"), why in done.stderr) == (2, 1, True), done.stderr[:500]
        assert not (tmp_path / "store.db").exists()


def test_a_store_is_copied_while_it_is_in_use_and_made_again_from_the_copy(tmp_path: Path) -> None:
    copy, other = tmp_path / "copy.db", elsewhere(tmp_path / "other")
    with in_this_process(tmp_path) as proxy:
        proxy.chat("r1")
        ok(proxy.run("store", "backup", copy))
        proxy.chat("r2")
        again = proxy.run("store", "backup", copy)
        assert (again.returncode, again.stderr) == (1, f"lightning-proxy: {copy} already exists: name a new file\n")
        assert re.fullmatch(r".+ before, .+ now\n", ok(proxy.run("store", "compact")).stdout)
        found = ok(proxy.run("store", "info", "--json")).json
        assert (found["rollouts"], found["calls"], found["rewards"]) == ({"train running": 2}, 2, 0)
    for name in ("config.yaml", "missing.db"):
        refused = other("store", "restore", tmp_path / name)
        assert (refused.returncode, "there is no backup of a store at" in refused.stderr) == (1, True)
    for why in ("", "there is already a store at"):
        assert why in other("store", "restore", copy).stderr
        found = ok(other("store", "info", "--json")).json
        assert (found["rollouts"], found["calls"]) == ({"train running": 1}, 1)
    assert not list(tmp_path.rglob("*.part*"))


def answers(directory: Path, url: str, do: Callable[[Proxy], Any] = lambda _: None) -> dict[str, Any]:
    """What a store's proxy answers, after something was done with it."""
    with in_this_process(directory, store={"url": url}) as proxy:
        do(proxy)
        return {path: proxy.get(path) for path in PATHS}


def test_a_store_is_moved_to_postgresql_and_back_with_the_same_answers(tmp_path: Path, server: Server) -> None:
    first, last = (f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "last"))
    before, there = answers(tmp_path, first, fill), server.new_database()
    content = (tmp_path / "first.db").read_bytes()
    done = ok(lightning("store", "migrate", first, there, cwd=tmp_path))
    assert "calls: 5 rows\n" in done.stdout and "rows moved, each compared" in done.stdout
    assert (tmp_path / "first.db").read_bytes() == content
    assert answers(tmp_path, there) == before
    for source, target in ((first, there), (there, first)):
        refused = lightning("store", "migrate", source, target, cwd=tmp_path)
        assert refused.returncode == 1 and "already" in refused.stderr and refused.stderr.count("\n") == 1
    ok(lightning("store", "migrate", there, last, cwd=tmp_path))
    assert answers(tmp_path, last) == before
    goes_on = answers(tmp_path, last, lambda proxy: proxy.chat("new"))
    assert len(goes_on["/rollouts?limit=1000"]["data"]) == 5
    assert (tmp_path / "last.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.feature("page")
@pytest.mark.feature("prompts")
def test_the_page_over_a_store_alone_answers_its_key_and_leaves_the_store_as_it_is(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        fill(proxy)
        ok(proxy.run("store", "backup", tmp_path / "copy.db"))
    copy, port = tmp_path / "copy.db", free_port()
    before = copy.read_bytes()
    copy.chmod(0o400)
    process = Process(tmp_path, "dashboard", "--store", str(copy), "--port", str(port))
    page = Served(f"http://127.0.0.1:{port}", tmp_path, server=process)
    process.start()
    try:
        page.wait_for("/readyz", 60)
        (key,) = re.findall(rf"{copy}: {page.url}/#/\?key=(\S+)", process.log.read_text())
        assert page.call("GET", "/rollouts", key="another").status == 401, "another user of this machine"
        for path in ("/", "/rollouts", "/rollouts/one:1", "/tasks", "/status", "/policy/versions", "/prompts"):
            assert page.call("GET", path, key=key).status == 200, path
        for method, path in (("POST", "/reward"), ("POST", CHAT), ("DELETE", "/rollouts/two")):
            assert page.call(method, path, key=key).status in (404, 405), path
    finally:
        page.client.close()
        assert process.end(signal.SIGINT) == 0
    assert copy.read_bytes() == before and not [*tmp_path.glob("copy.db-*")]


def test_odd_records_are_exported_or_left_out_with_the_reason(model: Scripted) -> None:
    values: list[Any] = [None, 5.5, "x", [], {}, [None], [[]], [{}], {"a": 1}, [{"type": 5}], [{"type": "text"}]]
    for i, value in enumerate(values):
        calls = [{"id": value, "type": value, "function": {"name": value, "arguments": value}}]
        odd, result = said(value, reasoning_content=value, tool_calls=calls), {"role": "tool", "tool_call_id": value}
        turns: list[tuple[Any, Any]] = [
            ([GO], odd), ([GO], said("a", tool_calls=value)), ([GO, odd, result | {"content": value}], said("a")),
            ([GO, value], said("a")), (value, value),
        ]  # fmt: skip
        for n, (messages, answer) in enumerate(turns):
            model.ask(f"/rollouts/odd-{n}-{i}{CHAT}", {"messages": messages, "temperature": value}, answer)
    model.ask(f"/rollouts/good{CHAT}", {"messages": [GO]}, said("a"))
    for kind, file in (("transitions", "-"), ("transitions", "t.parquet"), ("sft", "-"), ("sft", "s.parquet")):
        done = model.proxy.run("export", file, "--kind", kind, "--mode", "all", "--status", "all")
        assert done.returncode == 0, (kind, file, done.stderr)
        assert file != "-" or '"good"' in done.stdout, kind


@pytest.fixture
def proxy(tmp_path: Path) -> Proxy:
    """One that does not run: its configuration alone."""
    (tmp_path / "one.jsonl").write_text(json.dumps(PLAIN))
    write_config(tmp_path, "http://127.0.0.1:9/v1", free_port())
    return Proxy("", tmp_path)


def refused(proxy: Proxy, told: str, *commands: tuple[str, ...]) -> None:
    """Check that each command says so in one line, and changes nothing."""
    before = files(proxy.directory)
    for command in commands:
        done = proxy.run(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (command, done)
        assert told in done.stderr and str(proxy.directory / "store.db") in done.stderr, (command, done.stderr)
    assert files(proxy.directory) == before


def test_a_file_of_another_program_is_one_line_and_stays_as_it_is(proxy: Proxy) -> None:
    with closing(sqlite3.connect(proxy.directory / "store.db", isolation_level=None)) as file:
        file.executescript("CREATE TABLE rollouts (a TEXT); PRAGMA user_version = 121")
    refused(proxy, OTHERS, *READING, *WRITING)
    checks = {one["name"]: one for one in proxy.run("doctor", "--json").json}
    assert checks["store"]["outcome"] == "failed" and OTHERS in checks["store"]["found"]


@pytest.mark.parametrize("room", ["store", pytest.param("promotion", marks=pytest.mark.feature("promotion"))])
def test_the_number_of_a_rooms_schema_that_differs_is_named(proxy: Proxy, room: str) -> None:
    ok(proxy.run("keys", "create", "k"))
    with closing(sqlite3.connect(proxy.directory / "store.db", isolation_level=None)) as file:
        ((number,),) = file.execute("SELECT number FROM schema_numbers WHERE room = ?", [room])
        file.execute(NEWER.format(room))
    refused(
        proxy,
        f"its {room} schema has version 99, but version {number} is needed: move the store and policy.directory "
        "elsewhere",
        *READING,
        *WRITING,
    )


@pytest.mark.feature("evaluation")
def test_tables_of_a_room_that_a_store_has_not_yet_are_made_once_it_is_written_to(proxy: Proxy) -> None:
    ok(proxy.run("keys", "create", "before"))
    with closing(sqlite3.connect(proxy.directory / "store.db", isolation_level=None)) as file:
        file.executescript("DROP TABLE evaluations; DELETE FROM schema_numbers WHERE room = 'evaluation'")
    refused(proxy, "it has no tables for evaluation yet; `lightning-proxy serve` creates the tables", *READING)
    ok(proxy.run("keys", "create", "after"))
    assert [key["name"] for key in proxy.run("keys", "list", "--json").json["data"]] == ["before", "after"]


@pytest.mark.parametrize(
    ("script", "told"),
    [("CREATE TABLE rollouts (a TEXT)", OTHERS), (NEWER.format("store"), "its store schema has version 99")],
)
def test_a_database_of_another_schema_is_one_line(tmp_path: Path, server: Server, script: str, told: str) -> None:
    url = server.new_database()
    write_config(tmp_path, "http://127.0.0.1:9/v1", free_port(), store={"url": url})
    proxy = Proxy("", tmp_path)
    if script.startswith("UPDATE"):
        ok(proxy.run("keys", "create", "k"))
    server.execute(url, script)
    for command in (("keys", "list"), ("keys", "create", "k")):
        done = proxy.run(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (command, done)
        assert told in done.stderr


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_several_processes_make_a_store_at_once(tmp_path: Path, server: Server, database: str) -> None:
    url = server.new_database() if database == "postgres" else f"sqlite:///{tmp_path}/store.db"
    write_config(tmp_path, "http://127.0.0.1:9/v1", free_port(), store={"url": url})
    proxy = Proxy("", tmp_path)
    with ThreadPoolExecutor(4) as threads:
        made = [*threads.map(lambda n: proxy.process("keys", "create", f"k{n}"), range(4))]
    assert [done.returncode for done in made] == [0] * 4, made
    assert len(proxy.run("keys", "list", "--json").json["data"]) == 4
    with in_this_process(tmp_path, store={"url": url}) as proxy:
        key = made[0].stdout.strip()
        assert proxy.chat("r1", key=key).status == 200
        proxy.reward("r1", 1, key)
        info = proxy.run("store", "info", "--json").json
        assert (info["calls"], info["rewards"]) == (1, 1)


def test_a_conversation_that_goes_back_and_on_is_read_as_it_was_sent(tmp_path: Path) -> None:
    messages, tools = [user("one"), said("two"), user("three")], [{"name": "search"}, {"name": "open"}]
    long, short = ({"messages": messages[:n], "tools": tools[:n]} for n in (3, 1))
    asked = [long, short, *({"messages": [user(other)]} for other in "abc"), long]
    with scripted(tmp_path) as model:
        for request in asked:
            model.ask(f"/rollouts/r{CHAT}", request, said("fine"))
        found = [call["request"] for call in model.proxy.rollout("r")["calls"]]
    assert found == [{"model": "m"} | request for request in asked]


def test_fifty_turns_take_about_twice_what_is_new_in_them(tmp_path: Path) -> None:
    """An agent sends its whole history again at every turn; new are every text, once, and each token's two numbers."""
    source, turns, unique, sizes = random.Random(0), 50, 0, []
    prompt, messages = list(range(700)), [user("the task")]
    request = {"model": "policy", "tools": [{"name": "search", "description": "look for it " * 50}], "max_tokens": 9}
    with scripted(tmp_path) as model:
        for number in range(turns + 1):
            text, query, result = (source.randbytes(size).hex() for size in (560, 140, 1680))
            answer, ids = calls((f"c{number}", query), name="search", text=text), list(range(number, number + 120))
            model.ask(f"/rollouts/r{CHAT}", request | {"messages": messages}, sampled(answer, prompt, ids))
            unique += (len(text + query + result) + 3 * 4 * 120) * (number > 0)
            if number in (0, turns):
                info = model.proxy.run("store", "info", "--json").json
                sizes.append(info["bytes"] - info["free"])
            messages = [*messages, answer, told(f"c{number}", result)]
            prompt = [*prompt, *ids, *ids]
        last = model.proxy.rollout("r")["calls"][-1]["request"]["messages"]
        assert last == messages[:-2] and len(last) == 2 * turns + 1
    assert sizes[1] - sizes[0] < 3 * unique, "sent again, it would be 25 times"
