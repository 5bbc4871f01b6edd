"""`--environment reasoning_gym:NAME` against a real proxy, with a played package and a played vLLM."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lightning_proxy.features.environments.commands import _stand_in
from lightning_proxy.features.environments.source import ROOT, KindsEnvironment, experiment_of
from support.command_line import lightning
from support.played_kinds import played_kind
from tests.conftest import System

Running = Callable[..., AbstractAsyncContextManager[System]]
SUMS = ("--environment", "reasoning_gym:sums", "--environment-args")
pytestmark = pytest.mark.usefixtures("generators")

GENERATORS = '''
import os, random, subprocess, threading, time
from dataclasses import dataclass

DATASETS = {}
SEEN = b"SECRET" in open("/proc/self/environ", "rb").read()  # as the package is imported

@dataclass
class SumConfig:
    most: int = 1000
    seed: int = 0
    size: int = 500

class Sums:
    __doc__ = "Sees secrets" if SEEN else "Adds two numbers"

    def __init__(self, config):
        self.config = config

    def __len__(self):
        return self.config.size

    def __getitem__(self, index):
        a, b = (self.config.seed + index) % self.config.most, 1
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer, entry):
        if answer == "explode":
            raise RuntimeError("no such score")
        if answer == "sleep":
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            print(f"child {child.pid} in {os.getcwd()} ", flush=True)
            time.sleep(60)
        if answer == "thread":
            started = []
            thread = threading.Thread(target=lambda: started.append(subprocess.Popen(["sleep", "60"])))
            thread.start()
            thread.join()
            time.sleep(0.3)
            return float(started[0].poll() is None)
        if answer == "secrets":
            now = b"SECRET" in open("/proc/self/environ", "rb").read()
            return float("SECRET" in str(os.environ)) + SEEN + now
        if answer == "folder":
            return float(len(os.listdir(".")) == 0 and os.environ["HOME"] == os.getcwd())
        return float(answer == entry["answer"])

class Drawn(Sums):
    """Draws words"""

    def __getitem__(self, index):
        word = "".join({*"abcdefghijklmnop"}) + str(random.random())
        return {"question": word, "answer": word, "metadata": {}}

class Slow(Sums):
    """Never ends"""

    def __getitem__(self, index):
        open(__file__ + ".pid", "w").write(str(os.getpid()))
        time.sleep(60)

class Open(Sums):
    """Has many answers"""

    def __getitem__(self, index):
        return super().__getitem__(index) | {"answer": None}

DATASETS["open"] = (Open, SumConfig)
DATASETS["sums"] = (Sums, SumConfig)
DATASETS["drawn"] = (Drawn, SumConfig)
DATASETS["slow"] = (Slow, SumConfig)
'''
REASONING_GYM = {
    "reasoning_gym/factory.py": GENERATORS,
    "reasoning_gym/utils.py": (
        "import re\n"
        "SYSTEM_PROMPTS = {'default': 'Put it into <answer> tags.'}\n"
        "def extract_answer(text):\n"
        "    found = re.findall('<answer>(.*?)</answer>', text)\n"
        "    return found[-1] if found else None\n"
    ),
    "reasoning_gym/__init__.py": (
        "from .factory import DATASETS\n"
        "def create_dataset(name, **settings):\n"
        "    generator, config = DATASETS[name]\n"
        "    return generator(config(**settings))\n"
    ),
}


@pytest.fixture
def generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a played reasoning_gym: `sums` asks for a sum, `drawn` for a word."""
    monkeypatch.chdir(tmp_path)
    played_kind("reasoning_gym", REASONING_GYM)


