"""Where programs run is chosen by the configuration, and what is missing is said in one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_proxy.commands.run.runner import LocalRunner, runner_for
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.features.ray import commands
from lightning_proxy.features.ray.runner import reached_at
from support.command_line import lightning

RAY = Config.model_validate({"run": {"executor": "ray"}})


def test_programs_run_here_unless_something_else_is_asked_for() -> None:
    command = [sys.executable, __file__]
    assert isinstance(runner_for(Config(), command, [], print), LocalRunner)
    assert isinstance(runner_for(Config(), command, ["json"], print), LocalRunner)


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'lightning-proxy[ray]'")):
        runner_for(RAY, ["agent"], [], print)


def test_what_does_not_go_with_other_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="--preload needs executor local"):
        runner_for(RAY, ["python", "agent.py"], ["json"], print)
    with pytest.raises(ConfigError, match="no command given"):
        runner_for(RAY, [], [], print)


def test_the_options_are_those_of_the_configuration(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("{}\n")
    (tmp_path / "config.yaml").write_text("run: {executor: slurm}\n")
    unknown = lightning("run", "--tasks", tasks, "--", "true", cwd=tmp_path)
    assert (unknown.returncode, "run.executor: Input should be 'local' or 'ray'" in unknown.stderr) == (2, True)
    (tmp_path / "config.yaml").write_text("ray: {options: {cpus: 1}}\n")
    wrong = lightning("run", "--tasks", tasks, "--", "true", cwd=tmp_path)
    assert (wrong.returncode, "ray.options" in wrong.stderr, "num_cpus" in wrong.stderr) == (2, True, True)
    (tmp_path / "config.yaml").write_text("ray: {address: 'ray://head:10001'}\n")
    client = lightning("run", "--tasks", tasks, "--", "true", cwd=tmp_path)
    assert (client.returncode, "ray:// cannot be used" in client.stderr or "(ray://)" in client.stderr) == (2, True)


@pytest.mark.parametrize("url", ["https://proxy.example/of/agents", "https://proxy.example/of/agents/"])
def test_addresses_of_the_proxy_get_another_root(url: str) -> None:
    env = {
        "OPENAI_BASE_URL": "http://127.0.0.1:8080/rollouts/r1/v1",
        "LIGHTNING_URL": "http://127.0.0.1:8080",
        "EVENTS_OF_A_ROOM": "http://127.0.0.1:8080/room/rollouts/r1/events",
        "LIGHTNING_TASK": '"http://127.0.0.1:8080"',
    }
    assert reached_at(url, env) == {
        "OPENAI_BASE_URL": "https://proxy.example/of/agents/rollouts/r1/v1",
        "LIGHTNING_URL": "https://proxy.example/of/agents",
        "EVENTS_OF_A_ROOM": "https://proxy.example/of/agents/room/rollouts/r1/events",
        "LIGHTNING_TASK": '"http://127.0.0.1:8080"',
    }
    assert reached_at(None, env) == env
