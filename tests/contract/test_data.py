"""CONTRACT.md, section 5: what was recorded goes out and comes in, is copied, moved and looked at."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.scripted import CHAT, Scripted, said, user
from contract.system import Done, Json, Process, Proxy, free_port, in_this_process, lightning, wait_until
from contract.vllm import PlayedVllm
from support.paths import has, is_there
from support.stores import postgres_server

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADDS = {"id": "k1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
LOOKS = [*filter(is_there, (
    "rollouts list", "rollouts list --json", "rollouts list --grep add --json", "rollouts show one:1 --json",
    "rollouts diff one:1 two", "policy list --json", "costs --by rollout --json", "store info --json", "export -",
    "export - --kind sft", "prompts list --json",
))]  # fmt: skip


def by_tool(body: Json) -> Json:
    """Ask for the tool's result, then say it."""
    if body["messages"][-1]["role"] == "tool":
        return {"role": "assistant", "content": "It is 4."}
    return {"role": "assistant", "content": None, "tool_calls": [ADDS]}


def fill(proxy: Proxy) -> None:
    """Two rewarded rollouts, one of them held out; one that runs, and one that was discarded."""
    assert proxy.vllm is not None
    proxy.vllm.answer = by_tool
    asked: list[Json] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}]
    for result in ([], [{"role": "tool", "tool_call_id": "k1", "content": "4"}]):
        asked += result
        body = {"model": "policy", "messages": asked, "tools": [TOOL]}
        answer = proxy.post("/rollouts/one:1/tasks/t1/agents/adder/v1/chat/completions", body)
        asked.append(answer.json["choices"][0]["message"])
    for name, mode in (("two", "eval"), ("running", "train"), ("given-up", "train")):
        body = {"model": "policy", "messages": [{"role": "user", "content": "add"}]}
        assert proxy.post(f"/rollouts/{name}/v1/chat/completions", body, X_Rollout_Mode=mode).status == 200
    proxy.post("/reward", [{"rollout_id": "one:1", "reward": 0.5}, {"rollout_id": "two", "reward": 1}])
    proxy.post("/rollouts/given-up/end", {"status": "discarded"})
    for text in ("You add.", "You add well.") if has("prompts") else ():
        assert proxy.post("/prompts", {"name": "writer", "text": text}).status == 200


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with in_this_process(tmp_path_factory.mktemp("filled")) as proxy:
        fill(proxy)
        yield proxy


def ok(done: Done) -> Done:
    assert done.returncode == 0, done
    return done