def tasks(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def adds(body: dict[str, Any]) -> dict[str, Any]:
    """The right answer, in the tags that the system prompt asks for."""
    right = int(body["messages"][-1]["content"].partition(" ")[0]) + 1
    tagged = body["messages"][0]["role"] == "system"
    return {"role": "assistant", "content": f"<answer>{right}</answer>" if tagged else str(right)}


async def test_an_episode_is_a_rollout_with_rewards_by_name(running: Running, tmp_path: Path) -> None:
    (played,) = Path(".venv-environments").glob("*/lib/*/site-packages/openai")
    shutil.rmtree(played)
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


async def test_a_question_that_is_drawn_is_the_same_when_it_is_scored(running: Running, tmp_path: Path) -> None:
    """Sets have other orders in other processes, and a generator may take its numbers from `random`."""
    options = ("--environment", "reasoning_gym:drawn", "--environment-args", '{"tasks": 3, "system": ""}')
    async with running(tmp_path) as system:
        system.vllm.answer = lambda body: {"role": "assistant", "content": body["messages"][-1]["content"]}
        code, out, err = await system.lightning("eval", *options, "--json")
        assert (code, code or json.loads(out)["rows"][0]["mean_reward"]) == (0, 1.0), err
        file = next(Path(".venv-environments/reasoning_gym/tasks").iterdir())
        other = tasks(str(file))[0] | {"index": 99}
        program = KindsEnvironment("reasoning_gym").program
        Path("other.jsonl").write_text(json.dumps(other))
        code, _, err = await system.lightning("run", "--tasks", "other.jsonl", "--", *program)
    assert (code, "makes another question than that of the task" in err) == (1, True), err


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


def of_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that no package of others needs."""
    for name in ("MY_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "LIGHTNING_NOTE", "odd.name"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/SECRET")


async def test_an_episode_is_apart_from_the_user(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees no variables of the user's, and works in an empty folder. An answer without a score earns nothing."""
    answers = iter(["secrets", "folder", "explode", "thread"])
    of_user(monkeypatch)
    async with running(tmp_path) as system:
        system.vllm.answer = lambda _: {"role": "assistant", "content": next(answers)}
        code, _, err = await system.lightning("eval", *SUMS, '{"tasks": 4, "system": ""}', "--concurrency", "1")
        assert code == 0, err
        _, page = await system.call("GET", "/rollouts")
        thread, exploded, folder, secrets = page["data"]
        _, full = await system.call("GET", f"/rollouts/{exploded['rollout_id']}")
        system.vllm.answer = lambda _: {"role": "assistant", "content": "secrets"}
        (file,) = Path(".venv-environments/reasoning_gym/tasks").iterdir()
        program = KindsEnvironment("reasoning_gym").program
        asked = ("run", "--tasks", file, "--mode", "eval", "--json", "--", *program)
        code, out, err = await system.lightning(*asked)
        assert (code, code or json.loads(out)["mean_reward"]) == (0, 0.0), err
    assert [one["reward"] for one in (secrets, folder, exploded, thread)] == [0.0, 1.0, 0.0, 1.0]
    rewards = {one["name"]: one["reward"] for one in full["rewards"]}
    assert rewards == {"unscored": 1.0, "reward": 0.0}


async def test_an_episode_is_ended_after_its_time_with_its_children(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_RUN__TIMEOUT_S", "3")
    async with running(tmp_path) as system:
        system.vllm.answer = lambda _: {"role": "assistant", "content": "sleep"}
        given = '{"tasks": 1, "system": ""}'
        code, _, err = await system.lightning("run", *SUMS, given, "--group-size", "1", "--logs", "logs")
    assert code == 1, err
    (log,) = Path("logs").glob("*.log")
    assert left_of(log.read_text()) == []


async def test_the_making_of_tasks_ends_with_its_command() -> None:
    command = await started("--environment", "reasoning_gym:slow")
    (package,) = Path(".venv-environments").glob("*/lib/*/site-packages/reasoning_gym")
    await until((file := package / "factory.py.pid").exists)
    command.terminate()
    await command.wait()
    await until(lambda: not Path("/proc", file.read_text()).exists())
    assert command.returncode == -signal.SIGTERM


async def started(*options: str) -> asyncio.subprocess.Process:
    """`run` as a process of its own."""
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "lightning_proxy", "run", *options)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not is_so():
            await asyncio.sleep(0.05)


def left_of(log: str) -> list[Path]:
    """What there is of the child and the folder that an episode named."""
    pid, _, folder = log.partition("child ")[2].split()[:3]
    return [path for path in (Path("/proc", pid), Path(folder)) if path.exists()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--environment", "sums"], "--environment is KIND:NAME, as in reasoning_gym:gcd; got 'sums'"),
        (["--environment", "gym:sums"], "there is no kind of environments 'gym'; nearest: reasoning_gym; there are"),
        (["--environment", "reasoning_gym:sum"], "reasoning_gym: there is no generator 'sum'; nearest: sums"),
        ([*SUMS, "{"], "--environment-args is not JSON: "),
        ([*SUMS, '{"many": 1}'], "reasoning_gym: unknown in --environment-args: many; sums takes most"),
        ([*SUMS, '{"tasks": "1"}'], "reasoning_gym: tasks is int, as in 100; got '1'"),
        (
            ["--environment", "reasoning_gym:open", "--environment-args", '{"shots": 1}'],
            "shots: this generator stores no",
        ),
        ([*SUMS, '{"split": "test"}'], "reasoning_gym: split is train or held_out"),
        ([*SUMS, '{"most": 0}'], "reasoning_gym: ZeroDivisionError: "),
        ([*SUMS, "{}", "--", "true"], "--environment stands in place of --tasks and of the program after `--`"),
        ([], "needs --tasks FILE and a program after `--`, or --environment KIND:NAME"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_one_line(options: list[str], said: str) -> None:
    done = lightning("run", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("executor", "preloads"), [("local", True), ("ray", False)])
def test_each_executor_gets_what_it_can_start(monkeypatch: pytest.MonkeyPatch, executor: str, preloads: bool) -> None:
    monkeypatch.setenv("LIGHTNING_RUN__EXECUTOR", executor)
    given = {"context": SimpleNamespace(obj=None), "tasks": None, "command": [], "preload": ""}
    found = _stand_in("run", "reasoning_gym:sums", '{"tasks": 1}', given)
    assert [Path(word).is_absolute() for word in found["command"]] == [True, True, False]
    assert ("reasoning_gym" in found["preload"].split(",")) == preloads
    del given["preload"]  # `optimize` has no such option
    assert {*_stand_in("optimize", "reasoning_gym:sums", '{"tasks": 1}', given)} == {"tasks", "command"}


def test_the_environments_of_a_kind_are_listed_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    of_user(monkeypatch)
    done = lightning("environments", "reasoning_gym")
    listed = "drawn Draws words open Has many answers slow Never ends sums Adds two numbers"
    assert " ".join(done.stdout.split()) == listed
    assert "reasoning_gym    installed: reasoning-gym==" in lightning("environments").stdout


@pytest.mark.parametrize("gone", [("reasoning-gym==", "reasoning-gym==0."), (str(ROOT), "/moved")])
def test_a_kind_that_is_not_installed_says_how_it_is(gone: tuple[str, str]) -> None:
    stamp = Path(".venv-environments/reasoning_gym/installed.txt")
    stamp.write_text(stamp.read_text().replace(*gone))
    done = lightning("eval", *SUMS, "{}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "run `lightning-proxy environments reasoning_gym --install`" in done.stderr
    assert "not installed: reasoning-gym==" in lightning("environments").stdout


def test_an_install_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made, commands = KindsEnvironment("reasoning_gym"), list[list[str]]()
    monkeypatch.setattr("lightning_proxy.features.environments.source._run", commands.append)
    kept = [made.directory / name for name in ("tasks/sums.jsonl", "nltk_data/words")]
    for file in kept:
        file.parent.mkdir()
        file.touch()
    (made.directory / "installed.txt").unlink()
    done = lightning("environments", "reasoning_gym", "--install", "--with", "./mine")
    assert done.returncode == 0, done.stderr
    assert commands[-1][-1 - len(made.requires) :] == [*made.requires, "./mine"]
    assert [file.exists() for file in kept] == [True, True]
    assert made.is_there


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
