"""A run whose machine goes away is begun anew, in a rollout of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.limits import Observer
from lightning_proxy.commands.run.report import sentences, summarize
from lightning_proxy.commands.run.run import LOST, RESTARTS, RunOptions, run_tasks
from lightning_proxy.commands.run.runner import RunLost
from support.control_api import ControlApi, run_all, task


class LosesMachines:
    """Loses the first runs, and notes the status of all rollouts at each start. `rewards`: a lost run has a reward."""

    def __init__(self, proxy: ControlApi, lost: int, *, rewards: bool = False) -> None:
        self._proxy, self._lost, self._rewards = proxy, lost, rewards
        self.seen: list[list[object]] = []

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        rollouts = self._proxy.rollouts
        self.seen.append([rollout["status"] for rollout in rollouts.values()])
        log.write_text("half a line")
        if self._lost:
            self._lost -= 1
            if self._rewards:
                rollouts[env["LIGHTNING_ROLLOUT_ID"]].update(status="completed", reward=1.0)
            raise RunLost("the node went away")
        rollouts[env["LIGHTNING_ROLLOUT_ID"]].update(status="completed", reward=0.5)
        return 0

    async def close(self) -> None: ...


async def test_a_lost_run_is_begun_anew_in_another_rollout(proxy: ControlApi, tmp_path: Path) -> None:
    runner, ended = LosesMachines(proxy, 1), list[str]()

    class Watching(Observer):
        def ended(self, rollout: Mapping[str, Any]) -> None:
            ended.append(rollout["status"])

    async with ApiClient(proxy.url) as api:
        (result,) = await run_tasks(api, [task(1)], runner, RunOptions(logs=tmp_path / "logs"), print, Watching())
    assert ended == ["discarded", "completed"]
    assert (result.rollout_id, result.exit_code, result.reward, result.restarts) == ("r1", 0, 0.5, 1)
    # The lost one is open until then: a discarded one would count as a sibling that has ended.
    assert runner.seen == [["running"], ["running", "running"]]
    assert {name: rollout["status"] for name, rollout in proxy.rollouts.items()} == {
        "r0": "discarded", "r1": "completed"
    }  # fmt: skip
    assert proxy.rollouts["r1"]["task_id"] == "t1"
    assert summarize([result])["restarts"] == 1
    assert sentences([result])[1][0] == "1 runs were begun anew, in other rollouts: their machine went away"


async def test_a_run_that_is_lost_again_and_again_has_failed(proxy: ControlApi, tmp_path: Path) -> None:
    (result,) = await run_all(proxy, LosesMachines(proxy, 99), [task(1)], RunOptions())
    assert (result.exit_code, result.reason, result.restarts) == (LOST, "the node went away", RESTARTS)
    assert [rollout["status"] for rollout in proxy.rollouts.values()] == ["discarded"] * RESTARTS + ["failed"]


async def test_a_run_that_is_lost_after_its_reward_is_complete(proxy: ControlApi, tmp_path: Path) -> None:
    (result,) = await run_all(proxy, LosesMachines(proxy, 1, rewards=True), [task(1)], RunOptions())
    assert (result.failed, result.reward, result.restarts) == (True, 1.0, 0)
    assert [rollout["status"] for rollout in proxy.rollouts.values()] == ["completed"]