def rows_of(text: str) -> list[Json]:
    return [json.loads(line) for line in text.splitlines()]


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.sqlite
def test_commands_that_look_show_the_same_of_a_store_alone_and_leave_it_as_it_is(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        fill(proxy)
        before = {command: ok(proxy.run(*command.split())).stdout for command in LOOKS}
    at_rest = files(tmp_path)
    for command in LOOKS:
        done = ok(proxy.run(*command.split()))
        if command not in ("rollouts list", "store info --json"):  # which show ages, and a log
            assert done.stdout == before[command], command
        if not command.startswith(("store", "export")):
            assert f"no proxy answers at {proxy.url}: this is the store" in done.stderr
    assert files(tmp_path) == at_rest
    refused = proxy.run("rollouts", "end", "running")
    assert refused.returncode == 1 and "start it with `lightning-proxy serve`" in refused.stderr


def test_commands_that_look_make_no_store(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("proxy: {port: 9}\n")
    for command in (*LOOKS, "keys list", "keys purge", "keys revoke nobody", "dashboard", "status", "store compact"):
        assert "Traceback" not in lightning(*command.split(), cwd=tmp_path).stderr
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


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
    """Runs commands over a store in another directory."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(f"store: {{url: 'sqlite:///{directory}/store.db'}}\nproxy: {{port: 9}}\n")
    return lambda *arguments: lightning("--config", directory / "config.yaml", *arguments, cwd=directory)


FACTS = ("messages", "tools", "task_id", "mode", "status", "reward", "model")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_goes_out_comes_in_as_the_same_conversations_and_once(filled: Proxy, suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    file, other = tmp_path / f"rows.{suffix}", elsewhere(tmp_path / "other")
    ok(filled.run("export", file, "--kind", "sft", "--mode", "all", "--status", "completed"))
    assert ok(other("import", file)).stderr == f"2 rollouts from {file}\n"
    assert ok(other("import", file)).stderr == f"0 rollouts from {file}, 2 were there already\n"
    there, here = (
        sorted(({fact: row[fact] for fact in FACTS} for row in rows_of(ok(done).stdout)), key=str)
        for done in (
            other("export", "-", "--kind", "sft", "--mode", "all"),
            filled.run("export", "-", "--kind", "sft", "--mode", "all"),
        )
    )
    assert there == here and len(here) == 2


PLAIN: Json = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
OPEN = json.dumps(PLAIN)[:-1] + ", "


WRONG: list[tuple[Json | str, str]] = [
    ("{", "line 2: "),
    ({"prompt": "a"}, "line 2: it is not an object with `messages`"),
    ({"messages": [{"role": "user", "content": "a"}]}, "line 2: no assistant message"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "line 2: message 1: `role` must be"),
    ({**PLAIN, "reward": "good"}, "line 2: `reward` is not a finite number"),
    ({**PLAIN, "reward": 10**400}, "line 2: `reward` is not a finite number"),
    ({**PLAIN, "reward": 20_000}, "conversation 2: reward: 20000 is outside of rewards.range"),
    (f'{OPEN}"reward": NaN}}', "line 2: NaN is not JSON"),
    (f'{OPEN}"reward": 1e999}}', "line 2: `reward` is not a finite number"),
    ({**PLAIN, "task_id": "a b"}, "line 2: task_id must be"),
    ({**PLAIN, "mode": "test"}, "line 2: `mode` must be train or eval"),
    ("[" * 100_000 + "]" * 100_000, "line 2: nested too deeply"),
    (f'{OPEN}"x": {"[" * 5000}{"]" * 5000}}}', "line 2: nested too deeply"),
    ({"messages": [*PLAIN["messages"], {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "message 3: `tool_ca"),
]


def test_a_wrong_line_is_named_and_nothing_is_imported(tmp_path: Path) -> None:
    file, run = tmp_path / "rows.jsonl", elsewhere(tmp_path)
    for row, why in WRONG:
        file.write_text(f"{json.dumps(PLAIN)}\n{row if isinstance(row, str) else json.dumps(row)}\n")
        done = run("import", file)
        assert (done.returncode, done.stderr.count("\n"), why in done.stderr) == (2, 1, True), done.stderr[:500]
        assert not (tmp_path / "store.db").exists()


@pytest.mark.sqlite
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
        assert (refused.returncode, "is not a backup of a store" in refused.stderr) == (1, True)
    ok(other("store", "restore", copy))
    found = ok(other("store", "info", "--json")).json
    assert (found["rollouts"], found["calls"]) == ({"train running": 1}, 1)
    refused = other("store", "restore", copy)
    assert refused.returncode == 1 and "there is already a store at" in refused.stderr
    assert not list(tmp_path.rglob("*.part*"))


PATHS = [
    "/rollouts?limit=1000", "/rollouts/one:1?requests=whole", "/rollouts/one:1/transitions", "/rollouts/two",
    "/tasks", "/policy", "/policy/versions", "/status", *(["/prompts"] if has("prompts") else []),
    *(["/costs?by=rollout"] if has("costs") else []),
]  # fmt: skip


def answers(directory: Path, url: str, do: Callable[[Proxy], None] = lambda _: None) -> dict[str, Any]:
    """What the API says of a store at a URL, after something was done."""
    with in_this_process(directory, PlayedVllm(directory), store={"url": url}) as proxy:
        do(proxy)
        return {path: proxy.get(path) for path in PATHS}


@pytest.mark.sqlite
def test_a_store_is_moved_to_postgresql_and_back_with_the_same_answers(tmp_path: Path) -> None:
    first, last = (f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "last"))
    before = answers(tmp_path, first, fill)
    content = (tmp_path / "first.db").read_bytes()
    with postgres_server() as server:
        there = server.new_database()
        done = ok(lightning("store", "migrate", first, there, cwd=tmp_path))
        assert "calls: 5 rows\n" in done.stdout and "rows moved, each compared" in done.stdout
        assert (tmp_path / "first.db").read_bytes() == content
        assert answers(tmp_path, there) == before
        for source, target in ((first, there), (there, first)):
            refused = lightning("store", "migrate", source, target, cwd=tmp_path)
            assert refused.returncode == 1 and "already" in refused.stderr and refused.stderr.count("\n") == 1
        ok(lightning("store", "migrate", there, last, cwd=tmp_path))

        def goes_on(proxy: Proxy) -> None:
            assert {path: proxy.get(path) for path in PATHS} == before
            assert proxy.chat("new").status == 200

        assert len(answers(tmp_path, last, goes_on)["/rollouts?limit=1000"]["data"]) == 5
    assert (tmp_path / "last.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.sqlite
@pytest.mark.feature("page")
@pytest.mark.feature("prompts")
def test_the_page_over_a_store_alone_answers_its_key_and_leaves_the_store_as_it_is(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        fill(proxy)
        ok(proxy.run("store", "backup", tmp_path / "copy.db"))
    copy, port = tmp_path / "copy.db", free_port()
    before = copy.read_bytes()
    copy.chmod(0o400)
    page = Process(tmp_path, "dashboard", "--store", str(copy), "--port", str(port))
    page.start()
    try:
        said = re.compile(rf"{copy}: http://127\.0\.0\.1:{port}/#/\?key=(\S+)")
        wait_until(lambda: said.search(page.log.read_text()), 60, "it says where it listens")
        (key,) = said.findall(page.log.read_text())

        def status(method: str, path: str, key: str | None = key) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            url = f"http://127.0.0.1:{port}{path}"
            return httpx.request(method, url, headers=headers, trust_env=False, timeout=30).status_code

        def listens() -> bool:
            try:
                return status("GET", "/readyz") < 600
            except httpx.HTTPError:
                return False

        wait_until(listens, 60, "it listens")
        assert status("GET", "/rollouts", None) == 401, "another user of this machine"
        for path in ("/", "/rollouts", "/rollouts/one:1", "/tasks", "/status", "/policy/versions", "/prompts"):
            assert status("GET", path) == 200, path
        for method, path in (("POST", "/reward"), ("POST", "/v1/chat/completions"), ("DELETE", "/rollouts/two")):
            assert status(method, path) in (404, 405), path
    finally:
        assert page.end(signal.SIGINT) == 0
    assert copy.read_bytes() == before and not [*tmp_path.glob("copy.db-*")]


GO = user("go")
VALUES: list[Any] = [None, 5.5, "x", [], {}, [None], [[]], [{}], {"a": 1}, [{"type": 5}], [{"type": "text"}]]


def test_odd_records_are_exported_or_left_out_with_the_reason(model: Scripted) -> None:
    for i, value in enumerate(VALUES):
        calls = [{"id": value, "type": value, "function": {"name": value, "arguments": value}}]
        odd = said(value, reasoning_content=value, tool_calls=calls)
        for name, messages, answer in (
            ("answer", [GO], odd),
            ("calls", [GO], said("a", tool_calls=value)),
            ("request", [GO, odd, {"role": "tool", "tool_call_id": value, "content": value}], said("a")),
            ("message", [GO, value], said("a")),
            ("all", value, value),
        ):
            model.ask(f"/rollouts/odd-{name}-{i}{CHAT}", {"messages": messages, "temperature": value}, answer)
    model.ask(f"/rollouts/good{CHAT}", {"messages": [GO]}, said("a"))
    for kind, file in (("transitions", "-"), ("transitions", "t.parquet"), ("sft", "-"), ("sft", "s.parquet")):
        done = model.proxy.run("export", file, "--kind", kind, "--mode", "all", "--status", "all")
        assert done.returncode == 0, (kind, file, done.stderr)
        assert file != "-" or '"good"' in done.stdout, kind
