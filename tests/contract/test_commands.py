"""CONTRACT.md, section 5: commands that look at the system and steer it; the configuration's keys and defaults."""

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

from contract.raw import Upstream
from contract.system import Json, Process, Proxy, configuration, in_this_process, lightning, ok, played, wait_until
from contract.vllm import PlayedVllm
from support.paths import ROOT, has, is_there

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
URL = "base_url: 'http://h/v1'"
PROMISED: Json = {
    "proxy": {"host": "127.0.0.1", "port": 8080, "workers": 1, "api_keys": [], "admin_keys": []},
    "policy": {"model": None, "alias": "policy", "publish": "auto", "pin_rollouts": True},
    "trainer": {"credit": "uniform", "learning_rate": "auto", "weights": "lora"}, "run": {"executor": "local"},
    "store": {"url": "sqlite:///lightning.db"}, "rewards": {"range": [-10_000, 10_000]},
}  # fmt: skip


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
    others = ("init", "demo", "doctor", "experiment", "environments", "store migrate")
    assert {*filter(is_there, (*READS_CONFIGURATION, *others))} <= {" ".join(command) for command in found}
    assert lightning("keys", "create", "-h", cwd=tmp_path).stdout == found["keys", "create"]
    for command, text in found.items():
        assert max(map(len, text.splitlines())) <= 80, command
        assert not re.search(r"[│╭]|range>", text) and "..." not in text.partition("Options:")[2], command
    titles = [line for line in found[()].splitlines() if re.fullmatch(r"\S.*:", line)]
    assert len(titles) == 5 and "Commands:" not in titles, "every command is in a group"
    package = subprocess.run([sys.executable, "-m", "lightning_proxy", "--version"], capture_output=True, text=True)
    assert (package.returncode, package.stdout) == (0, lightning("--version", cwd=tmp_path).stdout), package.stderr


def write(directory: Path, text: str) -> None:
    (directory / "config.yaml").write_text(text)


def refused(directory: Path, *arguments: str, code: int = 2) -> str:
    """The last line of what a command says that changes nothing; the only one, but for the usage of an option."""
    done = lightning(*(arguments or ("keys", "list")), cwd=directory)
    assert (done.returncode, done.stdout) == (code, ""), (arguments, done)
    *before, last = done.stderr.splitlines()
    assert not before or before[0].startswith("Usage: "), done.stderr
    return last


def test_a_wrong_key_file_or_option_is_one_line_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    write(tmp_path, "proxy: {prot: 1}")
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


def test_a_wrong_value_is_one_line_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a"}\n')
    write(tmp_path, "proxy: {port: 9}")
    wrong = {  # what is wrong, and what names it
        "nonsense": "'nonsense'", "rollouts show": "'ID'", "rollouts list --status gone": "--status",
        "rollouts list --since then": "--since", "rollouts list --limit 0": "--limit", "reward r nan": "nan",
        "reward r good": "'VALUE'", "policy promote x": "'x'", "policy export 1 out --as gguf": "--as",
        "keys create a --concurrent 18446744073709551616": "--concurrent", "export out.csv": "out.csv",
        "import none.jsonl": "none.jsonl", "run -- true": "--tasks", "run --tasks none.jsonl -- true": "none.jsonl",
        "run --tasks tasks.jsonl --logs tasks.jsonl -- true": "--logs: cannot create the directory tasks.jsonl",
        "run --tasks tasks.jsonl -- ./nowhere": "./nowhere", "plan": "policy.model", "train --method x": "of rl",
        "run --tasks tasks.jsonl --resume tasks.jsonl -- true": "tasks.jsonl is not a file that",
        "run --tasks tasks.jsonl --mode eval --ahead 1 -- true": "--ahead cannot be used with --mode eval",
        "eval --tasks tasks.jsonl --models live,live -- true": "each once", "doctor --tasks tasks.jsonl": "--learn",
        "demo --dir tasks.jsonl": "--dir: cannot create the directory tasks.jsonl", "experiment none.yaml": "none.yaml",
        "train --data x": "--data and --dir need --offline", "serve --upstream ftp://h": "upstreams.0: base_url",
        "store migrate sqlite:///a.db sqlite:///b.db": "give one ", "train --epochs 2": "--epochs needs --offline",
        "run --tasks tasks.jsonl --mode x -- true": "--mode", "init new --upstream ftp://h": "upstreams.0: base_url",
    }  # fmt: skip
    for arguments in filter(is_there, wrong):
        assert wrong[arguments] in refused(tmp_path, *arguments.split()), arguments
    assert {file.name for file in tmp_path.iterdir()} == {"config.yaml", "tasks.jsonl"}


