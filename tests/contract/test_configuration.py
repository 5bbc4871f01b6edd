"""CONTRACT.md, section 5: the configuration's keys, their defaults, and where else they can be set."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from contract.system import Json, Process, configuration, lightning, played, wait_until
from contract.vllm import PlayedVllm
from support.paths import ROOT, has

PROMISED: Json = {
    "proxy": {"host": "127.0.0.1", "port": 8080, "workers": 1, "api_keys": [], "admin_keys": []},
    "store": {"url": "sqlite:///lightning.db"},
    "upstreams": [{"name": "policy", "kind": "vllm", "base_url": "http://127.0.0.1:8100/v1", "servers": []}],
    "policy": {"model": None, "alias": "policy", "publish": "auto", "pin_rollouts": True},
    "trainer": {"credit": "uniform", "learning_rate": "auto", "weights": "lora"},
    "run": {"executor": "local"},
    "rewards": {"range": [-10_000, 10_000]},
    "plugins": [],
}


def keys(data: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each key that is no section, with its value."""
    if not isinstance(data, dict) or (place and not data):
        yield place, data
        return
    for name, value in data.items():
        yield from keys(value, (*place, name))


def part(found: Any, wanted: Any) -> Any:
    """What is there of the keys that are wanted."""
    if isinstance(wanted, dict):
        return {name: part(found[name], value) for name, value in wanted.items()}
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], dict):
        return [part(one, wanted[0]) for one in found]
    return found


def write(directory: Path, text: str) -> None:
    (directory / "config.yaml").write_text(text)


def refusal(directory: Path, *command: str) -> str:
    """What a command says that does not take its configuration: exit code 2."""
    done = lightning(*(command or ("keys", "list")), cwd=directory)
    assert (done.returncode, done.stdout) == (2, ""), done
    return done.stderr


def test_keys_that_programs_count_on_have_these_defaults(tmp_path: Path) -> None:
    assert part(configuration(tmp_path), PROMISED) == PROMISED


def test_the_commented_file_shows_usual_keys_with_their_defaults(tmp_path: Path) -> None:
    defaults = configuration(tmp_path)
    shutil.copy(ROOT / "config.yaml", tmp_path)
    assert configuration(tmp_path) == defaults


def test_a_file_with_some_keys_is_complete(tmp_path: Path) -> None:
    defaults = configuration(tmp_path)
    for text in ("", "proxy:\n", "proxy: {}\ntrainer: {group_size: 8}\n"):
        write(tmp_path, text)
        assert configuration(tmp_path) == defaults


def test_a_variable_overrides_each_key_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = configuration(tmp_path)
    found = dict(keys(defaults))
    wrong: Json = {}
    for place in found:
        section = wrong
        for name in place[:-1]:
            section = section.setdefault(name, {})
        section[place[-1]] = {"no": {"such": ["value"]}}
    write(tmp_path, yaml.safe_dump(wrong))
    told = refusal(tmp_path)
    assert len(found) > 80 and told.count("\n") > 80, "a line for each"
    for place, value in found.items():
        monkeypatch.setenv("LIGHTNING_" + "__".join(place).upper(), json.dumps(value))
    assert configuration(tmp_path) == defaults


def test_an_option_wins_over_a_variable_and_this_one_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "policy: {model: ./in-file}\n")
    assert "there is no directory ./in-file\n" in refusal(tmp_path, "vllm")
    monkeypatch.setenv("LIGHTNING_POLICY_MODEL", "./in-variable")  # one underscore or two
    assert "there is no directory ./in-variable\n" in refusal(tmp_path, "vllm")
    assert "there is no directory ./in-option\n" in refusal(tmp_path, "vllm", "--model", "./in-option")


def test_variables_of_other_programs_and_of_run_are_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = configuration(tmp_path)
    for name in ("CLOUD_SPACE_ID", "USER_ID", "NOTE", "TASK", "TASK_FILE", "ROLLOUT_ID", "URL", "API_KEY"):
        monkeypatch.setenv(f"LIGHTNING_{name}", "{no yaml")
    assert configuration(tmp_path) == defaults


URL = "base_url: 'http://h/v1'"


