"""`export`: rows out of a real store, as files that other programs read."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.show.find import since_of
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.store.training import CallCredit

Running = Callable[..., AbstractAsyncContextManager[Any]]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def two_turns(system: Any, rollout_id: str, reward: float, **headers: str) -> None:
    """A conversation of two calls, with a tool on offer."""
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": {"name": "add"}}]}
        path = f"/rollouts/{rollout_id}/v1/chat/completions"
        _, answer = await system.call("POST", path, body, **headers)
        messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
    await system.call("POST", "/reward", {"rollout_id": rollout_id, "reward": reward})


async def test_transitions_say_how_they_were_trained_and_what_they_took(running: Running, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    async with running(tmp_path) as system:
        _, (opened,) = await system.call("POST", "/rollouts", {"task_id": "t1", "metadata": {"level": 3}})
        for name in (mine := opened["rollout_id"], "untrained"):
            await two_turns(system, name, 0.5, X_Task_Id="t1")
        async with system.store() as store:
            credit = [CallCredit(mine, seq, 0.5, advantage, 0, "first") for seq, advantage in enumerate((0.25, -0.25))]
            step = await store.steps.claim([mine], 0, credit=credit)
        for file in ("t.jsonl", "t.parquet"):
            assert (await system.lightning("export", tmp_path / file))[0] == 0
    rows = lines(tmp_path / "t.jsonl")
    learned, others = ([row for row in rows if (row["rollout_id"] == mine) is is_mine] for is_mine in (True, False))
    assert [(r["return"], r["advantage"], r["step"]) for r in learned] == [(0.5, 0.25, step), (0.5, -0.25, step)]
    assert {(r["return"], r["advantage"], r["step"]) for r in others} == {(None, None, None)}, "it was not trained"
    assert ([r["metadata"] for r in learned], others[0]["metadata"]) == ([{"level": 3}] * 2, {})
    for row in rows:
        assert abs(time.time() - row["started_at"]) < 60 and row["latency_ms"] > 0
        assert row["usage"]["completion_tokens"] == 2
    columns = ("return", "advantage", "step", "started_at", "latency_ms")
    for row, same in zip(parquet.read_table(tmp_path / "t.parquet").to_pylist(), rows, strict=True):
        assert [row[name] for name in columns] == [same[name] for name in columns]
        assert [json.loads(row[name]) for name in ("usage", "metadata")] == [same["usage"], same["metadata"]]


async def test_a_rollout_that_is_deleted_meanwhile_is_left_out(running: Running, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with running(tmp_path) as system:
        for name in ("first", "second", "third"):
            await two_turns(system, name, 1.0)
        await system.call("POST", "/rollouts/large/events", {"kind": "action", "name": "x", "result": "x" * 200_000})
        await system.call("POST", "/rollouts/large/end", {"status": "completed"})
        exporting = asyncio.create_task(system.lightning("export", tmp_path / "pipe"))
        with await asyncio.to_thread((tmp_path / "pipe").open) as pipe:  # the newest does not fit: the export waits
            got = await asyncio.to_thread(pipe.read, 1000)
            assert (await system.call("DELETE", "/rollouts/first"))[0] == 204
            got += await asyncio.to_thread(pipe.read)
        assert (await exporting)[0] == 0
    assert {json.loads(line)["rollout_id"] for line in got.splitlines()} == {"large", "third", "second"}
    assert (tmp_path / "pipe").is_fifo()


def test_since_takes_dates_and_times_ago() -> None:
    now = time.time()
    assert abs((since_of("90m") or 0.0) - (now - 5400)) < 60
    assert (since_of("2020-01-01") or now) < (since_of("2020-01-01T12:00") or 0.0) < now
    with pytest.raises(ConfigError, match="--since"):
        since_of("yesterday")