def test_without_a_proxy_or_with_another_server_on_its_port_one_line_says_so(tmp_path: Path) -> None:
    write(tmp_path, "proxy: {port: 9}")
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a"}\n')
    start = "start it with `lightning-proxy serve`, or wait for `up`"
    for command in (
        "status", "reward", "run", "eval", "rollouts end", "rollouts delete", "rollouts tail", "policy promote",
        "policy rollback",
    ):  # fmt: skip
        given = [*command.split(), *READS_CONFIGURATION[command].split()]
        assert refused(tmp_path, *given, code=1).endswith(f"no proxy answers at http://127.0.0.1:9; {start}"), command
    stranger = Upstream()
    with played(stranger) as url:
        write(tmp_path, f"proxy: {{port: {url.rpartition(':')[2]}}}")
        for text, command in ((b"<html>", "policy list"), (b'{"hello": "world"}', "status")):
            stranger.pieces = [text]
            said = refused(tmp_path, *command.split(), code=1)
            assert f"the server at {url} is not lightning-proxy" in said


def test_json_is_the_same_data_as_the_apis(proxy: Proxy) -> None:
    for name, text in (("same-1", "add one"), ("same-2", "add two")):
        assert proxy.chat(f"{name}/tasks/same", {"role": "user", "content": text}).status == 200
    proxy.reward("same-1", 0.5)
    for options, query in {
        "--task same": "task_id=same", "--task same --min-reward 0.5": "task_id=same&min_reward=0.5",
        "--max-reward 0.4 --since 1h": "max_reward=0.4", "--grep ONE": "text=one", "--grep unsaid": "text=unsaid",
        "--task same --status running": "task_id=same&status=running", "--task same --limit 1": "task_id=same&limit=1",
    }.items():  # fmt: skip
        listed = ok(proxy.run("rollouts", "list", "--json", *options.split())).json
        assert listed == proxy.get(f"/rollouts?{query}"), options
    assert ok(proxy.run("rollouts", "show", "same-1", "--json")).json == proxy.rollout("same-1")
    (base,) = proxy.get("/policy/versions")["data"]
    assert base.items() <= ok(proxy.run("policy", "list", "--json")).json["data"][0].items()
    status = ok(proxy.run("status", "--json")).json
    assert status["ready"] == proxy.get("/readyz") and status["policy"] == proxy.get("/policy")
    diff = ok(proxy.run("rollouts", "diff", "same-1", "same-2")).stdout.splitlines()
    told = {"-rollout same-1", "+rollout same-2", "-reward 0.5", "+reward -", "- user add one", "+ user add two"}
    assert told <= {" ".join(line.split()) for line in diff}
    posted = ok(proxy.run("reward", "same-2", "-0.5", "--no-final", "--comment", "slow", "--json")).json
    assert posted == {"reward_id": posted["reward_id"], "rollout_id": "same-2", "status": "recorded"}
    found = proxy.rollout("same-2")
    assert (found["reward"], found["status"], found["rewards"][0]["comment"]) == (-0.5, "running", "slow")
    for command in filter(is_there, ("keys list", "store info", "doctor", "costs")):
        assert ok(proxy.run(*command.split(), "--json")).json, command


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
        ("rollouts show alike-", "several ids begin with it: alike-5, alike-4, alike-3, alike-2, …"),
        ("rollouts show ..", "no rollout '..'"),
        ("rollouts end alike", "no rollout 'alike'"),  # another's name is not completed to change it
        (f"reward {first} 0.5 --call zzz", "zzz"),
        ("reward nobody 1", "nobody"),
    ):
        done = proxy.run(*arguments.split())
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and said in done.stderr, done
    done = proxy.run("rollouts", "delete", "nobody", "a/b", first[:12])
    assert (done.returncode, done.stdout) == (1, "deleted 1 rollout\n")
    assert "no rollout 'nobody'" in done.stderr and "got 'a/b'" in done.stderr
    assert proxy.call("GET", f"/rollouts/{first}").status == 404


