"""`--environment KIND:NAME` against a real proxy and a played vLLM, with played packages; and with the real ones."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from itertools import repeat
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from traffic.server import CHAT, stream

from lightning_proxy.core.tokens import ONLY_RECORDED
from lightning_proxy.features.environments.commands import _stand_in
from lightning_proxy.features.environments.source import ROOT, KindsEnvironment, experiment_of, source_of
from lightning_proxy.trainer.collect.collector import Collector
from support.command_line import lightning
from support.paths import EXAMPLES
from support.played_kinds import played_kind
from support.sections import TrainerConfig
from tests.conftest import System

Json = dict[str, Any]
Running = Callable[..., AbstractAsyncContextManager[System]]
SUMS = ("--environment", "reasoning_gym:sums", "--environment-args")
LARGER = ("--environment", "textarena:Larger-v0", "--environment-args")
OURS = Path(".venv-environments/reasoning_gym")
GENERATORS = '''
import os, random, subprocess, threading, time
from dataclasses import dataclass

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

DATASETS = {one.__name__.lower(): (one, SumConfig) for one in (Open, Sums, Drawn, Slow)}
'''
REASONING_GYM = {
    "reasoning_gym/factory.py": GENERATORS,
    "reasoning_gym/utils.py": """
import re
SYSTEM_PROMPTS = {'default': 'Put it into <answer> tags.'}
def extract_answer(text):
    found = re.findall('<answer>(.*?)</answer>', text)
    return found[-1] if found else None
""",
    "reasoning_gym/__init__.py": """
from .factory import DATASETS
def create_dataset(name, **settings):
    generator, config = DATASETS[name]
    return generator(config(**settings))
""",
}
# Two players name numbers in turn; the larger sum wins.
TEXTARENA = {
    "textarena/__init__.py": """
class Game:
    def __init__(self, rounds=1):
        self.rounds = rounds

    def reset(self, num_players, seed):
        assert num_players == 2, f"The number of players has to be 2, received {num_players}"
        self.named, self.seed = [], seed

    def get_observation(self):
        return len(self.named) % 2, f"Game {self.seed}. Say [0] or [1].\\n" + " ".join(self.named)

    def step(self, action):
        print("played", action)
        self.named.append(action)
        return len(self.named) == 2 * self.rounds, {}

    def close(self):
        first, second = (sum(int(one.strip("[]")) for one in self.named[n::2]) for n in (0, 1))
        sign = (first > second) - (first < second)
        bad = [any(one not in ("[0]", "[1]") for one in self.named[n::2]) for n in (0, 1)]
        info = {n: {"turn_count": self.rounds, "invalid_move": bad[n]} for n in (0, 1)}
        return {0: sign, 1: -sign}, info

def make(name, **settings):
    from .envs.registration import ENV_REGISTRY
    return Game(**{**ENV_REGISTRY[name].kwargs, **settings})
""",
    "textarena/envs/__init__.py": "",
    "textarena/envs/registration.py": """
class Spec:
    entry_point, kwargs = "textarena.envs.Larger:LargerEnv", {"rounds": 2}

ENV_REGISTRY = {"Larger-v0": Spec()}
""",
    "nltk/__init__.py": "",
}


@pytest.fixture(autouse=True)
def played(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a played reasoning_gym (`sums` asks for a sum, `drawn` for a word) and textarena.

    Long tests install the real packages there.
    """
    monkeypatch.chdir(tmp_path)
    if "long" in request.keywords:
        return
    played_kind("reasoning_gym", REASONING_GYM)
    played_kind("textarena", TEXTARENA)


def saying(texts: Iterable[str]) -> Callable[[Json], Json]:
    """A model that says these in turn."""
    left = iter(texts)
    return lambda _: {"role": "assistant", "content": next(left)}


async def rollouts_of(system: System) -> list[Json]:
    """All rollouts, the newest first; `named` has their rewards."""
    _, page = await system.call("GET", "/rollouts")
    found = [(await system.call("GET", f"/rollouts/{one['rollout_id']}"))[1] for one in page["data"]]
    return [one | {"named": {reward["name"]: reward["reward"] for reward in one["rewards"]}} for one in found]


async def evaluated(system: System, environment: str, args: str) -> float:
    options = ("--environment", environment, "--environment-args", args, "--json")
    code, out, err = await system.lightning("eval", *options)
    assert code == 0, err
    return float(json.loads(out)["rows"][0]["mean_reward"])


# reasoning_gym -------------------------------------------------------------------------------------------------------


