"""`GET /rewarders`: weights, agreement with people, the budget, and what waits; the page warns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_proxy.features.judge.config import JudgeConfig
from lightning_proxy.features.judge.kinds import made
from lightning_proxy.features.judge.table import CHECK_KEEP, SPENT_MORE, Checked
from support.page_in_node import drawn, needs_node

Running = Callable[..., AbstractAsyncContextManager[Any]]
HOSTILE = "<img src=x onerror=window.hurt=1>"
AWAY = {"api_base": "http://127.0.0.1:9/v1"}
SETTINGS: dict[str, Any] = {
    "rewards": {
        "use": [
            {"kind": "rank", "model": f"hosted_vllm/{HOSTILE}", "name": HOSTILE, **AWAY},
            {"kind": "next_message"},
        ],
        "budget": {"tokens": 1000},
    },
    "trainer": {"reward_weights": {HOSTILE: 1.0, "next_message": 0.5, "human": 0.0}},
}


async def judged(system: Any) -> None:
    """One rewarder that agrees with people and has spent its budget; a rollout that waits for it, and has a label."""
    keys = system.config.section(JudgeConfig)
    async with system.store() as store:
        by = await made(*keys.rewarders(system.config.rewards)[0], system.config).source()
        checked = Checked(by, 1_700_000_000.0, 24, 0.81, 0.66, 0.93)
        await store.database.execute(CHECK_KEEP, **asdict(checked))
        await store.database.execute(SPENT_MORE, rewarder=HOSTILE, tokens=1000, usd=0.0)
    await system.chat("r1", X_Task_Id="t1")
    label = {"rollout_id": "r1", "reward": 1.0, "name": "human", "source": "anna", "final": True}
    assert (await system.call("POST", "/reward", label))[0] == 200


async def test_the_route_says_what_judges_and_whether_people_agree(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as system:
        await judged(system)
        status, found = await system.call("GET", "/rewarders")
        _, shown = await system.call("GET", "/rewarders", **await system.key("team", scope="own"))
    assert shown["budget"] is shown["labels"] is None, "numbers of everybody are not for a team"
    numbers = ("tokens", "usd", "waiting", "check", "warning")
    assert {one[name] for one in shown["data"] for name in numbers} == {None}
    rank, next_message = found["data"]
    assert status == 200 and found["weights"][HOSTILE] == 1.0
    assert found["labels"] == {"rollouts": 1, "people": 1}
    assert found["budget"] == {"tokens": 1000, "usd": None, "spent_tokens": 1000, "spent_usd": 0.0}
    assert (rank["called"], rank["waiting"], rank["tokens"], rank["warning"]) == ("rank", 1, 1000, None)
    assert rank["check"] | {"source": ""} == {
        "source": "",
        "at": 1_700_000_000.0,
        "labels": 24,
        "alike": 0.81,
        "low": 0.66,
        "high": 0.93,
    }
    assert next_message["check"] is None and "nobody checked it" in next_message["warning"]


@needs_node
async def test_the_overview_warns_of_a_judge_that_nobody_checked(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as system:
        (overview,) = await drawn(system, tmp_path, "overview")
    assert "next_message trains, and nobody checked it" in overview["text"]
