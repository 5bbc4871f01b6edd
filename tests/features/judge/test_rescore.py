"""`rescore` asks a real function about recorded rollouts, over a real proxy and store."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

Running = Callable[..., AbstractAsyncContextManager[Any]]
OLD = 0.25


def function(directory: Path, body: str) -> str:
    """A file with a function of this body; returns it as `--reward` wants it."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (directory / "scoring.py").write_text(f"def reward(rollout):\n{lines}")
    return f"{directory}/scoring.py:reward"


async def recorded(system: Any, *rollout_ids: str, task: str | None = None) -> None:
    """Completed rollouts of one call each, with a reward."""
    for rollout_id in rollout_ids:
        headers = {} if task is None else {"X_Task_ID": task}
        assert (await system.chat(rollout_id, **headers))[0] == 200
        assert (await system.call("POST", "/reward", {"rollout_id": rollout_id, "reward": OLD}))[0] == 200


async def rewards(system: Any, rollout_id: str) -> list[tuple[str, float, str | None]]:
    _, found = await system.call("GET", f"/rollouts/{rollout_id}")
    return [(one["name"], one["reward"], one["source"]) for one in found["rewards"]]


async def test_the_new_value_stands_beside_the_old_one_with_the_functions_name_and_version(
    tmp_path: Path, running: Running
) -> None:
    scoring = function(
        tmp_path, "assert rollout['calls'][0]['response']\nreturn {'a': 1, 'b': 0.25}[rollout['rollout_id']]"
    )
    async with running(tmp_path) as system:
        await recorded(system, "a", "b")
        done = await system.lightning("rescore", "--reward", scoring)
        assert done.returncode == 0, done.stderr
        assert "2 rollouts asked about, 0 failed, 0 without a reward, 0 scored by this version before" in done.stdout
        assert "reward: mean 0.625" in done.stdout
        (_, old, _), (name, new, source) = await rewards(system, "a")
        assert (old, name, new) == (OLD, "reward", 1.0) and source.startswith("function:reward@")
        assert [r["reward"] for r in (await system.call("GET", "/rollouts"))[1]["data"]] == [0.25, 1.0]
        asked_again = await system.lightning("rescore", "--reward", scoring, "--json")
        told = json.loads(asked_again.stdout)
        assert (told["asked"], told["scored_before"]) == (0, 2), "a version is asked once"
        again = await system.lightning("rescore", "--reward", scoring, "--again", "--json")
        assert json.loads(again.stdout)["asked"] == 2
        assert len(await rewards(system, "a")) == 3


async def test_a_rollout_that_it_fails_for_is_named_and_can_be_asked_about_alone(
    tmp_path: Path, running: Running
) -> None:
    async with running(tmp_path) as system:
        await recorded(system, "a", "b")
        scoring = function(tmp_path, "return {'a': 1}[rollout['rollout_id']]")
        done = await system.lightning("rescore", "--reward", scoring)
        assert done.returncode == 1
        assert "no reward for rollout b: KeyError: 'b' (scoring.py:2)" in done.stderr
        assert (len(await rewards(system, "a")), len(await rewards(system, "b"))) == (2, 1)
        mended = function(tmp_path, "return 0")
        done = await system.lightning("rescore", "b", "--reward", mended, "--json")
        told = json.loads(done.stdout)
        assert (told["asked"], told["means"]) == (1, {"reward": 0.0})
        assert (len(await rewards(system, "a")), len(await rewards(system, "b"))) == (2, 2)


async def test_the_group_is_offered_to_the_trainer_again_once_all_of_it_is_scored(
    tmp_path: Path, running: Running
) -> None:
    scoring = function(tmp_path, "return 1")
    async with running(tmp_path) as system:
        await recorded(system, "a", "b", task="t")
        async with system.store() as store:
            await store.database.execute("UPDATE rollouts SET step = 1")
        await system.lightning("rescore", "--reward", scoring)
        assert [r["step"] for r in (await system.call("GET", "/rollouts"))[1]["data"]] == [1, 1]
        await system.lightning("rescore", "--reward", scoring, "--again", "--retrain")
        assert [r["step"] for r in (await system.call("GET", "/rollouts"))[1]["data"]] == [None, None]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--reward", "scoring.py"], "scoring.py:reward"),
        (["--reward", "gone.py:reward"], "cannot read"),
        (["--reward", "SCORING", "nobody"], "no rollout 'nobody'"),
        ([], "--reward FILE.py:NAME"),
    ],
)
async def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, running: Running, asked: list[str], said: str) -> None:
    scoring = function(tmp_path, "return 1")
    async with running(tmp_path) as system:
        done = await system.lightning("rescore", *[scoring if one == "SCORING" else one for one in asked])
    assert done.returncode in (1, 2) and done.stdout == ""
    assert said in done.stderr and done.stderr.count("\n") == 1
