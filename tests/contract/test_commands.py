"""CONTRACT.md, section 5: the commands that look at the system and steer it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import yaml
from aiohttp import web

from contract.system import Done, Json, Process, Proxy, in_this_process, lightning, played, wait_until
from contract.vllm import PlayedVllm
from support.paths import is_there

# Each command with arguments that are right in form.
READS_CONFIGURATION = {
    "up": "", "serve": "", "train": "--once", "vllm": "", "status": "", "plan": "--gpus 1x24",
    "keys create": "name", "keys list": "", "keys revoke": "name", "keys purge": "",
    "store info": "", "store compact": "", "store backup": "copy.db", "store restore": "copy.db",
    "reward": "r 1", "run": "--tasks tasks.jsonl -- true", "eval": "--tasks tasks.jsonl -- true",
    "optimize": "--method apo --prompt p --tasks tasks.jsonl --reflect m -- true",
    "rescore": "", "rewards check": "function", "export": "-", "import": "rows.jsonl", "dashboard": "",
    "rollouts list": "", "rollouts show": "r", "rollouts end": "r", "rollouts delete": "r", "rollouts tail": "",
    "rollouts diff": "a b", "rollouts rate": "",
    "policy list": "", "policy promote": "1", "policy rollback": "", "policy export": "1 out", "policy compare": "0 1",
}  # fmt: skip
OTHERS = ("init", "demo", "doctor", "experiment", "environments", "store migrate")
STEERS = (
    "status", "reward", "run", "eval", "rollouts end", "rollouts delete", "rollouts tail", "policy promote",
    "policy rollback",
)  # fmt: skip


def commands(*group: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each command and group below a group, with its help."""
    shown = lightning(*group, "--help", cwd=Path.cwd())
    assert shown.returncode == 0, shown
    yield group, shown.stdout
    below = shown.stdout.partition(" COMMAND ")[1] and shown.stdout.partition("Options:")[2]
    for name in re.findall(r"^  ([a-z]\S*)  ", below, re.M):
        yield from commands(*group, name)


def test_every_command_has_a_help_that_reads_well_at_80_columns(tmp_path: Path) -> None:
    found = dict(commands())
    assert {*filter(is_there, (*READS_CONFIGURATION, *OTHERS))} <= {" ".join(command) for command in found}
    assert lightning("keys", "create", "-h", cwd=tmp_path).stdout == found["keys", "create"]
    for command, text in found.items():
        assert max(map(len, text.splitlines())) <= 80, command
        assert not re.search(r"[│╭]|range>", text) and "..." not in text.partition("Options:")[2], command
    titles = [line for line in found[()].splitlines() if re.fullmatch(r"\S.*:", line)]
    assert len(titles) == 5 and "Commands:" not in titles, "every command is in a group"


def test_the_package_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_proxy", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, lightning("--version", cwd=tmp_path).stdout), done.stderr


def refused(directory: Path, *arguments: str, code: int = 2) -> str:
    """The last line of what a command says that changes nothing; the only one, but for the usage of an option."""
    done = lightning(*arguments, cwd=directory)
    assert (done.returncode, done.stdout) == (code, ""), (arguments, done)
    *before, last = done.stderr.splitlines()
    assert not before or before[0].startswith("Usage: "), done.stderr
    return last


def test_a_wrong_key_file_or_option_is_one_line_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("proxy: {prot: 1}\n")
    no_file = "lightning-proxy: cannot read no.yaml: there is no such file; `lightning-proxy init no.yaml` writes one"
    wrong_key = "lightning-proxy: config.yaml: proxy.prot: unknown key; did you mean port?"
    for command in filter(is_there, READS_CONFIGURATION):
        given = [*command.split(), *READS_CONFIGURATION[command].split()]
        assert refused(tmp_path, *given) == wrong_key
        if command in ("serve", "train", "rollouts list"):
            assert refused(tmp_path, "--config", "no.yaml", *given) == no_file
            said = refused(tmp_path, *command.split(), "--nonsense")
            assert said.startswith("Error: No such option: --nonsense"), command
    assert {file.name for file in tmp_path.iterdir()} == {"config.yaml", "tasks.jsonl"}


