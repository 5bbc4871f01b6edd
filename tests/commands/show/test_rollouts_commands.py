"""`rollouts list`, `end`, `diff`, `delete` and `reward`, from outside: a real proxy and a real store."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_proxy.commands.show import listing
from lightning_proxy.commands.show.rollout_view import rollouts_table

Running = Callable[..., AbstractAsyncContextManager[Any]]
LONG = "a-rollout-with-a-rather-long-name-of-its-own-that-fits-no-terminal-of-80-columns"


async def test_a_pipe_gets_whole_ids_and_a_terminal_what_fits(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat(LONG, X_Task_Id="t" * 60)
        _, out, _ = await system.lightning("rollouts", "list")
        assert out.splitlines()[1].split()[:2] == [LONG, "t" * 60]
        _, out, _ = await system.lightning("rollouts", "list", "--json")
    console = Console(width=80, file=StringIO(), record=True)
    console.print(rollouts_table(json.loads(out)["data"], 0, 80))
    assert max(map(len, console.export_text().splitlines())) <= 80


async def test_lists_are_filtered_sorted_and_go_on(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as system:
        for name, reward in (("r1", 0.1), ("r2", 0.9), ("r3", 0.5), ("r4", None)):
            await system.chat(name)
            if reward is not None:
                await system.call("POST", "/reward", {"rollout_id": name, "reward": reward})

        async def listed(*options: str) -> list[str]:
            code, out, err = await system.lightning("rollouts", "list", *options)
            assert code == 0, err
            return [line.split()[0] for line in out.splitlines()[1:]]

        assert await listed("--min-reward", "0.5") == ["r3", "r2"]
        assert await listed("--max-reward", "0.5", "--since", "1h") == ["r3", "r1"]
        assert await listed("--grep", "BY BASE") == ["r4", "r3", "r2", "r1"]
        assert await listed("--grep", "nobody said this") == []
        assert await listed("--sort", "reward", "--limit", "3") == ["r2", "r3", "r1"]
        assert await listed("--sort", "reward", "--reverse") == ["r4", "r1", "r3", "r2"]
        assert await listed("--reverse", "--limit", "1") == ["r1"]
        _, _, more = await system.lightning("rollouts", "list", "--limit", "3")
        assert await listed("--cursor", more.split()[-1]) == ["r1"]
        monkeypatch.setattr(listing, "MOST_PAGES", 1)
        assert await listed("--limit", "2") == ["r4", "r3"]
        for wrong in (("--sort", "colour"), ("--status", "gone"), ("--mode", "x"), ("--since", "then")):
            code, _, err = await system.lightning("rollouts", "list", *wrong)
            assert (code, err.count("\n")) == (2, 1), err


async def test_rollouts_are_ended_by_the_beginnings_of_their_ids(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        _, opened = await system.call("POST", "/rollouts", {"n": 2})
        first, second = (one["rollout_id"] for one in opened)
        await system.chat("mine-1")
        done = await system.lightning("rollouts", "end", first[:12], second, "--status", "failed", "--reason", "slow")
        assert (done.returncode, done.stdout) == (0, "ended 2 rollouts\n"), done.stderr
        _, rollout = await system.call("GET", f"/rollouts/{first}")
        assert (rollout["status"], rollout["reason"]) == ("failed", "slow")
        code, _, err = await system.lightning("rollouts", "end", "mine")
        assert (code, "no rollout 'mine'" in err) == (1, True)  # a name of somebody else's, not said whole
        code, out, _ = await system.lightning("rollouts", "end", "mine…")
        assert (code, out) == (0, "ended 1 rollout\n")
        assert (await system.lightning("rollouts", "end", "mine-1", "--status", "gone"))[0] == 2


async def test_rewards_find_rollouts_and_calls_by_the_beginning(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        _, opened = await system.call("POST", "/rollouts", {"n": 1})
        name = opened[0]["rollout_id"]
        await system.chat(name)
        _, rollout = await system.call("GET", f"/rollouts/{name}")
        call = rollout["calls"][0]["call_id"]
        code, out, err = await system.lightning("reward", name[:10], "0.5", "--call", call[:8])
        assert (code, name in out) == (0, True), err
        _, rollout = await system.call("GET", f"/rollouts/{name}")
        assert [(r["call_id"], r["reward"]) for r in rollout["rewards"]] == [(call, 0.5)]
        code, _, err = await system.lightning("reward", name, "0.5", "--call", "zzz")
        assert (code, "no call 'zzz'" in err) == (1, True)


async def test_several_ids_that_begin_alike_are_named(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        for i in range(6):
            await system.chat(f"run-{i}")
        code, _, err = await system.lightning("rollouts", "show", "run-")
        assert code == 1
        assert "several ids begin with it: run-5, run-4, run-3, run-2, …" in err


async def test_two_rollouts_are_compared(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        for name, question in (("a1", "add one"), ("b1", "add two")):
            body = {"model": "policy", "messages": [{"role": "user", "content": question}]}
            await system.call("POST", "/v1/chat/completions", body, X_Rollout_Id=name)
        await system.call("POST", "/reward", {"rollout_id": "a1", "reward": 1})
        code, out, err = await system.lightning("rollouts", "diff", "a1", "b1")
        assert code == 0, err
        assert max(map(len, out.splitlines())) <= 80
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert {"rollout a1 b1", "reward 1 -", "- user add one", "+ user add two"} <= {*lines}
        _, out, _ = await system.lightning("rollouts", "diff", "a1", "a1")
        assert "the conversations are the same" in out