def tasks(file: str | Path) -> list[Json]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def adds(body: Json) -> Json:
    """The right answer, in the tags that the system prompt asks for."""
    right = int(body["messages"][-1]["content"].partition(" ")[0]) + 1
    tagged = body["messages"][0]["role"] == "system"
    return {"role": "assistant", "content": f"<answer>{right}</answer>" if tagged else str(right)}


async def test_an_episode_is_a_rollout_with_rewards_by_name(running: Running, tmp_path: Path) -> None:
    (client,) = OURS.glob("lib/*/site-packages/openai")
    shutil.rmtree(client)
    async with running(tmp_path) as system:
        system.vllm.answer = adds
        given = json.dumps({"tasks": 2, "most": 50})
        code, out, err = await system.lightning("run", *SUMS, given, "--group-size", "2", "--json")
        assert code == 0, err
        assert (json.loads(out)["rollouts"], json.loads(out)["mean_reward"]) == (4, 1.0)
        found = await rollouts_of(system)
    assert [(one["status"], one["named"]) for one in found] == [("completed", {"format": 1.0, "reward": 1.0})] * 4


async def test_a_question_that_is_drawn_is_the_same_when_it_is_scored(running: Running, tmp_path: Path) -> None:
    """Sets have other orders in other processes, and a generator may take its numbers from `random`."""
    async with running(tmp_path) as system:
        system.vllm.answer = lambda body: {"role": "assistant", "content": body["messages"][-1]["content"]}
        assert await evaluated(system, "reasoning_gym:drawn", '{"tasks": 3, "system": ""}') == 1.0
        (file,) = (OURS / "tasks").iterdir()
        Path("other.jsonl").write_text(json.dumps(tasks(file)[0] | {"index": 99}))
        program = KindsEnvironment("reasoning_gym").program
        code, _, err = await system.lightning("run", "--tasks", "other.jsonl", "--", *program)
    assert (code, "no longer generates this task's question" in err) == (1, True), err


def test_an_experiment_gets_both_splits_which_have_no_question_in_common(tmp_path: Path) -> None:
    Path("compare.yaml").write_text("rollouts: 8\nvariants: {one: {}}\n")
    given = json.dumps({"tasks": 20, "most": 60, "system": "", "shots": 3})
    experiment_of(Path("compare.yaml"), "reasoning_gym:sums", given, "policy")
    (file,) = OURS.glob("tasks/*.yaml")
    written = yaml.safe_load(file.read_text())
    assert (written["rollouts"], written["agent"][-1]) == (8, "reasoning_gym")
    train, held_out = ([task["messages"] for task in tasks(written[key])] for key in ("tasks", "held_out"))
    shots = {message["content"] for message in train[0][:-1]}
    many, few = ({messages[-1]["content"] for messages in one} for one in (train, held_out))
    assert (len(many), len(shots)) == (20, 6) and 0 < len(few) < 20
    assert many.isdisjoint(few | shots) and few.isdisjoint(shots)


def of_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that no package of others needs."""
    for name in ("MY_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "LIGHTNING_NOTE", "odd.name"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/SECRET")


async def test_an_episode_is_apart_from_the_user(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees no variables of the user's, and works in an empty folder. An answer without a score earns nothing."""
    of_user(monkeypatch)
    async with running(tmp_path) as system:
        system.vllm.answer = saying(["secrets", "folder", "explode", "thread", *["secrets"] * 4])
        code, _, err = await system.lightning("eval", *SUMS, '{"tasks": 4, "system": ""}', "--concurrency", "1")
        assert code == 0, err
        thread, exploded, folder, secrets = await rollouts_of(system)
        (file,) = (OURS / "tasks").iterdir()
        asked = ("run", "--tasks", file, "--mode", "eval", "--json", "--")
        code, out, err = await system.lightning(*asked, *KindsEnvironment("reasoning_gym").program)
        assert (code, code or json.loads(out)["mean_reward"]) == (0, 0.0), err
    assert [one["reward"] for one in (secrets, folder, exploded, thread)] == [0.0, 1.0, 0.0, 1.0]
    assert exploded["named"] == {"unscored": 1.0, "reward": 0.0}