# What is wrong, and what names it.
WRONG = {
    "nonsense": "'nonsense'",
    "rollouts show": "'ID'",
    "rollouts list --status gone": "--status",
    "rollouts list --since then": "--since",
    "rollouts list --limit 0": "--limit",
    "reward r nan": "nan",
    "reward r good": "'VALUE'",
    "policy promote x": "'x'",
    "policy export 1 out --as gguf": "--as",
    "keys create a --scope x": "--scope",
    "keys create a --concurrent 18446744073709551616": "--concurrent",
    "export out.csv": "out.csv",
    "export - --kind x": "--kind",
    "import none.jsonl": "none.jsonl",
    "run --tasks none.jsonl -- true": "none.jsonl",
    "run -- true": "--tasks",
    "run --tasks tasks.jsonl --mode test -- true": "--mode",
    "run --tasks tasks.jsonl --logs tasks.jsonl -- true": "--logs: cannot create the directory tasks.jsonl",
    "run --tasks tasks.jsonl -- ./nowhere": "./nowhere",
    "run --tasks tasks.jsonl --resume tasks.jsonl -- true": "tasks.jsonl is not a results file",
    "eval --tasks tasks.jsonl --models live,live -- true": "each once",
    "demo --dir tasks.jsonl": "--dir: cannot create the directory tasks.jsonl",
    "plan": "policy.model",
    "train --method x": "--method must be one of rl",
    "train --data x": "--data and --dir need --offline",
    "run --tasks tasks.jsonl --mode eval --ahead 1 -- true": "--ahead cannot be used with --mode eval",
    "serve --port high": "--port",
    "serve --upstream ftp://h": "upstreams.0: base_url",
    "init new.yaml --upstream ftp://h": "upstreams.0: base_url",
    "store migrate sqlite:///a.db sqlite:///b.db": "one must be",
    "doctor --tasks tasks.jsonl": "--learn",
    "experiment none.yaml": "none.yaml",
}


def test_a_wrong_value_is_one_line_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a"}\n')
    (tmp_path / "config.yaml").write_text("proxy: {port: 9}\n")
    for arguments in filter(is_there, WRONG):
        assert WRONG[arguments] in refused(tmp_path, *arguments.split()), arguments
    assert {file.name for file in tmp_path.iterdir()} == {"config.yaml", "tasks.jsonl"}


def test_without_a_proxy_or_with_another_server_on_its_port_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("proxy: {port: 9}\n")
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a"}\n')
    start = "start it with `lightning-proxy serve`, or wait for `up`"
    for command in STEERS:
        given = [*command.split(), *READS_CONFIGURATION[command].split()]
        assert refused(tmp_path, *given, code=1).endswith(f"no proxy answers at http://127.0.0.1:9; {start}"), command
    text = "<html>"

    async def greet(_: web.Request) -> web.Response:
        return web.Response(text=text)

    stranger = PlayedVllm(tmp_path)
    stranger.app.router.add_get("/{path:.*}", greet)
    with played(stranger) as url:
        (tmp_path / "config.yaml").write_text(f"proxy: {{port: {url.rpartition(':')[2]}}}\n")
        for text, command in (("<html>", "policy list"), ('{"hello": "world"}', "status")):  # noqa: B007
            said = refused(tmp_path, *command.split(), code=1)
            assert f"what answers at {url} is not lightning-proxy" in said


def ask(proxy: Proxy, rollout: str, text: str = "hi", task: str | None = None, reward: float | None = None) -> None:
    names = {} if task is None else {"X_Task_Id": task}
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    assert proxy.post(f"/rollouts/{rollout}/v1/chat/completions", body, **names).status == 200
    if reward is not None:
        assert proxy.post("/reward", {"rollout_id": rollout, "reward": reward}).status == 200


