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

from lightning_proxy.commands.show.listing import since
from lightning_proxy.proxy.errors import ConfigError
from lightning_proxy.proxy.store.training import CallCredit

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


async def test_transitions_carry_tokens_reward_and_policy_version(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await two_turns(system, "r1", 0.5, X_Task_Id="t1")
        code, _, err = await system.lightning("export", tmp_path / "t.jsonl")
        assert (code, "2 transitions rows" in err) == (0, True)
    first, last = lines(tmp_path / "t.jsonl")
    assert (first["rollout_id"], first["task_id"], first["t"], first["done"]) == ("r1", "t1", 0, False)
    assert (last["t"], last["done"], last["reward"], last["rollout_reward"]) == (1, True, 0.5, 0.5)
    assert (last["prompt_token_ids"], last["response_token_ids"]) == ([1, 2, 3], [5, 6])
    assert "prompt_token_ids" not in last["state"], "a row holds its token ids once"
    assert (last["logprobs"], last["policy_version"]) == ([-0.5, -1.5], 0)


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


async def test_a_conversation_is_exported_once_and_whole(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await two_turns(system, "r1", 0.5)
        assert (await system.lightning("export", tmp_path / "s.jsonl", "--kind", "sft"))[0] == 0
    (only,) = lines(tmp_path / "s.jsonl")
    assert [m["role"] for m in only["messages"]] == ["user", "assistant", "user", "assistant"]
    assert (only["rollout_id"], only["reward"], only["tools"][0]["function"]["name"]) == ("r1", 0.5, "add")


async def test_rollouts_are_chosen_by_mode_task_reward_and_time(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await two_turns(system, "low", 0.1, X_Task_Id="t1")
        await two_turns(system, "high", 0.9, X_Task_Id="t2")
        await two_turns(system, "eval", 1.0, X_Task_Id="t3", X_Rollout_Mode="eval")

        async def exported(*options: str) -> list[str]:
            code, out, _ = await system.lightning("export", "-", "--kind", "sft", *options)
            assert code == 0
            return sorted(json.loads(line)["rollout_id"] for line in out.splitlines())

        await system.chat("running")
        await system.chat("given-up")
        await system.call("POST", "/rollouts/given-up/end", {"status": "discarded"})
        assert await exported() == ["high", "low"], "what is held out, running or discarded is asked for by name"
        assert await exported("--mode", "all") == ["eval", "high", "low"]
        assert await exported("--status", "running") == ["running"]
        assert await exported("--status", "all") == ["given-up", "high", "low", "running"]
        assert await exported("--min-reward", "0.5") == ["high"]
        assert await exported("--task", "t1", "--since", "1h") == ["low"]
        assert await exported("--since", "2999-01-01") == []


async def test_parquet_holds_the_same_rows(running: Running, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    async with running(tmp_path) as system:
        await two_turns(system, "r1", 0.5)
        for kind in ("transitions", "sft"):
            assert (await system.lightning("export", tmp_path / f"{kind}.parquet", "--kind", kind))[0] == 0
    rows = parquet.read_table(tmp_path / "transitions.parquet").to_pylist()
    assert [(r["t"], r["response_token_ids"], r["logprobs"]) for r in rows] == [
        (t, [5, 6], [-0.5, -1.5]) for t in (0, 1)
    ]
    assert json.loads(rows[0]["state"])["messages"] == [{"role": "user", "content": "hi"}]
    (sft,) = parquet.read_table(tmp_path / "sft.parquet").to_pylist()
    assert len(json.loads(sft["messages"])) == 4


async def test_a_failed_export_leaves_the_old_file_and_nothing_else(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        out = tmp_path / "out"
        out.mkdir()
        (out / "t.jsonl").write_text("old")
        code, _, err = await system.lightning("export", out / "t.jsonl", "--format", "csv")
        assert (code, err.count("\n")) == (2, 1)
        assert [(p.name, p.read_text()) for p in out.iterdir()] == [("t.jsonl", "old")]
        for wrong, why in (("nowhere", "No such file or directory"), ("out/t.jsonl", "Not a directory")):
            code, _, err = await system.lightning("export", target := tmp_path / wrong / "u.jsonl")
            assert (code, err) == (1, f"lightning-proxy: cannot write {target}: {why}\n")


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


async def test_what_cannot_be_written_or_chosen_is_one_line(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await two_turns(system, "r1", 1.0)
        for code, *arguments in (
            (1, "/dev/full"),
            (1, tmp_path),
            (2, "-", "--status", "complete"),
            (2, "-", "--mode", "test"),
            (2, tmp_path / "rows.json"),
            (2, tmp_path / "rows"),
            (2, tmp_path / "rows.jsonl", "--format", "parquet"),
        ):
            found, _, err = await system.lightning("export", *arguments)
            last = err.splitlines()[-1]
            assert (found, last.startswith("lightning-proxy: "), "Traceback" in err) == (code, True, False), err


def test_since_takes_dates_and_times_ago() -> None:
    now = time.time()
    assert since("90m", now) == now - 5400
    assert since("2020-01-01", now) < since("2020-01-01T12:00", now) < now
    with pytest.raises(ConfigError, match="--since"):
        since("yesterday", now)
