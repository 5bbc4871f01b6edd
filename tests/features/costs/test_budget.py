"""`run --budget`: no further rollouts once so much is spent; those begun end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.limits import Budget

Running = Callable[..., AbstractAsyncContextManager[Any]]

CALLS_ONCE = """
import json, os, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()
"""


REWARDED_ONCE = (
    CALLS_ONCE
    + """
if not os.path.exists("rewarded"):
    open("rewarded", "w").close()
    body = json.dumps({"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": 1}).encode()
    url = os.environ["LIGHTNING_URL"] + "/reward"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()
"""
)


async def run(system: Any, directory: Path, budget: str, *more: str, program: str = CALLS_ONCE) -> Any:
    agent, tasks = directory / "agent.py", directory / "tasks.jsonl"
    agent.write_text(program)
    tasks.write_text('{"task_id": "t1"}\n{"task_id": "t2"}\n{"task_id": "t3"}\n')
    options = (*more, "--group-size", "2", "--concurrency", "1", "--budget", budget, "--json", "--tasks", tasks)
    return await system.lightning("run", *options, "--", sys.executable, agent)


async def test_a_run_stops_in_order_once_its_budget_is_spent(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, prices={"policy": [100_000, 0]}) as system:  # 0.3 USD for a prompt of 3 tokens
        done = await run(system, tmp_path, "0.5")
        summary = json.loads(done.stdout)
        assert (done.returncode, summary["rollouts"], summary["failed"]) == (3, 2, 0), done.stderr
        assert summary["usd"] == 0.6
        assert "0.6 of 0.5 USD are spent. No more rollouts were started" in done.stderr


async def test_a_run_within_its_budget_says_what_it_spent(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, prices={"policy": [100_000, 0]}) as system:
        done = await run(system, tmp_path, "5")
        assert (done.returncode, json.loads(done.stdout)["rollouts"]) == (0, 6), done.stderr


async def test_a_run_that_is_resumed_has_what_is_left_of_its_budget(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(tmp_path, prices={"policy": [100_000, 0]}) as system:
        for _ in range(2):
            done = await run(system, tmp_path, "0.5", "--resume", "kept", program=REWARDED_ONCE)
            assert "0.6 of 0.5 USD are spent" in done.stderr
        assert len((await system.call("GET", "/rollouts"))[1]["data"]) == 2


async def test_a_call_that_was_cut_off_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def request(*_: object, **__: object) -> Any:
        return {"spent": []}

    api = ApiClient("http://127.0.0.1:1")
    budget = Budget(api, 5.0)
    monkeypatch.setattr(api, "request", request)
    for status, is_spent in (("cancelled", False), ("ok", True)):  # the answers of a program may all lack a usage
        cost = {"usd": 1.0, "unpriced": 0, "unknown": 1}
        calls = [{"call_id": "a", "status": status}]
        budget.ended({"calls": calls, "costs": cost | {"of_calls": {"a": cost}}})
        assert await budget.wait() is not is_spent