def ok(done: Done) -> Done:
    assert done.returncode == 0, done
    return done


def test_json_is_the_same_data_as_the_apis(proxy: Proxy) -> None:
    ask(proxy, "same-1", task="same", reward=0.5)
    ask(proxy, "same-2", task="same")
    listed = ok(proxy.run("rollouts", "list", "--task", "same", "--json")).json
    assert listed == proxy.get("/rollouts?task_id=same") and len(listed["data"]) == 2
    assert ok(proxy.run("rollouts", "show", "same-1", "--json")).json == proxy.rollout("same-1")
    (base,) = proxy.get("/policy/versions")["data"]
    assert base.items() <= ok(proxy.run("policy", "list", "--json")).json["data"][0].items()
    status = ok(proxy.run("status", "--json")).json
    assert status["ready"] == proxy.get("/readyz") and status["policy"] == proxy.get("/policy")
    posted = ok(proxy.run("reward", "same-2", "-0.5", "--no-final", "--comment", "slow", "--json")).json
    assert posted == {"reward_id": posted["reward_id"], "rollout_id": "same-2", "status": "recorded"}
    found = proxy.rollout("same-2")
    assert (found["reward"], found["status"], found["rewards"][0]["comment"]) == (-0.5, "running", "slow")
    for command in filter(is_there, ("keys list", "store info", "doctor", "costs")):
        assert ok(proxy.run(*command.split(), "--json")).json, command


def test_lists_are_filtered(proxy: Proxy) -> None:
    for name, reward in (("l1", 0.1), ("l2", 0.9), ("l3", 0.5), ("l4", None)):
        ask(proxy, name, f"question {name}", task="lists", reward=reward)

    def listed(*options: str) -> list[str]:
        found = ok(proxy.run("rollouts", "list", "--task", "lists", "--json", *options)).json
        return [one["rollout_id"] for one in found["data"]]

    assert listed("--min-reward", "0.5") == ["l3", "l2"]
    assert listed("--max-reward", "0.5", "--since", "1h") == ["l3", "l1"]
    assert listed("--grep", "QUESTION L3") == ["l3"]
    assert listed("--grep", "nobody said this") == []
    assert listed("--status", "running") == ["l4"]
    assert listed("--limit", "2") == ["l4", "l3"]


