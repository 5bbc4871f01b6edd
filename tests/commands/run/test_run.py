"""`run`: task files, programs, rollouts, rewards, failures and Ctrl-C against a real HTTP control API."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.api_client import ApiClient, ApiError
from lightning_proxy.commands.run.limits import Observer
from lightning_proxy.commands.run.run import RunOptions, run_tasks
from lightning_proxy.commands.run.runner import LocalRunner
from lightning_proxy.commands.run.tasks import read_tasks
from lightning_proxy.core.errors import ConfigError, LightningError
from support.control_api import ControlApi, Program, run_all, task

REWARDS_TEN_TIMES_X = """
import json, os, urllib.request
task = json.loads(os.environ["LIGHTNING_TASK"])
body = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": 10.0 * task["x"]}
request = urllib.request.Request(os.environ["LIGHTNING_URL"] + "/reward", json.dumps(body).encode())
urllib.request.urlopen(request).close()
"""


async def test_a_proxy_that_is_away_for_a_moment_is_waited_for(
    proxy: ControlApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.commands.api_client.RETRY_S", 0.05)
    async with ApiClient(proxy.url, patience_s=30) as api:
        assert len(await api.open_rollouts("t", "train", 1)) == 1
        proxy.away = 3
        assert (await api.rollout("r0"))["task_id"] == "t"
        proxy.away = 1
    async with ApiClient(proxy.url, patience_s=30) as limited:
        proxy.away_status, proxy.away = 429, 2
        assert (await limited.rollout("r0"))["task_id"] == "t"
        proxy.away_status, proxy.away = 503, 1
    async with ApiClient(proxy.url, patience_s=30) as fresh:
        with pytest.raises(ApiError, match="HTTP 503"):  # never reached: said at once
            await fresh.rollout("r0")


async def test_groups_are_opened_only_as_the_gate_lets_them(proxy: ControlApi, tmp_path: Path) -> None:
    open_at_gate: list[int] = []
    told: list[str] = []

    class Watched(Observer):
        async def wait(self) -> bool:
            open_at_gate.append(sum(r["status"] == "running" for r in proxy.rollouts.values()))
            return True

        def opened(self, rollout_ids: Sequence[str], sibling_of: str | None) -> None:
            told.extend(f"{name} opened" for name in rollout_ids)

        def ended(self, rollout: Mapping[str, Any]) -> None:
            told.append(f"{rollout['rollout_id']} ended")

    async with ApiClient(proxy.url) as api:
        runner = Program("process")(tmp_path, REWARDS_TEN_TIMES_X)
        await run_tasks(api, [task(1), task(2), task(3)], runner, RunOptions(group_size=2), print, Watched())
    assert open_at_gate == [0, 0, 0]
    assert sorted(told) == sorted(f"{name} {what}" for name in proxy.rollouts for what in ("opened", "ended"))


async def test_modules_that_cannot_be_imported_are_named(proxy: ControlApi, tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    runner = LocalRunner([sys.executable, str(tmp_path / "agent.py")], ["no_such_module"])
    why = "cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.raises(LightningError, match=why):
        await run_all(proxy, runner, [task(1)], RunOptions())


KILLS_ITS_SERVER = """
import json, os, pathlib, signal, time
def parent(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
def is_server(pid):
    command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"fork_server.py" in command or b"preload.py" in command
task = json.loads(os.environ["LIGHTNING_TASK"])["x"]
if task == 1:
    server = os.getpid()
    while not is_server(server) or is_server(parent(server)):  # guards are forks of it
        server = parent(server)
    os.kill(server, signal.SIGKILL)
    time.sleep(1000)
"""


@pytest.mark.parametrize("modules", [[], ["agent_module"]], ids=["process", "preload"])
async def test_a_fork_server_that_dies_fails_its_programs_and_is_started_again(
    proxy: ControlApi, tmp_path: Path, modules: list[str]
) -> None:
    said = list[str]()
    (tmp_path / "agent.py").write_text(KILLS_ITS_SERVER)
    (tmp_path / "agent_module.py").write_text("import sys\nprint('my secret', file=sys.stderr)")
    command = [sys.executable, str(tmp_path / "agent.py")]
    runner = LocalRunner(command, modules, lambda text: text.replace("secret", "[redacted]"), said.append)
    results = await run_all(proxy, runner, [task(n) for n in (0, 1, 2)], RunOptions(concurrency=1))
    name, last = ("preload", "my [redacted]") if modules else ("fork", "no output")
    why = f"the {name} server died (signal SIGKILL), last output: {last}"
    assert [(result.exit_code, result.reason) for result in results] == [(0, None), (-9, why), (0, None)]
    assert proxy.rollouts["r1"]["reason"] == why
    assert said == [f"{why}: 1 programs failed; it is started again"]


async def test_a_preloaded_module_finds_its_neighbours_and_none_of_ours(proxy: ControlApi, tmp_path: Path) -> None:
    """`tasks` is also the name of a module beside the preload server."""
    (tmp_path / "agent.py").write_text("import helper\nassert helper.tasks.MINE")
    (tmp_path / "helper.py").write_text("import tasks")
    (tmp_path / "tasks.py").write_text("MINE = True")
    runner = LocalRunner([sys.executable, str(tmp_path / "agent.py")], ["helper"])
    (result,) = await run_all(proxy, runner, [task(1)], RunOptions())
    assert result.exit_code == 0


def test_preload_needs_a_python_script() -> None:
    with pytest.raises(ConfigError, match=r"python script\.py"):
        LocalRunner(["node", "agent.js"], ["openai"])


def test_tasks_in_parquet_are_those_of_the_same_lines(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"question": "é?", "of": {"answer": [1]}}, {"question": "b", "of": {"answer": [2, 3]}}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, same = read_tasks(tmp_path / "tasks.parquet"), read_tasks(tmp_path / "tasks.jsonl")
    assert [task.task_id for task in found] == [task.task_id for task in same]
    assert [json.loads(task.line) for task in found] == rows
    (tmp_path / "broken.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"cannot read .*broken\.parquet"):
        read_tasks(tmp_path / "broken.parquet")
