"""`--environment textarena:NAME` against a real proxy, with a played package and a played vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.environments.source import source_of
from lightning_proxy.trainer.collect.collector import Collector
from support.command_line import lightning
from support.played_kinds import played_kind
from support.sections import TrainerConfig
from tests.conftest import System

Running = Callable[..., AbstractAsyncContextManager[System]]
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
LARGER = ("--environment", "textarena:Larger-v0", "--environment-args")


@pytest.fixture(autouse=True)
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    played_kind("textarena", TEXTARENA)


def one(_: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "[1]"}


async def test_the_policy_plays_each_seat_in_turn_against_a_function(running: Running, tmp_path: Path) -> None:
    Path("zero.py").write_text("def play(seen, player, rng):\n    assert 'Say' in seen\n    return '[0]'\n")
    async with running(tmp_path) as system:
        system.vllm.answer = one
        given = json.dumps({"tasks": 2, "opponent": "zero.py:play"})
        code, _, err = await system.lightning("eval", *LARGER, given, "--out", "found.json")
        assert code == 0, err
        (row,) = json.loads(Path("found.json").read_text())["rows"]
        assert (row["mean_reward"], row["by_name"]["player-0"]) == (1.0, {"mean": 1.0, "rollouts": 1})
        assert row["by_name"]["opponent-0"] == {"mean": -1.0, "rollouts": 1}
        _, page = await system.call("GET", "/rollouts")
        seen = []
        for listed in page["data"]:
            _, rollout = await system.call("GET", f"/rollouts/{listed['rollout_id']}")
            (agent,) = {call["agent"] for call in rollout["calls"]}
            rewards = {reward["name"]: reward["reward"] for reward in rollout["rewards"]}
            seen.append((agent, len(rollout["calls"]), rewards[agent], rewards["reward"], rewards["turn_count"]))
    assert sorted(seen) == [("player-0", 2, 1.0, 1.0, 2.0), ("player-1", 2, 1.0, 1.0, 2.0)]


async def test_no_step_has_a_row_of_a_model_that_is_not_the_policy(running: Running, tmp_path: Path) -> None:
    """Else its calls would be trained on with the policy's reward."""
    async with running(tmp_path) as system:
        numbers = cycle(["[1]", "[0]", "[0]", "[1]"])  # each seat wins and loses
        system.vllm.answer = lambda _: {"role": "assistant", "content": next(numbers)}
        given = ('{"tasks": 2, "rounds": 1, "opponent": "base"}', "--group-size", "2", "--concurrency", "1")
        code, _, err = await system.lightning("run", *LARGER, *given)
        assert code == 0, err
        calls: dict[str, tuple[str, str]] = {}
        _, page = await system.call("GET", "/rollouts")
        for listed in page["data"]:
            _, rollout = await system.call("GET", f"/rollouts/{listed['rollout_id']}")
            calls |= {call["call_id"]: (call["agent"], call["request"]["model"]) for call in rollout["calls"]}
        async with system.store() as store:
            batch = await Collector(TrainerConfig(group_size=2, tasks_per_step=2), store).next_batch(0)
    own, others = {("player-0", "policy"), ("player-1", "policy")}, {("opponent-0", "base"), ("opponent-1", "base")}
    assert {*calls.values()} == own | others
    assert batch is not None
    assert {calls[name] for sample in batch.samples for name in sample.call_ids} == own


async def test_a_program_that_makes_an_illegal_move_is_no_opponent(running: Running, tmp_path: Path) -> None:
    """Else the policy is paid for what it did not do."""
    Path("bad.py").write_text("def play(seen, player, rng):\n    return '[-9]'\n")
    async with running(tmp_path) as system:
        system.vllm.answer = one
        code, _, err = await system.lightning("run", *LARGER, '{"tasks": 1, "opponent": "bad.py:play"}')
    assert (code, "the opponent made an illegal move" in err) == (1, True), err


def test_tasks_against_another_opponent_are_other_tasks() -> None:
    given = ({"opponent": "policy"}, {"opponent": "base"}, {"rounds": 3})
    files = [source_of("textarena:Larger-v0", json.dumps(one | {"tasks": 1}), {}).tasks for one in given]
    assert len({json.loads(file.read_text())["task_id"] for file in files}) == 3


async def test_in_self_play_each_seat_has_its_own_reward(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        numbers = iter(["[1]", "[0]"])
        system.vllm.answer = lambda _: {"role": "assistant", "content": next(numbers)}
        given = json.dumps({"tasks": 1, "rounds": 1, "opponent": "policy"})
        code, _, err = await system.lightning("run", *LARGER, given, "--mode", "eval")
        assert code == 0, err
        _, page = await system.call("GET", "/rollouts")
        _, rollout = await system.call("GET", f"/rollouts/{page['data'][0]['rollout_id']}")
    agents = {call["call_id"]: call["agent"] for call in rollout["calls"]}
    own = {agents[one["call_id"]]: one["reward"] for one in rollout["rewards"] if one["name"] == "reward"}
    assert (own, rollout["status"]) == ({"player-0": 1.0, "player-1": -1.0}, "completed")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"players": 3}, "textarena: Larger-v0 is not played by 3: The number of players has to be 2, received 3"),
        ({"seat": 2}, "textarena: seat is 0 to 1, for Larger-v0 is played by 2; got 2"),
        ({"opponent": "gone.py:play"}, "textarena: opponent: there is no function play in "),
        ({"size": 3}, "unexpected keyword argument 'size'"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_one_line(given: dict[str, Any], said: str) -> None:
    done = lightning("run", *LARGER, json.dumps(given))
    assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr
