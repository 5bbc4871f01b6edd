"""`--environment reasoning_gym:NAME` against a real proxy, with a played package and a played vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lightning_proxy.commands.environments.plugin import _checked
from lightning_proxy.commands.environments.source import experiment_of
from support.command_line import lightning
from tests.conftest import System

Running = Callable[..., AbstractAsyncContextManager[System]]
SUMS = ("--environment", "reasoning_gym:sums", "--environment-args")
pytestmark = pytest.mark.usefixtures("generators")


def tasks(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def adds(body: dict[str, Any]) -> dict[str, Any]:
    """The right answer, in the tags that the system prompt asks for."""
    right = int(body["messages"][-1]["content"].partition(" ")[0]) + 1
    tagged = body["messages"][0]["role"] == "system"
    return {"role": "assistant", "content": f"<answer>{right}</answer>" if tagged else str(right)}


async def test_an_episode_is_a_rollout_with_rewards_by_name(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.vllm.answer = adds
        given = json.dumps({"tasks": 2, "most": 50})
        code, out, err = await system.lightning("run", *SUMS, given, "--group-size", "2", "--json")
        assert code == 0, err
        assert (json.loads(out)["rollouts"], json.loads(out)["mean_reward"]) == (4, 1.0)
        _, page = await system.call("GET", "/rollouts")
        assert {one["status"] for one in page["data"]} == {"completed"}
        _, rollout = await system.call("GET", f"/rollouts/{page['data'][0]['rollout_id']}")
        assert {one["name"]: one["reward"] for one in rollout["rewards"]} == {"format": 1.0, "reward": 1.0}


def test_an_experiment_gets_both_splits_which_have_no_question_in_common(tmp_path: Path) -> None:
    Path("compare.yaml").write_text("rollouts: 8\nvariants: {one: {}}\n")
    given = json.dumps({"tasks": 20, "most": 60, "system": "", "shots": 3})
    experiment_of(Path("compare.yaml"), "reasoning_gym:sums", given, "policy")
    (written,) = (yaml.safe_load(one.read_text()) for one in Path(".venv-environments").glob("*/tasks/*.yaml"))
    assert (written["rollouts"], written["agent"][-1]) == (8, "reasoning_gym")
    train, held_out = ([task["messages"] for task in tasks(written[key])] for key in ("tasks", "held_out"))
    shots = {message["content"] for message in train[0][:-1]}
    many, few = ({messages[-1]["content"] for messages in one} for one in (train, held_out))
    assert (len(many), 0 < len(few) < 20, many & few, (many | few) & shots, len(shots)) == (20, True, set(), set(), 6)


async def test_an_episode_is_apart_from_the_user_and_fails_in_its_own_words(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees no variables of the user's, works in an empty folder, and is ended after its time, with its children."""
    answers = iter(["secrets", "folder", "explode", "sleep"])
    monkeypatch.setenv("SECRET", "sk-1")
    async with running(tmp_path) as system:
        system.vllm.answer = lambda _: {"role": "assistant", "content": next(answers)}
        given = '{"tasks": 4, "limit_s": 1, "system": ""}'
        code, _, err = await system.lightning("eval", *SUMS, given, "--concurrency", "1", "--logs", tmp_path / "logs")
        assert code == 0, err
        _, page = await system.call("GET", "/rollouts")
    late, exploded, folder, secrets = page["data"]
    assert (secrets["reward"], folder["reward"]) == (0.0, 1.0)
    assert {late["status"], exploded["status"]} == {"failed"}
    assert "RuntimeError: no such score" in exploded["reason"]
    assert "TimeoutError: the episode took longer than 1 s (limit_s in --environment-args)" in late["reason"]
    log = (tmp_path / "logs" / f"{late['rollout_id']}.log").read_text()
    child = Path("/proc", log.partition("child ")[2].split()[0], "cmdline")
    assert not child.exists() or child.read_bytes() == b""  # nobody has waited for it yet


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--environment", "sums"], "--environment is KIND:NAME, as in reasoning_gym:gcd; got 'sums'"),
        (["--environment", "gym:sums"], "there is no kind of environments 'gym'; is it reasoning_gym?"),
        (["--environment", "reasoning_gym:sum"], "reasoning_gym: there is no generator 'sum'; is it sums?"),
        ([*SUMS, "{"], "--environment-args is not JSON: "),
        ([*SUMS, "[]"], "--environment-args is a JSON object, got []"),
        ([*SUMS, '{"many": 1}'], "reasoning_gym: unknown: many; it takes most"),
        ([*SUMS, '{"tasks": "1"}'], "reasoning_gym: tasks is int, as in 100; got '1'"),
        ([*SUMS, '{"split": "test"}'], "reasoning_gym: split is train or held_out"),
        ([*SUMS, '{"most": 0}'], "reasoning_gym: ZeroDivisionError: "),
        ([*SUMS, "{}", "--", "true"], "--environment stands in place of --tasks and of the program after `--`"),
        ([*SUMS, "{}", "--tasks", "x"], "--environment stands in place of --tasks and of the program after `--`"),
        (["--environment-args", "{}"], "needs --tasks FILE and a program after `--`"),
        ([], "needs --tasks FILE and a program after `--`, or --environment KIND:NAME"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_one_line(options: list[str], said: str) -> None:
    done = lightning("run", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("executor", "absolute", "preloads"), [("local", 0, True), ("ray", 2, False)])
def test_each_executor_gets_what_it_can_start(executor: str, absolute: int, preloads: bool) -> None:
    given = {"context": SimpleNamespace(obj=None), "tasks": None, "command": [], "preload": "", "executor": executor}
    found = _checked("run")("reasoning_gym:sums", '{"tasks": 1}', given)
    assert sum(Path(word).is_absolute() for word in found["command"]) == absolute
    assert ("reasoning_gym" in found["preload"].split(",")) == preloads


def test_the_environments_of_a_kind_are_listed_a_line_each() -> None:
    done = lightning("environments", "reasoning_gym")
    assert done.stdout.split() == ["sums", "Adds", "two", "numbers"]
    assert "reasoning_gym    installed: reasoning-gym==" in lightning("environments").stdout


def test_a_kind_that_is_not_installed_says_how_it_is(tmp_path: Path) -> None:
    Path(".venv-environments/reasoning_gym/installed.txt").write_text("reasoning-gym==0.1.0")
    done = lightning("eval", *SUMS, "{}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "`lightning-proxy environments reasoning_gym --install` does it" in done.stderr
    assert "not installed: reasoning-gym==" in lightning("environments").stdout


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("tasks: x\nagent: y", SUMS[:2], "compare.yaml: with --environment, leave out agent, tasks"),
        ("variants: {}", [*SUMS, '{"split": "train"}'], "an experiment takes both splits; leave out split"),
        ("variants: {}", [*SUMS, '{"tasks": 2}'], "variants"),
    ],
)
def test_an_experiment_says_what_is_wrong(text: str, options: list[str], said: str) -> None:
    Path("compare.yaml").write_text(text)
    done = lightning("experiment", "compare.yaml", *options)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