def test_tail_tells_of_rollouts_as_they_change(proxy: Proxy) -> None:
    proxy.chat("before")
    tail = Process(proxy.directory, "rollouts", "tail", "--json")
    tail.start()

    def told() -> list[tuple[str, Any]]:
        return [(one["rollout_id"], one["reward"]) for one in map(json.loads, tail.log.read_text().splitlines())]

    try:
        wait_until(lambda: ("before", None) in told(), 60, "what is there is told")
        proxy.chat("meanwhile")
        proxy.reward("meanwhile", 0.75)
        wait_until(lambda: ("meanwhile", 0.75) in told(), 60, "what changes is told")
    finally:
        assert tail.end(signal.SIGINT) in (0, 130)


def test_a_key_is_printed_once_and_closes_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_this_process(tmp_path) as proxy:

        def answers(status: int, key: str | None = None) -> None:
            wait_until(lambda: proxy.chat("r1", key=key).status == status, 30, f"it answers {status}")

        answers(200)
        made = ok(proxy.run("keys", "create", "ci", "--requests-per-minute", "500"))
        key = made.stdout.strip()
        assert (key.startswith("lpk-agent-"), len(key), "not shown again" in made.stderr) == (True, 53, True)
        (listed,) = ok(proxy.run("keys", "list", "--json")).json["data"]
        assert (listed["name"], listed["role"], listed["requests_per_minute"]) == ("ci", "agent", 500)
        answers(401)
        answers(200, key)
        assert "API key" in refused(tmp_path, "rollouts", "end", "r1", code=1)
        monkeypatch.setenv("LIGHTNING_API_KEY", f"{key}\n")  # as a file would hold it
        ok(proxy.run("rollouts", "end", "r1"))
        assert "'ci'" in refused(tmp_path, "keys", "create", "ci", code=1)
        assert "no key is left" in ok(proxy.run("keys", "revoke", "ci")).stdout
        answers(401, key)
        assert proxy.chat("r1").status == 401, "revoking the last key opens nothing"
        ok(proxy.run("keys", "purge"))
        answers(200)  # as if no key was ever made
        assert proxy.run("keys", "revoke", "ci").returncode == 1
    assert key.encode() not in b"".join(file.read_bytes() for file in tmp_path.glob("store.db*"))


def checks(proxy: Proxy) -> tuple[int, dict[str, Json]]:
    done = proxy.run("doctor", "--json")
    return done.returncode, {check["name"]: check for check in done.json}


@pytest.mark.parametrize("publish", ["merged", "lora"])
def test_doctor_passes_a_whole_system_and_leaves_nothing_behind(publish: str, tmp_path: Path) -> None:
    with in_this_process(tmp_path, policy={"publish": publish}) as proxy:
        proxy.vllm.guarded = True
        code, found = checks(proxy)
        assert {name: check["outcome"] for name, check in found.items()} == dict.fromkeys(found, "ok") and code == 0
        promised = "configuration store proxy tokens logprobs template publishing operator alias rewards trainer"
        assert found.keys() >= {*promised.split(), "upstream policy", "next step"}
        assert (proxy.get("/rollouts")["data"], proxy.vllm.adapters) == ([], {})
        if publish == "lora":
            proxy.vllm.sees_files = False
            shared = checks(proxy)[1]["shared directory"]
            assert shared["outcome"] == "failed" and f"cannot read {tmp_path}/policy" in shared["found"]
            proxy.vllm.refuses = {"/v1/load_lora_adapter": 404}
            publishing = checks(proxy)[1]["publishing"]
            assert publishing["outcome"] == "failed" and "--enable-lora" in publishing["fix"]