async def test_an_episode_is_ended_after_its_time_with_its_children(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_RUN__TIMEOUT_S", "3")
    async with running(tmp_path) as system:
        system.vllm.answer = saying(["sleep"])
        given = '{"tasks": 1, "system": ""}'
        code, _, err = await system.lightning("run", *SUMS, given, "--group-size", "1", "--logs", "logs")
    assert code == 1, err
    (log,) = Path("logs").glob("*.log")
    pid, _, folder = log.read_text().partition("child ")[2].split()[:3]
    assert [path for path in (Path("/proc", pid), Path(folder)) if path.exists()] == []


async def test_the_making_of_tasks_ends_with_its_command() -> None:
    options = ("--environment", "reasoning_gym:slow")
    command = await asyncio.create_subprocess_exec(sys.executable, "-m", "lightning_proxy", "run", *options)
    (package,) = OURS.glob("lib/*/site-packages/reasoning_gym")
    await until((file := package / "factory.py.pid").exists)
    command.terminate()
    await command.wait()
    await until(lambda: not Path("/proc", file.read_text()).exists())
    assert command.returncode == -signal.SIGTERM


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not is_so():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--environment", "sums"], "--environment must be KIND:NAME, as in reasoning_gym:gcd; got 'sums'"),
        (["--environment", "gym:sums"], "kind of environment 'gym'; nearest: reasoning_gym; known kinds: "),
        (["--environment", "reasoning_gym:sum"], "reasoning_gym: there is no generator 'sum'; nearest: sums"),
        ([*SUMS, "{"], "--environment-args is not JSON: "),
        ([*SUMS, '{"many": 1}'], "reasoning_gym: --environment-args has unknown keys: many; sums takes most"),
        (["--environment", "reasoning_gym:open", SUMS[2], '{"shots": 1}'], "shots must be 0: this generator stores no"),
        ([*SUMS, '{"split": "test"}'], "reasoning_gym: split must be train or held_out"),
        ([*SUMS, '{"most": 0}'], "reasoning_gym: ZeroDivisionError: "),
        ([*SUMS, "{}", "--", "true"], "--environment replaces --tasks and the program after `--`"),
        ([], "needs --tasks FILE and a program after `--`, or --environment KIND:NAME"),
        ([*LARGER, '{"players": 3}'], "cannot be played by 3 players: The number of players has to be 2, received 3"),
        ([*LARGER, '{"seat": 2}'], "textarena: seat must be 0 to 1: this game of Larger-v0 has 2 players; got 2"),
        ([*LARGER, '{"opponent": "gone.py:play"}'], "textarena: opponent: there is no file "),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_one_line(options: list[str], said: str) -> None:
    done = lightning("run", *options)
    assert (done.returncode, done.stdout, said in done.stderr, done.stderr.count("\n")) == (2, "", True, 1), done.stderr


def test_an_experiment_leaves_program_and_split_to_the_environment() -> None:
    Path("compare.yaml").write_text("tasks: x\nagent: y")
    Path("none.yaml").write_text("variants: {}")
    own = lightning("experiment", "compare.yaml", *SUMS[:2])
    split = lightning("experiment", "none.yaml", *SUMS, '{"split": "train"}')
    assert "compare.yaml: with --environment, leave out agent, tasks" in own.stderr
    assert "an experiment takes both splits; leave out split" in split.stderr


@pytest.mark.parametrize(("executor", "preloads"), [("local", True), ("ray", False)])
def test_each_executor_gets_what_it_can_start(monkeypatch: pytest.MonkeyPatch, executor: str, preloads: bool) -> None:
    monkeypatch.setenv("LIGHTNING_RUN__EXECUTOR", executor)
    given = {"context": SimpleNamespace(obj=None), "tasks": None, "command": [], "preload": ""}
    found = _stand_in("run", "reasoning_gym:sums", '{"tasks": 1}', given)
    assert [Path(word).is_absolute() for word in found["command"]] == [True, True, False]
    assert ("reasoning_gym" in found["preload"].split(",")) == preloads


def test_the_environments_of_a_kind_are_listed_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    of_user(monkeypatch)
    done = lightning("environments", "reasoning_gym")
    listed = "drawn Draws words open Has many answers slow Never ends sums Adds two numbers"
    assert " ".join(done.stdout.split()) == listed
    assert "reasoning_gym    installed: reasoning-gym==" in lightning("environments").stdout


@pytest.mark.parametrize("gone", [("reasoning-gym==", "reasoning-gym==0."), (str(ROOT), "/moved")])
def test_a_kind_that_is_not_installed_says_how_it_is(gone: tuple[str, str]) -> None:
    stamp = OURS / "installed.txt"
    stamp.write_text(stamp.read_text().replace(*gone))
    done = lightning("eval", *SUMS, "{}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "run `lightning-proxy environments reasoning_gym --install`" in done.stderr
    assert "not installed: reasoning-gym==" in lightning("environments").stdout


def test_an_install_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made, commands = KindsEnvironment("reasoning_gym"), list[list[str]]()
    monkeypatch.setattr("lightning_proxy.features.environments.source._run", commands.append)
    kept = [OURS / name for name in ("tasks/sums.jsonl", "nltk_data/words")]
    for file in kept:
        file.parent.mkdir()
        file.touch()
    (OURS / "installed.txt").unlink()
    done = lightning("environments", "reasoning_gym", "--install", "--with", "./mine")
    assert done.returncode == 0, done.stderr
    assert commands[-1][-1 - len(made.requires) :] == [*made.requires, "./mine"]
    assert made.is_there and all(file.exists() for file in kept)


# textarena -----------------------------------------------------------------------------------------------------------


async def test_the_policy_plays_each_seat_in_turn_against_a_function(running: Running, tmp_path: Path) -> None:
    Path("zero.py").write_text("def play(seen, player, rng):\n    assert 'Say' in seen\n    return '[0]'\n")
    async with running(tmp_path) as system:
        system.vllm.answer = saying(repeat("[1]"))
        given = json.dumps({"tasks": 2, "opponent": "zero.py:play"})
        code, _, err = await system.lightning("eval", *LARGER, given, "--out", "found.json")
        assert code == 0, err
        (row,) = json.loads(Path("found.json").read_text())["rows"]
        assert (row["mean_reward"], row["by_name"]["player-0"]) == (1.0, {"mean": 1.0, "rollouts": 1})
        assert row["by_name"]["opponent-0"] == {"mean": -1.0, "rollouts": 1}
        seen = []
        for rollout in await rollouts_of(system):
            (agent,) = {call["agent"] for call in rollout["calls"]}
            rewards = rollout["named"]
            seen.append((agent, len(rollout["calls"]), rewards[agent], rewards["reward"], rewards["turn_count"]))
    assert sorted(seen) == [("player-0", 2, 1.0, 1.0, 2.0), ("player-1", 2, 1.0, 1.0, 2.0)]


async def test_no_step_has_a_row_of_a_model_that_is_not_the_policy(running: Running, tmp_path: Path) -> None:
    """Else its calls would be trained on with the policy's reward."""
    async with running(tmp_path) as system:
        system.vllm.answer = saying(["[1]", "[0]", "[0]", "[1]"] * 2)  # each seat wins and loses
        given = ('{"tasks": 2, "rounds": 1, "opponent": "base"}', "--group-size", "2", "--concurrency", "1")
        code, _, err = await system.lightning("run", *LARGER, *given)
        assert code == 0, err
        calls = [call for rollout in await rollouts_of(system) for call in rollout["calls"]]
        who = {call["call_id"]: (call["agent"], call["request"]["model"]) for call in calls}
        async with system.store() as store:
            batch = await Collector(TrainerConfig(group_size=2, tasks_per_step=2), store).next_batch(0)
    own, others = {("player-0", "policy"), ("player-1", "policy")}, {("opponent-0", "base"), ("opponent-1", "base")}
    assert {*who.values()} == own | others
    assert batch is not None
    assert {who[name] for sample in batch.samples for name in sample.call_ids} == own


async def test_a_program_that_makes_an_illegal_move_is_no_opponent(running: Running, tmp_path: Path) -> None:
    """Else the policy is paid for what it did not do."""
    Path("bad.py").write_text("def play(seen, player, rng):\n    return '[-9]'\n")
    async with running(tmp_path) as system:
        system.vllm.answer = saying(repeat("[1]"))
        code, _, err = await system.lightning("run", *LARGER, '{"tasks": 1, "opponent": "bad.py:play"}')
    assert (code, "the opponent made an illegal move" in err) == (1, True), err


def test_tasks_against_another_opponent_are_other_tasks() -> None:
    given = ({"opponent": "policy"}, {"opponent": "base"}, {"rounds": 3})
    files = [source_of("textarena:Larger-v0", json.dumps(one | {"tasks": 1}), {}).tasks for one in given]
    assert len({tasks(file)[0]["task_id"] for file in files}) == 3


async def test_in_self_play_each_seat_has_its_own_reward(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.vllm.answer = saying(["[1]", "[0]"])
        given = json.dumps({"tasks": 1, "rounds": 1, "opponent": "policy"})
        code, _, err = await system.lightning("run", *LARGER, given, "--mode", "eval")
        assert code == 0, err
        (rollout,) = await rollouts_of(system)
    agents = {call["call_id"]: call["agent"] for call in rollout["calls"]}
    own = {agents[one["call_id"]]: one["reward"] for one in rollout["rewards"] if one["name"] == "reward"}
    assert (own, rollout["status"]) == ({"player-0": 1.0, "player-1": -1.0}, "completed")


# The real packages, installed as a user does it ----------------------------------------------------------------------


def install(kind: str, *more: str) -> None:
    done = lightning("environments", kind, "--install", *more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"installing into .venv-environments/{kind}, with dependencies: ")


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_questions_of_reasoning_gym(running: Running, tmp_path: Path) -> None:
    install("reasoning_gym")
    assert len((await asyncio.to_thread(lightning, "environments", "reasoning_gym")).stdout.splitlines()) == 106

    def answer(body: Json) -> Json:
        numbers = body["messages"][-1]["content"].partition(": ")[2].partition(".")[0]
        return {"role": "assistant", "content": f"<answer>{gcd(*map(int, numbers.split(', ')))}</answer>"}

    async with running(tmp_path) as system:
        system.vllm.answer = answer
        assert await evaluated(system, "reasoning_gym:gcd", '{"tasks": 4, "max_value": 20}') == 1.0


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_game_of_textarena(running: Running, tmp_path: Path) -> None:
    """Who takes the first free cell loses or wins, and never makes an invalid move."""
    install("textarena")
    assert len((await asyncio.to_thread(lightning, "environments", "textarena")).stdout.splitlines()) == 712

    def answer(body: Json) -> Json:
        free = body["messages"][-1]["content"].rpartition("Available Moves: ")[2]
        return {"role": "assistant", "content": free.split(", ")[0].strip("' \n")}

    async with running(tmp_path) as system:
        system.vllm.answer = answer
        assert -1 < await evaluated(system, "textarena:TicTacToe-v0", '{"tasks": 4}') < 1
        for rewards in (rollout["named"] for rollout in await rollouts_of(system)):
            assert (rewards["invalid_move"], rewards["turn_count"] >= 3) == (0.0, True)
            assert sum(reward for name, reward in rewards.items() if name[:-1] in ("player-", "opponent-")) == 0
    done = await asyncio.to_thread(lightning, "run", "--environment", "textarena:Hangman-v0")
    assert "this game needs NLTK's words, which is not downloaded automatically; run `" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_taskset_of_verifiers_with_tools(running: Running, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "taskset", tmp_path / "taskset")
    install("verifiers", "--with", str(tmp_path / "taskset"))
    listed = (await asyncio.to_thread(lightning, "environments", "verifiers")).stdout
    assert " ".join(listed.splitlines()[-1].split()) == "word-problems Word problems with a calculator"

    def answer(body: Json) -> Json:
        first, last = body["messages"][0]["content"], body["messages"][-1]
        if "###DONE###" in first:  # the played user
            (question,) = re.findall(r".+ has .+\?|.+ buys .+\?", first)
            return {"role": "assistant", "content": "###DONE###" if last["content"].isdigit() else question}
        if last["role"] == "tool":
            return {"role": "assistant", "content": last["content"]}
        given = json.dumps({"expression": expression(last["content"])})
        call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": given}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    async def streamed(request: web.Request) -> web.Response:
        body = await request.json()
        message = answer(body)
        end = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        whole = {"id": "x", "created": 0, "model": "base", "choices": [end], "usage": None}
        return web.Response(body=b"".join(stream(CHAT, whole, body)), content_type="text/event-stream")

    async with running(tmp_path) as system:
        system.vllm.odd = streamed
        options = ("--mode", "eval", "--json", "--environment", "verifiers:word-problems", "--environment-args")
        code, out, err = await system.lightning("run", *options, '{"tasks": 2}')
        assert (code, code or json.loads(out)["mean_reward"]) == (0, 1.0), err
        rollout, *_ = await rollouts_of(system)
        code, _, err = await system.lightning("run", *options, '{"tasks": 1, "env": {"id": "user-sim"}}')
        assert code == 0, err
        played, *_ = await rollouts_of(system)
    assert [call["agent"] for call in rollout["calls"]] == ["agent", "agent"]
    assert rollout["named"] == {"agent.turns": 2.0, "agent.right": 1.0, "reward": 1.0}
    agents = {(call["agent"], call["untrainable_reason"] == ONLY_RECORDED) for call in played["calls"]}
    assert (agents, played["reward"]) == ({("assistant", False), ("user", True)}, 1.0)


def expression(problem: str) -> str:
    x, y, z = re.findall(r"\d+", problem)
    if "gives" in problem:
        return f"{x} + {y} - {z}"
    return f"{x} * {y} + {z}" if "boxes" in problem else f"{x} + {y} * {z}"
