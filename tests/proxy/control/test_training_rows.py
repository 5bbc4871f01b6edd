"""`GET /rollouts/{id}/rows`: how a rollout was trained, call by call, beside the siblings it was compared with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_proxy.proxy.control import training_rows
from lightning_proxy.proxy.control.training_rows import TrainedRow, prefix_runs
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.reports import credit
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.trainer.collect.collector import Collector
from lightning_proxy.trainer.rows.prefix_tree import build_tree
from support.sections import PolicyConfig, TrainerConfig

Running = Callable[..., AbstractAsyncContextManager[Any]]
Tokens = Sequence[int]
# Prompt and answer of each call: the second goes on with the first, the third with an earlier answer spelt otherwise.
TALK = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 9, 5], [7, 8])]
AGENTS = ("planner", "planner", "executor")


async def record(
    store: Store,
    name: str,
    talk: Sequence[tuple[Tokens, Tokens]],
    reward: float,
    agents: Sequence[str | None] = AGENTS,
    key_id: str | None = None,
) -> None:
    """A rewarded rollout of task `t`; call i is named NAME-i, and one without an answer cannot be trained on."""
    async with Recorder(store, merged=False) as recorder:
        for i, (prompt, answer) in enumerate(talk):
            call_id, of = f"{name}-{i}", RolloutName(name, "t", agents[i], key_id=key_id)
            await recorder.start(CallStart(call_id, of, "chat/completions", "policy", 0, {"n": i}, time.time()))
            choice = Choice(0, tuple(answer), (-1.0,) * len(answer), "stop")
            why = None if answer else "no token ids from the upstream"
            end = CallEnd(call_id, name, "ok", {}, 200, tuple(prompt), (choice,), untrainable_reason=why)
            await recorder.end(end)
    await store.rewards.post([Reward(name, reward)], None, b"")


async def claim(store: Store, policy: PolicyConfig | None = None, **changed: Any) -> int:
    settings = {"group_size": 2, "tasks_per_step": 1, "baseline": "dr_grpo", **changed}
    batch = await Collector(TrainerConfig.model_validate(settings), store, policy=policy).next_batch(0, fewer=True)
    assert batch is not None
    return batch.step


async def shown(system: Any, name: str, **headers: str) -> Any:
    status, answer = await system.call("GET", f"/rollouts/{name}/rows", **headers)
    assert status == 200, answer
    return answer


async def test_the_tree_has_every_shared_token_once(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await record(store, "good", TALK, 1.0)
        await record(store, "bad", [([1, 2], [3, 6])], 0.0)
        await claim(store)
        tree = (await shown(system, "good"))["tree"]
        assert tree == (await shown(system, "bad"))["tree"]
        # 1 2 3 | 4 5 6, or 6, or 9 5 7 8
        root = {"parent": None, "depth": 0, "tokens": 3, "trained": 1, "parts": [["context", 2], ["answer", 1]],
                "call_ids": ["good-0", "bad-0"]}  # fmt: skip
        assert tree == [
            {**root, "rows": [["good", 0], ["bad", 0], ["good", 1]]},
            {"parent": 0, "depth": 3, "tokens": 3, "trained": 2, "rows": [["good", 0]],
             "parts": [["answer", 1], ["context", 1], ["answer", 1]], "call_ids": ["good-0", "good-1"]},
            {"parent": 0, "depth": 3, "tokens": 1, "trained": 1, "rows": [["bad", 0]], "parts": [["answer", 1]],
             "call_ids": ["bad-0"]},
            {"parent": 0, "depth": 3, "tokens": 4, "trained": 2, "rows": [["good", 1]],
             "parts": [["context", 2], ["answer", 2]], "call_ids": ["good-2"]},
        ]  # fmt: skip


async def test_an_answer_that_is_not_trained_on_is_no_context(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for name, reward in (("good", 1.0), ("bad", 0.0)):
            await record(store, name, TALK[:2], reward, ("other", "planner"))
        await claim(store, agents=["planner"])
        (run,) = (await shown(system, "good"))["tree"]
        assert run["parts"] == [["context", 2], ["left_out", 2], ["context", 1], ["answer", 1]]


async def test_agents_with_adapters_of_their_own_share_no_run_and_rows_are_counted_over_the_rollout(
    running: Running, tmp_path: Path
) -> None:
    adapters = {"first": ["executor"], "second": ["planner"]}
    async with running(tmp_path, publish="lora", adapters=adapters) as system, system.store() as store:
        policy = system.config.policy
        for name, reward in (("good", 1.0), ("bad", 0.0)):
            await record(store, name, TALK, reward)
        await claim(store, policy)
        answer = await shown(system, "good")
        assert [(c["row"], c["placed"]) for c in answer["calls"]] == [(1, "first"), (1, "merged"), (0, "first")]
        both = [[["good", 0], ["bad", 0]], [["good", 1], ["bad", 1]]]
        assert [(run["parent"], run["rows"]) for run in answer["tree"]] == [(None, rows) for rows in both]


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_has_as_many_tokens_as_the_one_that_a_step_computes(seed: int) -> None:
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(0, 12))]
    texts += [text[: rng.randint(1, len(text))] for text in texts]
    rows = [TrainedRow(f"r{i}", 0, "a", np.array(text, np.int32), [("c", 0, 1)]) for i, text in enumerate(texts)]
    runs, tree = prefix_runs(rows), build_tree(texts)
    assert sum(run["tokens"] for run in runs) == len(tree)
    for i, text in enumerate(texts):
        own = [run for run in runs if [f"r{i}", 0] in run["rows"]]
        assert sum(run["tokens"] for run in own) == len(text)
        assert [runs.index(run) for run in own][:-1] == [run["parent"] for run in own[1:]]
    assert all(run["depth"] == (0 if run["parent"] is None else _end(runs[run["parent"]])) for run in runs)


def _end(run: dict[str, Any]) -> int:
    return int(run["depth"] + run["tokens"])


async def test_a_step_that_is_undone_takes_its_credit_with_it_and_a_new_one_takes_the_place_of_the_old(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for name, reward in (("good", 1.0), ("bad", 0.0)):
            await record(store, name, TALK, reward)
        first = await claim(store)
        assert await store.steps.release_unfinished() == [first]
        assert [c["placed"] for c in (await shown(system, "good"))["calls"]] == [None] * 3
        await store.steps.trained(await claim(store), None, {})
        await store.rewards.post(
            [Reward(name, 5.0 * i, retrain=True) for i, name in enumerate(("good", "bad"))], None, b""
        )
        second = await claim(store, agents=["planner"])
        found = [(c["step"], c["return"], c["placed"]) for c in (await shown(system, "good"))["calls"]]
        assert found == [(second, 0.0, "first"), (second, 0.0, "merged"), (None, None, None)]
        await store.steps.forget_all()
        assert [c["step"] for c in (await shown(system, "good"))["calls"]] == [None] * 3


async def test_credit_goes_with_its_rollout(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for name, reward in (("good", 1.0), ("bad", 0.0)):
            await record(store, name, TALK, reward)
        await store.steps.trained(await claim(store), None, {})
        await store.rollouts.delete("good")
        assert (await system.call("GET", "/rollouts/good/rows"))[0] == 404
        assert {run["rows"][0][0] for run in (await shown(system, "bad"))["tree"]} == {"bad"}
        (left,) = await store.database.all("SELECT COUNT(*) AS n FROM call_credit")
        assert left["n"] == 3


async def test_a_tree_that_is_too_large_leaves_rows_out_and_a_large_group_siblings(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_rows, "MOST_TOKENS", 13)
    monkeypatch.setattr(credit, "SIBLINGS", 2)
    async with running(tmp_path) as system, system.store() as store:
        for name, reward in (("r0", 1.0), ("r1", 0.0), ("r2", 0.0)):
            await record(store, name, TALK, reward)
        await claim(store, group_size=3)
        answer = await shown(system, "r2")
        assert [sibling["rollout_id"] for sibling in answer["group"]] == ["r0", "r2"]
        assert (answer["tree_left_out"], {name for run in answer["tree"] for name, _ in run["rows"]}) == (2, {"r2"})