def test_doctor_names_a_fault_of_the_policys_server_and_says_what_to_do(proxy: Proxy) -> None:
    faults: list[tuple[str, Any, str, str, str]] = [
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
    for attribute, value, check, outcome, told in faults:
        with patch.object(proxy.vllm, "guarded", True), patch.object(proxy.vllm, attribute, value):
            code, found = checks(proxy)
        assert found[check]["outcome"] == outcome and found[check]["fix"], found[check]
        assert told in found[check]["found"] + found[check]["fix"]
        assert code == (1 if "failed" in {one["outcome"] for one in found.values()} else 0)


def test_doctor_notices_that_rewards_do_not_arrive_or_do_not_count(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        proxy.chat("r1/tasks/t")
        assert checks(proxy)[1]["rewards"]["outcome"] == "warning"
        proxy.post("/rollouts/r1/end", {"status": "completed"})
        assert checks(proxy)[1]["rewards"]["outcome"] == "failed"
        proxy.post("/reward", {"rollout_id": "r1", "reward": 1, "name": "score"})
        told = checks(proxy)[1]["rewards"]
        assert "give these names weights in trainer.reward_weights" in told["found"] + (told["fix"] or "")
        status = proxy.get("/status")
        assert (status["waiting"], status["unrewarded"], status["other_rewards"]) == (0, 1, {"score": 1})
        told = " ".join(proxy.run("status").stdout.split())
        assert "trainer.reward_weights has no weight for the rewards that came: score (1)" in told
        proxy.reward("r1", 1)
        assert checks(proxy)[1]["rewards"]["outcome"] == "ok"


def test_doctor_names_what_is_down_and_makes_no_store(tmp_path: Path) -> None:
    upstream = "upstreams: [{name: policy, base_url: 'http://127.0.0.1:9/v1'}]"
    expected: dict[str, dict[str, str]] = {
        "": {"proxy": "lightning-proxy serve", "upstream policy": "vllm.port is 8100"},
        "vllm: {port: 9}\n": {"upstream policy": "start vLLM with `lightning-proxy"},
        "store: {url: 'sqlite:///config.yaml/s.db'}\n": {"store": ""},
        "proxi: {}\n": {"configuration": ""},
    }
    for sections, failed in expected.items():
        write(tmp_path, f"proxy: {{port: 9}}\n{upstream}\n{sections}")
        done = lightning("doctor", "--json", cwd=tmp_path)
        found = {check["name"]: check for check in done.json if check["outcome"] == "failed"}
        assert done.returncode == 1 and found.keys() >= failed.keys()
        assert all(fix in found[name]["fix"] for name, fix in failed.items()), found
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_plan_says_what_fits_on_cards_that_one_does_not_have(tmp_path: Path) -> None:
    sizes = {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "max_position_embeddings": 40_960, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))  # of Qwen3-4B
    found = ok(lightning("plan", "--model", ".", "--gpus", "1x24", "--json", cwd=tmp_path)).json
    assert sum(found["vllm_gib"].values()) + sum(found["trainer_gib"].values()) < 24
    assert found["settings"]["vllm.max_model_len"] == found["settings"]["trainer.max_sample_tokens"] > 4000
    shown = ok(lightning("plan", "--model", ".", "--gpus", "1x24", cwd=tmp_path)).stdout
    assert "KV cache" in shown and "vllm.gpu_memory_utilization" in shown
    assert "does not fit" in refused(tmp_path, "plan", "--model", ".", "--gpus", "1x12")
    assert "--gpus" in refused(tmp_path, "plan", "--model", ".", "--gpus", "x")


def test_init_writes_what_was_asked_for_and_never_over_a_file(tmp_path: Path) -> None:
    assert (
        ok(lightning("init", "--model", "org/name: x", cwd=tmp_path)).stderr
        == "wrote config.yaml; next: lightning-proxy up\n"
    )
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (written["policy"]["model"], written["proxy"]["port"]) == ("org/name: x", 8080)
    assert "config.yaml already exists; --force overwrites it" in refused(tmp_path, "init", code=1)
    done = ok(lightning("init", "mine.yaml", "--upstream", "https://h/v1", "--kind", "openai", cwd=tmp_path))
    assert done.stderr == "wrote mine.yaml; next: lightning-proxy --config mine.yaml serve\n"
    mine = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert mine["upstreams"] == [{"name": "policy", "kind": "openai", "base_url": "https://h/v1"}]
    assert "policy" not in mine, "it needs no model"
    assert ok(lightning("--config", "mine.yaml", "keys", "list", cwd=tmp_path))


@pytest.mark.parametrize("options", [[], ["--log-format", "json"]], ids=["text", "json"])
def test_the_lines_of_serve_are_for_people_or_json_for_programs(options: list[str], tmp_path: Path) -> None:
    write(tmp_path, "proxy: {port: 0}\nupstreams: [{name: policy, kind: openai, base_url: 'http://127.0.0.1:9/v1'}]")
    serve = Process(tmp_path, "serve", *options)
    serve.start()
    listens = re.compile(r"http://127\.0\.0\.1:\d+")
    try:
        wait_until(lambda: listens.search(serve.log.read_text()), 60, "it says where it listens")
        (url, *_) = listens.findall(serve.log.read_text())
        body = {"model": "m", "messages": []}
        answer = httpx.post(f"{url}/rollouts/r1/v1/chat/completions", json=body, trust_env=False)
        assert answer.status_code == 502
        taken = refused(tmp_path, "serve", "--port", url.rpartition(":")[2], code=1)
        assert f"{url.removeprefix('http://')} cannot be bound" in taken and "proxy.port" in taken
    finally:
        assert serve.end(signal.SIGINT) == 0
    lines = serve.log.read_text().splitlines()
    if not options:
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines), lines
        assert sum("rollout r1" in line and "HTTP 502" in line for line in lines) == 1, lines
        return
    found = {one.get("event"): one for one in map(json.loads, lines)}
    assert all({"time", "level", "message"} <= one.keys() for one in found.values()) and "serving" in found
    assert (found["call"]["rollout_id"], found["call"]["status"]) == ("r1", "error")