def test_rollouts_are_found_by_the_beginnings_of_their_ids(proxy: Proxy) -> None:
    first, second = (one["rollout_id"] for one in proxy.post("/rollouts", {"n": 2}).json)
    proxy.chat(first)
    (call,) = proxy.rollout(first)["calls"]
    ok(proxy.run("reward", first[:12], "0.5", "--call", call["call_id"]))
    assert [(one["call_id"], one["reward"]) for one in proxy.rollout(first)["rewards"]] == [(call["call_id"], 0.5)]
    ended = ok(proxy.run("rollouts", "end", first[:12], second, "--status", "failed", "--reason", "slow"))
    assert ended.stdout == "ended 2 rollouts\n"
    found = proxy.rollout(second)
    assert (found["status"], found["reason"]) == ("failed", "slow")
    for i in range(6):
        proxy.chat(f"alike-{i}")
    for arguments, said in (
        (("rollouts", "show", "alike-"), "several ids begin with it: alike-5, alike-4, alike-3, alike-2, …"),
        (("rollouts", "show", "nobody"), "no rollout 'nobody'"),
        (("rollouts", "show", ".."), "no rollout '..'"),
        (("rollouts", "end", "alike"), "no rollout 'alike'"),  # another's name is not completed to change it
        (("reward", first, "0.5", "--call", "zzz"), "zzz"),
        (("reward", "nobody", "1"), "nobody"),
    ):
        done = proxy.run(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and said in done.stderr, done
    ok(proxy.run("rollouts", "delete", first[:12]))
    assert proxy.call("GET", f"/rollouts/{first}").status == 404


def test_two_rollouts_are_compared(proxy: Proxy) -> None:
    ask(proxy, "a1", "add one", reward=1)
    ask(proxy, "b1", "add two")
    lines = [" ".join(line.split()) for line in ok(proxy.run("rollouts", "diff", "a1", "b1")).stdout.splitlines()]
    assert {"-rollout a1", "+rollout b1", "-reward 1", "+reward -", "- user add one", "+ user add two"} <= {*lines}
    assert "the rollouts are the same" in ok(proxy.run("rollouts", "diff", "a1", "a1")).stdout


def test_tail_tells_of_rollouts_as_they_change(proxy: Proxy) -> None:
    ask(proxy, "before")
    tail = Process(proxy.directory, "rollouts", "tail", "--json")
    tail.start()

    def told() -> list[tuple[str, Any]]:
        lines = [json.loads(line) for line in tail.log.read_text().splitlines()]
        return [(one["rollout_id"], one["reward"]) for one in lines]

    try:
        wait_until(lambda: ("before", None) in told(), 60, "what is there is told")
        ask(proxy, "meanwhile", reward=0.75)
        wait_until(lambda: ("meanwhile", 0.75) in told(), 60, "what changes is told")
    finally:
        assert tail.end(signal.SIGINT) in (0, 130)


def test_a_key_is_printed_once_kept_as_a_hash_and_closes_the_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_this_process(tmp_path) as proxy:
        assert proxy.chat("r1").status == 200
        made = ok(proxy.run("keys", "create", "ci", "--requests-per-minute", "500"))
        key = made.stdout.strip()
        assert (key.startswith("lpk-agent-"), len(key), "not shown again" in made.stderr) == (True, 53, True)
        (listed,) = ok(proxy.run("keys", "list", "--json")).json["data"]
        assert (listed["name"], listed["role"], listed["requests_per_minute"]) == ("ci", "agent", 500)
        wait_until(lambda: proxy.chat("r1").status == 401, 30, "nobody gets in without a key")
        wait_until(lambda: proxy.chat("r1", key=key).status == 200, 30, "the key lets in")
        without = proxy.run("rollouts", "end", "r1")
        assert (without.returncode, without.stderr.count("\n"), "API key" in without.stderr) == (1, 1, True), without
        monkeypatch.setenv("LIGHTNING_API_KEY", f"{key}\n")  # as a file would hold it
        ok(proxy.run("rollouts", "end", "r1"))
        twice = proxy.run("keys", "create", "ci")
        assert (twice.returncode, "'ci'" in twice.stderr) == (1, True)
        assert "no key is left" in ok(proxy.run("keys", "revoke", "ci")).stdout
        wait_until(lambda: proxy.chat("r1", key=key).status == 401, 30, "the key is gone")
        assert proxy.chat("r1").status == 401, "revoking the last key opens nothing"
        ok(proxy.run("keys", "purge"))
        wait_until(lambda: proxy.chat("r1").status == 200, 30, "no key was ever made")
        assert proxy.run("keys", "revoke", "ci").returncode == 1
    if (tmp_path / "store.db").exists():
        assert key.encode() not in b"".join(file.read_bytes() for file in tmp_path.glob("store.db*"))


def checks(proxy: Proxy) -> tuple[int, dict[str, Json]]:
    done = proxy.run("doctor", "--json")
    return done.returncode, {check["name"]: check for check in done.json}


@pytest.mark.parametrize("publish", ["merged", "lora"])
def test_doctor_passes_a_whole_system_and_leaves_nothing_behind(publish: str, tmp_path: Path) -> None:
    with in_this_process(tmp_path, policy={"publish": publish}) as proxy:
        assert proxy.vllm is not None
        proxy.vllm.guarded = True
        code, found = checks(proxy)
        assert {name: check["outcome"] for name, check in found.items()} == dict.fromkeys(found, "ok") and code == 0
        promised = "configuration store proxy tokens logprobs template publishing operator alias rewards trainer"
        assert found.keys() >= {*promised.split(), "upstream policy", "next step"}
        assert (proxy.get("/rollouts")["data"], proxy.vllm.adapters) == ([], {})


FAULTS: list[tuple[str, Any, str, str, str]] = [
    ("returns_token_ids", False, "tokens", "failed", "the server returns no token ids"),
    ("processed_logprobs", False, "logprobs", "failed", "--logprobs-mode processed_logprobs"),
    ("stable_template", False, "template", "warning", "trained on as its own row"),
    ("parses_tools", False, "tools", "warning", "--tool-call-parser NAME"),
    ("guarded", False, "operator", "warning", "can replace its weights"),
    ("refuses", {"/weight_info": 404}, "publishing", "failed", "VLLM_SERVER_DEV_MODE=1"),
    ("refuses", {"/weight_info": 401}, "publishing", "failed", "operator.key"),
    ("refuses", {"/v1/chat/completions/render": 404}, "sampling", "warning", "--enable-scale-out"),
    ("refuses", {"/v1/models": 404}, "upstream policy", "failed", "404"),
    ("status", 500, "alias", "failed", "500"),
]


def test_doctor_names_a_fault_of_the_policys_server_and_says_what_to_do(proxy: Proxy) -> None:
    assert proxy.vllm is not None
    for attribute, value, check, outcome, told in FAULTS:
        with patch.object(proxy.vllm, "guarded", True), patch.object(proxy.vllm, attribute, value):
            code, found = checks(proxy)
        assert found[check]["outcome"] == outcome and found[check]["fix"], found[check]
        assert told in found[check]["found"] + found[check]["fix"]
        assert code == (1 if "failed" in {one["outcome"] for one in found.values()} else 0)


def test_doctor_names_a_server_that_cannot_load_adapters(tmp_path: Path) -> None:
    with in_this_process(tmp_path, policy={"publish": "lora"}) as proxy:
        assert proxy.vllm is not None
        proxy.vllm.sees_files = False
        shared = checks(proxy)[1]["shared directory"]
        assert shared["outcome"] == "failed" and f"cannot read {tmp_path}/policy" in shared["found"]
        proxy.vllm.refuses = {"/v1/load_lora_adapter": 404}
        publishing = checks(proxy)[1]["publishing"]
        assert publishing["outcome"] == "failed" and "--enable-lora" in publishing["fix"]


def test_doctor_notices_that_rewards_do_not_arrive_or_do_not_count(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        ask(proxy, "r1", task="t")
        assert checks(proxy)[1]["rewards"]["outcome"] == "warning"
        proxy.post("/rollouts/r1/end", {"status": "completed"})
        assert checks(proxy)[1]["rewards"]["outcome"] == "failed"
        proxy.post("/reward", {"rollout_id": "r1", "reward": 1, "name": "score"})
        told = checks(proxy)[1]["rewards"]
        assert "give these names weights in trainer.reward_weights" in told["found"] + (told["fix"] or "")
        proxy.post("/reward", {"rollout_id": "r1", "reward": 1})
        assert checks(proxy)[1]["rewards"]["outcome"] == "ok"


def test_doctor_names_what_is_down_and_makes_no_store(tmp_path: Path) -> None:
    upstream = "upstreams: [{name: policy, base_url: 'http://127.0.0.1:9/v1'}]"
    expected: dict[str, dict[str, str]] = {
        "": {"proxy": "lightning-proxy serve", "upstream policy": "vllm.port is 8100"},
        "vllm: {port: 9}\n": {"upstream policy": "start it with `lightning-proxy"},
        "store: {url: 'sqlite:///config.yaml/s.db'}\n": {"store": ""},
        "proxi: {}\n": {"configuration": ""},
    }
    for sections, failed in expected.items():
        (tmp_path / "config.yaml").write_text(f"proxy: {{port: 9}}\n{upstream}\n{sections}")
        done = lightning("doctor", "--json", cwd=tmp_path)
        found = {check["name"]: check for check in done.json if check["outcome"] == "failed"}
        assert done.returncode == 1 and found.keys() >= failed.keys()
        assert all(fix in found[name]["fix"] for name, fix in failed.items()), found
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


# Of Qwen3-4B.
SIZES = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


def test_plan_says_what_fits_on_cards_that_one_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    found = ok(lightning("plan", "--model", ".", "--gpus", "1x24", "--json", cwd=tmp_path)).json
    assert sum(found["vllm_gib"].values()) + sum(found["trainer_gib"].values()) < 24
    assert found["settings"]["vllm.max_model_len"] == found["settings"]["trainer.max_sample_tokens"] > 4000
    shown = ok(lightning("plan", "--model", ".", "--gpus", "1x24", cwd=tmp_path)).stdout
    assert "KV cache" in shown and "vllm.gpu_memory_utilization" in shown
    assert "does not fit" in refused(tmp_path, "plan", "--model", ".", "--gpus", "1x12")
    assert "--gpus" in refused(tmp_path, "plan", "--model", ".", "--gpus", "x")


def test_init_writes_what_was_asked_for_and_never_over_a_file(tmp_path: Path) -> None:
    made = ok(lightning("init", "--model", "org/name: x", cwd=tmp_path))
    assert made.stderr == "wrote config.yaml; next: lightning-proxy up\n"
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (written["policy"]["model"], written["proxy"]["port"]) == ("org/name: x", 8080)
    said = refused(tmp_path, "init", code=1)
    assert said == "lightning-proxy: config.yaml already exists; --force overwrites it"
    upstream = ("--upstream", "https://api.openai.com/v1", "--kind", "openai")
    done = ok(lightning("init", "mine.yaml", *upstream, cwd=tmp_path))
    assert done.stderr == "wrote mine.yaml; next: lightning-proxy --config mine.yaml serve\n"
    mine = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert mine["upstreams"] == [{"name": "policy", "kind": "openai", "base_url": "https://api.openai.com/v1"}]
    assert "policy" not in mine, "it needs no model"
    assert ok(lightning("--config", "mine.yaml", "keys", "list", cwd=tmp_path))


def test_a_port_that_is_taken_is_one_line_that_names_who_has_it(proxy: Proxy, tmp_path: Path) -> None:
    port = proxy.url.rpartition(":")[2]
    (tmp_path / "config.yaml").write_text("")
    line = refused(tmp_path, "serve", "--port", port, code=1)
    assert f"127.0.0.1:{port} cannot be bound" in line and "proxy.port" in line


@pytest.mark.parametrize("options", [[], ["--log-format", "json"]], ids=["text", "json"])
def test_the_lines_of_serve_are_for_people_or_json_for_programs(options: list[str], tmp_path: Path) -> None:
    upstream = {"name": "policy", "kind": "openai", "base_url": "http://127.0.0.1:9/v1"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"proxy": {"port": 0}, "upstreams": [upstream]}))
    serve = Process(tmp_path, "serve", *options)
    serve.start()
    listens = re.compile(r"http://127\.0\.0\.1:\d+")
    try:
        wait_until(lambda: listens.search(serve.log.read_text()), 60, "it says where it listens")
        (url, *_) = listens.findall(serve.log.read_text())
        body = {"model": "m", "messages": []}
        answer = httpx.post(f"{url}/rollouts/r1/v1/chat/completions", json=body, trust_env=False)
        assert answer.status_code == 502
    finally:
        assert serve.end(signal.SIGINT) == 0
    lines = serve.log.read_text().splitlines()
    if not options:
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines), lines
        assert sum("rollout r1" in line and "HTTP 502" in line for line in lines) == 1, lines
        return
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "message"} <= one.keys() for one in found)
    assert any(one.get("event") == "serving" for one in found)
    (call,) = [one for one in found if one.get("event") == "call"]
    assert (call["rollout_id"], call["status"]) == ("r1", "error")