WRONG = [
    ("proxy: {prot: 1}", "proxy.prot: unknown key; did you mean port?"),
    ("group_size: 4", "group_size: unknown key; did you mean trainer.group_size?"),
    ("proxy: {port: 70000}", "proxy.port: "),
    ("proxy: {limits: {concurrent: 0}}", "proxy.limits.concurrent: "),
    ("proxy: {max_body_mb: .inf}", "proxy.max_body_mb: "),
    ("proxy: {api_keys: ['']}", "proxy.api_keys: a key cannot be sent: it must be ASCII"),
    ("store: {url: 'mysql://h'}", "sqlite:///FILE or postgresql://USER@HOST/DATABASE is needed"),
    ("upstreams: []", "upstreams: "),
    ("upstreams: [{name: a, base_url: 'ftp://h/v1'}]", "upstreams.0: base_url must be"),
    ("upstreams: [{name: a, base_url: 'http://h'}]", "upstreams.0: base_url of a vLLM must have a path"),
    (f"upstreams: [{{name: a, {URL}, fallback: []}}]", "upstreams.0.fallback: unknown key; did you mean fallbacks"),
    (f"upstreams: [{{name: a, {URL}, api_key: ''}}]", "upstreams.0: api_key cannot be sent"),
    (f"upstreams: [{{name: a, {URL}, replicas: ['http://h/v1/']}}]", "replicas must differ"),
    (f"upstreams: [{{name: a, {URL}}}, {{name: a, {URL}}}]", "a name of its own"),
    (f"upstreams: [{{name: a, {URL}, fallbacks: [b]}}]", "'b', which is not the name of an upstream"),
    (f"upstreams: [{{name: a, {URL}, fallbacks: [a]}}]", "in a circle: a -> a"),
    (f"upstreams: [{{name: a, {URL}, litellm_params: {{x: 1}}}}]", "litellm_params is for kind litellm"),
    ("upstreams: [{name: a, kind: litellm}]", "serves only what models or model_map name"),
    ("trainer: {baseline: best}", "trainer.baseline: "),
    ("trainer: {learning_rate: 0}", "trainer.learning_rate: auto, or a number greater than 0; got"),
    ("trainer: {agent_credit: own}", "agent_credit own needs agents"),
    ("trainer: {loss_type: luspo}", "it needs importance_level"),
    ("[1, 2]", "expected sections"),
    ("proxy: [", "not valid YAML"),
    ("policy: {model: 2026-13-01}", "not valid YAML: what looks like a date"),
    ("proxy: " + "[" * 600, "not valid YAML: it is nested too deeply"),
    ("proxy: {port: 1}\nstore: {}\nproxy: {workers: 2}", "'proxy' occurs twice, line 3, column 1"),
    *([("trainer: {eval: {every_steps: 5}}", "trainer.eval: it is evaluation now")] if has("evaluation") else []),
    *([("promotion: {shares: 0.9}", "promotion.shares: unknown key; did you mean share")] if has("promotion") else []),
    *([("policy: {gate: {share: 0.5}}", "policy.gate: it is promotion now")] if has("promotion") else []),
]


def test_a_wrong_key_or_value_is_one_line_that_names_it(tmp_path: Path) -> None:
    for text, named in WRONG:
        write(tmp_path, text)
        told = refusal(tmp_path)
        assert (told.startswith("lightning-proxy: "), told.count("\n")) == (True, 1), told
        assert "config.yaml" in told and named in told, told


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
            told = refusal(tmp_path)
        assert told.startswith(f"lightning-proxy: {named}") and told.count("\n") == 1, told


def test_a_wrong_configuration_does_not_show_a_key(tmp_path: Path) -> None:
    key = "sk-upstream-5c1dD0nTl3akM3pl34s3"
    for text in (
        f"upstreams: [{{name: a, {URL}, api_key: '{key} x'}}]",
        f"upstreams: [{{name: a, {URL}, api_key: '{key}",
        f"upstreams: [{{name: a, {URL}, api_key: [{key}]}}]",
        f"proxy: {{api_keys: {key}}}",
        f"proxy: {key}",
    ):
        write(tmp_path, text)
        assert key not in refusal(tmp_path), text


def test_without_keys_other_machines_are_not_served(tmp_path: Path) -> None:
    write(tmp_path, "proxy: {host: 0.0.0.0, port: 0}\n")
    told = refusal(tmp_path, "serve")
    assert told.count("\n") == 1 and "lightning-proxy keys create" in told and "proxy.api_keys" in told


@pytest.mark.parametrize("workers", [1, 2])
def test_serve_needs_neither_a_model_nor_a_trainer_and_says_where_it_listens(tmp_path: Path, workers: int) -> None:
    write(tmp_path, f"proxy: {{workers: {workers}}}\nstore: {{url: 'sqlite:///records.db'}}\n")
    with played(PlayedVllm(tmp_path)) as upstream:
        serve = Process(tmp_path, "serve", "--port", "0", "--upstream", f"{upstream}/v1")
        serve.start()
        said = re.compile(r"serving: OPENAI_BASE_URL=http://127\.0\.0\.1:\d+/v1; records in records\.db")
        wait_until(lambda: said.search(serve.log.read_text()), 60, "it says where it listens")
        assert serve.end(signal.SIGINT) == 0