def keys(data: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each key that is no section, with its value."""
    if not isinstance(data, dict) or (place and not data):
        yield place, data
        return
    for name, value in data.items():
        yield from keys(value, (*place, name))


def test_keys_that_programs_count_on_have_these_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = configuration(tmp_path)
    assert found | {name: found[name] | section for name, section in PROMISED.items()} == found
    upstream = {"name": "policy", "kind": "vllm", "base_url": "http://127.0.0.1:8100/v1", "servers": []}
    assert [one | upstream for one in found["upstreams"]] == found["upstreams"] and found["plugins"] == []
    for name in ("CLOUD_SPACE_ID", "USER_ID", "TASK", "TASK_FILE", "ROLLOUT_ID", "URL", "API_KEY"):
        monkeypatch.setenv(f"LIGHTNING_{name}", "{no yaml")  # of other programs, and of `run`
    for text in ((ROOT / "config.yaml").read_text(), "", "proxy:\n", "proxy: {}\ntrainer: {group_size: 8}\n"):
        write(tmp_path, text)
        assert configuration(tmp_path) == found, "a file with some keys is complete"


def test_an_option_wins_over_a_variable_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = configuration(tmp_path)
    found = dict(keys(defaults))
    wrong: Json = {}
    for place in found:
        section = wrong
        for name in place[:-1]:
            section = section.setdefault(name, {})
        section[place[-1]] = {"no": {"such": ["value"]}}
    write(tmp_path, yaml.safe_dump(wrong))
    done = lightning("keys", "list", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(found) > 80 and done.stderr.count("\n") > 80, "a line for each"
    for place, value in found.items():
        monkeypatch.setenv("LIGHTNING_" + "__".join(place).upper(), json.dumps(value))
    assert configuration(tmp_path) == defaults
    monkeypatch.delenv("LIGHTNING_POLICY__MODEL")
    write(tmp_path, "policy: {model: ./in-file}\n")
    assert refused(tmp_path, "vllm").endswith("there is no directory ./in-file")
    monkeypatch.setenv("LIGHTNING_POLICY_MODEL", "./in-variable")  # one underscore or two
    assert refused(tmp_path, "vllm").endswith("there is no directory ./in-variable")
    assert refused(tmp_path, "vllm", "--model", "./in-option").endswith("there is no directory ./in-option")


def test_a_wrong_key_or_value_is_one_line_that_names_it_and_shows_no_key(tmp_path: Path) -> None:
    wrong = [
        ("proxy: {prot: 1}", "proxy.prot: unknown key; did you mean port?"),
        ("group_size: 4", "group_size: unknown key; did you mean trainer.group_size?"),
        ("proxy: {port: 70000}", "proxy.port: "),
        ("proxy: {limits: {concurrent: 0}}", "proxy.limits.concurrent: "),
        ("proxy: {max_body_mb: .inf}", "proxy.max_body_mb: "),
        ("proxy: {api_keys: ['']}", "proxy.api_keys: a key cannot be sent: it must be ASCII"),
        ("store: {url: 'mysql://h'}", "store: url must be sqlite:///FILE or postgresql://USER@HOST/DATABASE"),
        ("upstreams: []", "upstreams: "),
        ("upstreams: [{name: a, base_url: 'http://h'}]", "upstreams.0: base_url of a vLLM server must have a path"),
        (f"upstreams: [{{name: a, {URL}, api_key: ''}}]", "upstreams.0: api_key cannot be sent"),
        (f"upstreams: [{{name: a, {URL}, litellm_params: {{x: 1}}}}]", "litellm_params is for kind litellm"),
        (f"upstreams: [{{name: a, {URL}, fallback: []}}]", "upstreams.0.fallback: unknown key; did you mean fallbacks"),
        (f"upstreams: [{{name: a, {URL}, replicas: ['http://h/v1/']}}]", "replicas must differ"),
        (f"upstreams: [{{name: a, {URL}}}, {{name: a, {URL}}}]", "a name of its own"),
        (f"upstreams: [{{name: a, {URL}, fallbacks: [b]}}]", "'b', which is not the name of an upstream"),
        (f"upstreams: [{{name: a, {URL}, fallbacks: [a]}}]", "form a cycle: a -> a"),
        ("upstreams: [{name: a, kind: litellm}]", "serves only the names in models and model_map"),
        ("trainer: {learning_rate: 0}", "trainer.learning_rate: must be auto or a number greater than 0; got"),
        ("trainer: {agent_credit: own}", "agent_credit own needs agents"),
        ("[1, 2]", "expected keys and values"),
        ("proxy: [", "not valid YAML"),
        ("policy: {model: 2026-13-01}", "not valid YAML: a value that looks like a date"),
        ("proxy: " + "[" * 600, "not valid YAML: it is nested too deeply"),
        ("proxy: {port: 1}\nstore: {}\nproxy: {workers: 2}", "'proxy' occurs twice, line 3, column 1"),
    ]
    wrong += [("trainer: {eval: {every_steps: 5}}", "trainer.eval: renamed to evaluation")] if has("evaluation") else []
    wrong += [("promotion: {shares: 9}", "promotion.shares: unknown key; did you mean")] if has("promotion") else []
    for text, named in wrong:
        write(tmp_path, text)
        told = refused(tmp_path)
        assert told.startswith("lightning-proxy: ") and "config.yaml" in told and named in told, told
    key = "sk-upstream-5c1dD0nTl3akM3pl34s3"
    own = (f"api_key: '{key} x'}}]", f"api_key: '{key}", f"api_key: [{key}]}}]")
    for text in (
        *(f"upstreams: [{{name: a, {URL}, {one}" for one in own),
        f"proxy: {{api_keys: {key}}}",
        f"proxy: {key}",
        f"proxy: {{api_keys: [*{key}]}}",
        f"proxy: {{api_keys: [!{key} a]}}",
    ):
        write(tmp_path, text)
        assert key not in refused(tmp_path), text


def test_a_wrong_variable_is_one_line_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, named in (
        ("PROXY__LIMITS__CONCURENT", "3", "LIGHTNING_PROXY__LIMITS__CONCURENT: proxy.limits.concurent: unknown"),
        ("PROXY_PORT", "70000", "LIGHTNING_PROXY_PORT: proxy.port: "),
        ("PROXY_API_KEYS", "[a", "LIGHTNING_PROXY_API_KEYS is not valid YAML"),
        ("PORT", "1", "LIGHTNING_PORT: no such key; did you mean LIGHTNING_PROXY__PORT or LIGHTNING_VLLM__PORT"),
        ("PROXI_PORT", "1", "LIGHTNING_PROXI_PORT: no such key; did you mean LIGHTNING_PROXY__PORT"),
        ("UPSTREAM", "[]", "LIGHTNING_UPSTREAM: no such key; did you mean LIGHTNING_UPSTREAMS"),
    ):
        with monkeypatch.context() as only:
            only.setenv(f"LIGHTNING_{name}", value)
            assert refused(tmp_path).startswith(f"lightning-proxy: {named}")


def test_serve_needs_neither_a_model_nor_a_trainer_and_says_where_it_listens(tmp_path: Path) -> None:
    write(tmp_path, "proxy: {host: 0.0.0.0, port: 0}")
    told = refused(tmp_path, "serve")  # to other machines, without keys
    assert "lightning-proxy keys create" in told and "proxy.api_keys" in told
    write(tmp_path, "proxy: {workers: 2}\nstore: {url: 'sqlite:///records.db'}")
    with played(PlayedVllm(tmp_path)) as upstream:
        serve = Process(tmp_path, "serve", "--port", "0", "--upstream", f"{upstream}/v1")
        serve.start()
        said = re.compile(r"serving: OPENAI_BASE_URL=http://127\.0\.0\.1:\d+/v1; records in records\.db")
        wait_until(lambda: said.search(serve.log.read_text()), 60, "it says where it listens")
        assert serve.end(signal.SIGINT) == 0
