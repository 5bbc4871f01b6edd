"""examples/agentflow and examples/werewolf: their rules, what chance and the best play are worth, and rollouts."""

from __future__ import annotations

import importlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.examples import EXAMPLES, modules, played_by_teacher

Json = dict[str, Any]


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """`agents(NAME)`: an example's modules, its agent among them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> Any:
        found = modules(name)
        monkeypatch.setitem(sys.modules, "tasks", found.tasks)
        monkeypatch.syspath_prepend(str(EXAMPLES / name))
        for other in ("agent", "ask"):  # another example's
            monkeypatch.delitem(sys.modules, other, raising=False)
        return SimpleNamespace(**vars(found), agent=importlib.import_module("agent"))

    before = {*sys.modules}
    yield load
    for name in {"agent", "ask"} - before:
        sys.modules.pop(name, None)


def asked(prompt: str) -> Json:
    return {"messages": [{"role": "user", "content": prompt}]}


class TestAgentFlow:
    @pytest.fixture
    def flow(self, agents: Callable[[str], Any]) -> Any:
        return agents("agentflow")

    def test_no_noun_and_no_count_is_in_both_splits(self, flow: Any) -> None:
        for seed in range(3):
            train, held_out = flow.tasks.split(seed, 200, 32)
            assert (len(train), len(held_out)) == (200, 32)
            for kind in (dict.keys, dict.values):
                both = [{one for task in tasks for one in kind(task["counts"])} for tasks in (train, held_out)]
                assert both[0].isdisjoint(both[1])

    def share(self, flow: Any, plan: Callable[[Json, list[str]], str], rounds: int = 40) -> float:
        """The mean reward of a planner on held-out questions."""
        source = random.Random(0)
        _, tasks = flow.tasks.split(0, 0, 100)
        rewards = [
            flow.tasks.score(task, flow.agent.flow(task, lambda memory: plan(task, memory), lambda *_: None, source))[0]  # noqa: B023
            for task in tasks * rounds
        ]
        return sum(rewards) / len(rewards)

    def test_the_best_planner_loses_to_nothing_but_the_verifier(self, flow: Any) -> None:
        """It may not err before the last turn: once for a question of one noun, twice for one of two."""

        def best(task: Json, memory: list[str]) -> str:
            return str(flow.tasks.legal(task["counts"], memory)[0][0])

        assert self.share(flow, best) == pytest.approx((0.9 + 0.81) / 2, abs=0.02)
        train, _ = flow.tasks.split(0, 4, 0)
        assert [flow.tasks.progress(task["counts"], [], best(task, [])) for task in train] == [1] * 4
        assert flow.tasks.progress(train[0]["counts"], [], f"rhyme {next(iter(train[0]['counts']))}") == 0

    @pytest.mark.parametrize(
        ("line", "result"),
        [
            ("facts cats", "4"), ("facts dragons", "unknown"), ("calc 3 * 8 + 2 * 4", "32"), ("calc 3 + 8", "11"),
            ("calc 3 **8", "error"), ("calc __import__", "error"), ("rhyme cats", "nothing rhymes with cats"),
            ("dance", "error"),
        ],
    )  # fmt: skip
    def test_tools_answer_whatever_is_written(self, flow: Any, line: str, result: str) -> None:
        assert flow.agent.execute(line) == result


class TestWerewolf:
    @pytest.fixture
    def wolf(self, agents: Callable[[str], Any]) -> Any:
        return agents("werewolf")

    def share(self, wolf: Any, choose: Callable[[str, str, Sequence[str]], str], games: int = 20_000) -> float:
        """The share of held-out games that are won."""
        source = random.Random(0)
        _, deals = wolf.tasks.split(0, 0, 100)
        tasks = [source.choice(deals) for _ in range(games)]
        return sum(wolf.tasks.score(task, wolf.agent.game(task, choose, source))[0] for task in tasks) / games

    def test_no_name_and_no_seat_of_the_seer_is_in_both_splits(self, wolf: Any) -> None:
        train, held_out = wolf.tasks.split(1, 180, 30)
        for of in (lambda task: task["players"], lambda task: [task["roles"].index("seer")]):
            both = [{one for task in tasks for one in of(task)} for tasks in (train, held_out)]
            assert both[0].isdisjoint(both[1])

    def test_a_seat_does_not_tell_the_seer_where_the_wolf_is(self, wolf: Any) -> None:
        """Else a policy learns places, and plays worse than chance where the seats are others."""
        for tasks in wolf.tasks.split(1, 180, 30):
            places = Counter((task["roles"].index("seer"), task["roles"].index("wolf")) for task in tasks)
            assert len(places) in (3, 9)
            assert len(set(places.values())) == 1

    def test_random_play_is_worth_what_was_enumerated(self, wolf: Any) -> None:
        source = random.Random(1)

        def teachers(_: str, prompt: str, legal: Sequence[str]) -> str:
            name = str(wolf.teacher.reply(asked(prompt), {}, source)["content"])
            assert name in legal
            return name

        assert self.share(wolf, teachers) == pytest.approx(float(wolf.tasks.chance()), abs=0.01)


@pytest.mark.parametrize(
    ("name", "agents", "actions"),
    [
        ("agentflow", {"planner"}, {"executor", "verifier", "generator"}),
        ("werewolf", {"seer", "villager-1", "villager-2"}, set()),
    ],
)
async def test_rollouts_through_the_proxy(
    name: str, agents: set[str], actions: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played by the teacher: each has its reward, its seats by name, and the programs' actions."""
    rollouts = await played_by_teacher(name, sys.executable, 8, tmp_path, monkeypatch)
    for rollout in rollouts:
        assert rollout["reward"] in (0, 1)
        assert {call["agent"] for call in rollout["calls"]} == agents
        assert {event["agent"] for event in rollout["events"]} == actions
        steps = [reward for reward in rollout["rewards"] if reward["call_id"]]
        assert {reward["name"] for reward in steps} <= {"progress"}
        assert len(steps) == (len(rollout["calls"]) if actions else 0)
