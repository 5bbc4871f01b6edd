"""Where programs run is chosen by the configuration, and what is missing is said in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_proxy.commands.run.runner import runner_for
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.features.ray import commands
from lightning_proxy.features.ray.runner import reached_at
from support.command_line import lightning

RAY = Config.model_validate({"run": {"executor": "ray"}})


def test_what_is_missing_or_does_not_go_with_other_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--preload needs run.executor: local"):
        runner_for(RAY, ["python", "agent.py"], ["json"], print)
    with pytest.raises(ConfigError, match="no command given"):
        runner_for(RAY, [], [], print)
    monkeypatch.setattr(commands, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'lightning-proxy[ray]'")):
        runner_for(RAY, ["agent"], [], print)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("run: {executor: slurm}", r"run\.executor: Input should be 'local' or 'ray'"),
        ("ray: {options: {cpus: 1}}", r"ray\.options.*num_cpus"),
        ("ray: {address: 'ray://head:10001'}", r"ray:// cannot be used|\(ray://\)"),
    ],
)
def test_the_options_are_those_of_the_configuration(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text(config)
    done = lightning("run", "--tasks", tmp_path / "tasks.jsonl", "--", "true", cwd=tmp_path)
    assert done.returncode == 2 and re.search(said, done.stderr, re.DOTALL), done.stderr


@pytest.mark.parametrize("url", ["https://proxy.example/of/agents", "https://proxy.example/of/agents/"])
def test_addresses_of_the_proxy_get_another_root(url: str) -> None:
    ours, task = "http://127.0.0.1:8080", {"LIGHTNING_TASK": '"http://127.0.0.1:8080"'}
    paths = {"OPENAI_BASE_URL": "/rollouts/r1/v1", "LIGHTNING_URL": "", "EVENTS_OF_A_ROOM": "/room/rollouts/r1/events"}
    env = {name: ours + path for name, path in paths.items()} | task
    assert reached_at(url, env) == {name: url.rstrip("/") + path for name, path in paths.items()} | task
    assert reached_at(None, env) == env
