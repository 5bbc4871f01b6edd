"""The configuration file, its defaults and its one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from lightning_proxy.proxy.config.file import load_config
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.errors import ConfigError
from support.paths import ROOT
from support.sections import TrainerConfig

URL = "base_url: 'http://h/v1'"


def keys(data: Any, prefix: str = "") -> set[str]:
    if isinstance(data, list):
        return keys(data[0], prefix) if data and isinstance(data[0], dict) else set()
    if not isinstance(data, dict):
        return set()
    return {f"{prefix}{k}" for k in data} | {found for k, v in data.items() for found in keys(v, f"{prefix}{k}.")}


def test_the_commented_file_shows_usual_keys_with_their_defaults() -> None:
    assert load_config(ROOT / "config.yaml") == Config()
    usual = keys(yaml.safe_load((ROOT / "config.yaml").read_text()))
    assert usual < keys(json.loads(Config().model_dump_json()))


def test_a_file_with_some_keys_keeps_the_other_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("proxy: {port: 9000}\n")
    assert load_config(path).proxy.port == 9000
    assert load_config(path).trainer == Config().trainer


def test_off_needs_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trainer: {collapse: {action: off}}\n")
    assert load_config(path).trainer.collapse.action == "off"


def test_the_environment_wins_over_the_file_and_options_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("proxy: {port: 9000}\ntrainer: {seed: 1}\n")
    monkeypatch.setenv("LIGHTNING_PROXY__PORT", "9001")
    monkeypatch.setenv("LIGHTNING_TRAINER__SEED", "2")
    config = load_config(path, {"proxy.port": 9002, "proxy.host": None})
    assert (config.proxy.port, config.trainer.seed, config.proxy.host) == (9002, 2, "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("proxy: {prot: 1}", "proxy.prot: unknown key"),
        ("proxi: {}", "proxi: unknown key"),
        ("proxy: {port: 70000}", "proxy.port"),
        ("proxy: {port: high}", "proxy.port"),
        ("proxy: {limits: {concurrent: 0}}", "proxy.limits.concurrent"),
        ("proxy: {max_body_mb: .inf}", "proxy.max_body_mb"),
        ("proxy: {api_keys: ['']}", "proxy.api_keys: a key cannot be sent: it must be ASCII"),
        ("proxy: {admin_keys: [good, 'two words']}", "proxy.admin_keys: a key cannot be sent"),
        (f"upstreams: [{{name: a, {URL}, api_key: ''}}]", "upstreams.0: api_key cannot be sent"),
        ("upstreams: []", "upstreams"),
        ("upstreams: [{name: a, base_url: 'http://h'}]", "upstreams.0: base_url of a vLLM must have a path"),
        ("upstreams: [{name: a, base_url: 'ftp://h/v1'}]", "upstreams.0: base_url must be"),
        ("upstreams: [{name: a}]", "upstreams.0: base_url must be"),
        (f"upstreams: [{{name: a, {URL}, replicas: ['http://h']}}]", "replicas of a vLLM must have a path"),
        (f"upstreams: [{{name: a, {URL}, replicas: ['http://h/v1/']}}]", "replicas must differ"),
        (f"upstreams: [{{name: a, {URL}}}, {{name: a, {URL}}}]", "a name of its own"),
        (
            f"upstreams: [{{name: a, {URL}, fallbacks: [b]}}]",
            "a falls back to 'b', which is not the name of an upstream",
        ),
        (f"upstreams: [{{name: a, {URL}, fallbacks: [a]}}]", "in a circle: a -> a"),
        (
            f"upstreams: [{{name: a, {URL}, fallbacks: [b]}}, {{name: b, {URL}, fallbacks: [a]}}]",
            "fallbacks go in a circle",
        ),
        (f"upstreams: [{{name: a, {URL}, litellm_params: {{x: 1}}}}]", "litellm_params is for kind litellm"),
        ("upstreams: [{name: a, kind: litellm}]", "serves only what models or model_map name"),
        ("upstreams: [{name: a, kind: litellm, models: [m], health_check_s: 1}]", "health_check_s needs a base_url"),
        ("store: {url: 'mysql://h'}", "sqlite:///FILE or postgresql://USER@HOST/DATABASE is needed"),
        ("store: {busy_timeout_s: .inf}", "store.busy_timeout_s"),
        ("trainer: {group_size: 1}", "trainer.group_size"),
        ("trainer: {baseline: best}", "trainer.baseline"),
        ("trainer: {running_window: 3}", "trainer.running_window"),
        ("trainer: {agent_credit: own}", "agent_credit own needs agents"),
        ("trainer: {agent_credit: own, agents: ['*']}", "agent_credit own needs agents"),
        ("trainer: {warmup_steps: 5}", "warmup_steps needs lr_scheduler"),
        ("trainer: {collapse: {reward_stop: 2}}", "trainer.collapse: reward_stop is less than reward_warn"),
        ("[1, 2]", "expected sections"),
        ("proxy: [", "not valid YAML"),
        ("policy: {model: 2026-13-01}", "not valid YAML: what looks like a date"),
        ("proxy: " + "[" * 3000, "not valid YAML: it is nested too deeply"),
        ("proxy: {port: 1}\nstore: {}\nproxy: {workers: 2}", "'proxy' occurs twice, line 3, column 1"),
        ("proxy: {port: 1, port: 2}", "'port' occurs twice"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_names_it(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert named in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_variable_may_have_one_underscore_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PROXY_PORT", "9001")
    monkeypatch.setenv("LIGHTNING_TRAINER__LEARNING_RATE", "0.5")
    monkeypatch.setenv("LIGHTNING_TASK", "{not configuration")
    config = load_config()
    assert (config.proxy.port, config.trainer.learning_rate) == (9001, 0.5)


@pytest.mark.parametrize(("text", "rate"), [("auto", "auto"), ("1e-5", 1e-5), ("2", 2.0)])
def test_a_learning_rate_is_a_number_or_auto(monkeypatch: pytest.MonkeyPatch, text: str, rate: Any) -> None:
    assert load_config().trainer.learning_rate == "auto"
    monkeypatch.setenv("LIGHTNING_TRAINER__LEARNING_RATE", text)
    assert load_config().trainer.learning_rate == rate


@pytest.mark.parametrize("text", ["0", "-1e-5", ".inf", ".nan", "high", "null"])
def test_another_learning_rate_is_one_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LIGHTNING_TRAINER__LEARNING_RATE", text)
    with pytest.raises(ConfigError) as error:
        load_config()
    assert "trainer.learning_rate: auto, or a number greater than 0; got" in error.value.message
    assert "\n" not in error.value.message


def test_what_the_file_does_not_say_is_not_put_down_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("proxy: {port: 9000}\n")
    with pytest.raises(ConfigError, match=r"^command line: proxy\.port: Input should be less"):
        load_config(path, {"proxy.port": 70000})
    monkeypatch.setenv("LIGHTNING_PROXY__LIMITS__CONCURENT", "3")
    with pytest.raises(ConfigError, match=r"^LIGHTNING_PROXY__LIMITS__CONCURENT: proxy\.limits\.concurent: unknown"):
        load_config(path)


@pytest.mark.parametrize(("name", "value"), [("LIGHTNING_PROXY_API_KEYS", "[a"), ("LIGHTNING_PROXY_PROT", "1")])
def test_a_wrong_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        load_config()
    assert "\n" not in error.value.message
    assert name.lower().removeprefix("lightning_proxy_") in error.value.message.lower()


def test_all_that_is_wrong_is_told_at_once_with_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "proxy: {prot: 1, max_body_mb: -1, learning_rate: 1}\ngroup_size: 4\n"
        "upstreams: [{name: a, base_url: 'http://h/v1', fallback: []}]\nvllm: {xyzzy: 1}\n"
    )
    monkeypatch.setenv("LIGHTNING_TRAINER__KREDIT", "uniform")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.message.splitlines() == [
        f"{path}: proxy.max_body_mb: Input should be greater than 0",
        f"{path}: proxy.prot: unknown key; did you mean port?",
        f"{path}: proxy.learning_rate: unknown key; did you mean trainer.learning_rate or "
        "trainer.sft.learning_rate or trainer.dpo.learning_rate?",
        f"{path}: upstreams.0.fallback: unknown key; did you mean fallbacks?",
        f"{path}: vllm.xyzzy: unknown key",
        "LIGHTNING_TRAINER__KREDIT: trainer.kredit: unknown key; did you mean credit?",
        f"{path}: group_size: unknown key; did you mean trainer.group_size?",
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LIGHTNING_PORT", "LIGHTNING_PROXY__PORT or LIGHTNING_VLLM__PORT"),
        ("LIGHTNING_MODEL", "LIGHTNING_POLICY__MODEL"),
        ("LIGHTNING_PROXI_PORT", "LIGHTNING_PROXY__PORT"),
        ("LIGHTNING_UPSTREAM", "LIGHTNING_UPSTREAMS"),
    ],
)
def test_a_variable_that_nearly_names_a_key_is_told(monkeypatch: pytest.MonkeyPatch, name: str, meant: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"^{name}: no such key; did you mean {meant}"):
        load_config()


def test_variables_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIGHTNING_CLOUD_SPACE_ID", "LIGHTNING_USER_ID", "LIGHTNING_OPERATOR_KEY_FILE", "LIGHTNING_NOTE"):
        monkeypatch.setenv(name, "1")
    assert load_config() == load_config()


def test_an_empty_section_has_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("proxy:\ntrainer: {group_size: 4}\n")
    config = load_config(tmp_path / "c.yaml")
    assert (config.proxy.port, config.trainer.group_size) == (8080, 4)


def test_a_wrong_configuration_does_not_show_a_key(tmp_path: Path) -> None:
    key = "sk-upstream-5c1dD0nTl3akM3pl34s3"
    for text in (
        f"upstreams: [{{name: a, base_url: 'http://h/v1', api_key: '{key} x'}}]",
        f"upstreams: [{{name: a, base_url: 'http://h/v1', api_key: '{key}",
        f"upstreams: [{{name: a, base_url: 'http://h/v1', api_key: [{key}]}}]",
        f"proxy: {{api_keys: {key}}}",
        f"proxy: {key}",
        f"{key}: [\n",
    ):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "c.yaml")
        shown = caught.value.message + repr(caught.value.__cause__)
        assert key not in shown or text.startswith(key), shown


@pytest.mark.parametrize("settings", [{"loss_type": "luspo"}, {"loss_type": "vespo", "importance_level": "sequence"}])
def test_a_level_that_a_loss_is_not_made_for_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="it needs importance_level"):
        TrainerConfig.model_validate(settings)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "luspo"])
def test_hints_need_a_loss_that_tells_tokens_apart(loss_type: str) -> None:
    with pytest.raises(ValidationError, match="speak of single tokens"):
        TrainerConfig.model_validate({"loss_type": loss_type, "importance_level": "sequence", "hints": "comments"})
