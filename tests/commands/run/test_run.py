"""`run`: task files, programs, rollouts, rewards, failures and Ctrl-C against a real HTTP control API."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.api_client import ApiClient, ApiError
from lightning_proxy.commands.run.backlog import BacklogGate
from lightning_proxy.commands.run.programs import PreloadRunner, ProcessRunner, make_runner
from lightning_proxy.commands.run.run import RolloutResult, RunOptions, require_success, run_tasks
from lightning_proxy.commands.run.summary import summarize, totals
from lightning_proxy.commands.run.tasks import read_tasks
from lightning_proxy.proxy.errors import ConfigError, LightningError
from support.control_api import ControlApi
from support.running import Program, run_all, task

REWARDS_TEN_TIMES_X = """
import json, os, urllib.request
task = json.loads(os.environ["LIGHTNING_TASK"])
body = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": 10.0 * task["x"]}
request = urllib.request.Request(os.environ["LIGHTNING_URL"] + "/reward", json.dumps(body).encode())
urllib.request.urlopen(request).close()
"""


async def test_every_sibling_of_every_task_runs_in_a_rollout_of_its_own(
    proxy: ControlApi, tmp_path: Path, program: Program
) -> None:
    runner = program(tmp_path, REWARDS_TEN_TIMES_X)
    results = await run_all(proxy, runner, [task(1), task(2)], RunOptions(group_size=3, concurrency=4, mode="eval"))
    assert sorted(r.reward or 0 for r in results) == [10, 10, 10, 20, 20, 20]
    assert len({r.rollout_id for r in results}) == 6
    assert {r["mode"] for r in proxy.rollouts.values()} == {"eval"}
    assert {(r.task_id, r.reward) for r in results} == {("t1", 10), ("t2", 20)}


async def test_the_program_sees_the_environment_of_the_contract(
    proxy: ControlApi, tmp_path: Path, program: Program
) -> None:
    names = ["OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "LIGHTNING_ROLLOUT_ID"]
    names += ["LIGHTNING_TASK", "LIGHTNING_URL"]
    text = f"import os, sys; print(*[os.environ[n] for n in {names!r}], sys.argv[1], __name__, sep='|')"
    logs = tmp_path / "logs"
    await run_all(proxy, program(tmp_path, text, "extra"), [task(1)], RunOptions(logs=logs))
    seen = (logs / "r0.log").read_text().strip().split("|")
    base = f"{proxy.url}/rollouts/r0/v1"
    assert seen == [base, base, "k-r0", "r0", '{"x": 1}', proxy.url, "extra", "__main__"]


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("raise ValueError('bad luck')", 1, "exit code 1: ValueError: bad luck"),
        ("import sys; print('x', file=sys.stderr); sys.exit(3)", 3, "exit code 3: x"),
        ("raise SystemExit('gave up')", 1, "exit code 1: gave up"),
        ("import os; os.kill(os.getpid(), 9)", -9, "exit code -9: no output"),
    ],
)
async def test_a_program_that_fails_ends_its_rollout_as_failed(
    proxy: ControlApi, tmp_path: Path, program: Program, text: str, code: int, reason: str
) -> None:
    if program.kind == "kubernetes" and code < 0:  # as containers report a signal
        code, reason = 128 - code, reason.replace(str(code), str(128 - code))
    (result,) = await run_all(proxy, program(tmp_path, text), [task(1)], RunOptions())
    assert (result.exit_code, result.reason) == (code, reason)
    assert (proxy.rollouts["r0"]["status"], proxy.rollouts["r0"]["reason"]) == ("failed", reason)
    with pytest.raises(LightningError, match=f"every program failed, the first with {re.escape(reason)}"):
        require_success([result])


async def test_a_failure_after_the_reward_leaves_the_rollout_complete(
    proxy: ControlApi, tmp_path: Path, program: Program
) -> None:
    runner = program(tmp_path, REWARDS_TEN_TIMES_X + "\nraise SystemExit(2)")
    (result,) = await run_all(proxy, runner, [task(1)], RunOptions())
    assert result.failed
    assert proxy.rollouts["r0"]["status"] == "completed"


async def test_exit_0_without_a_reward_leaves_the_rollout_open_and_is_counted(
    proxy: ControlApi, tmp_path: Path, program: Program
) -> None:
    results = await run_all(proxy, program(tmp_path, "pass"), [task(1)], RunOptions(group_size=2))
    assert {r["status"] for r in proxy.rollouts.values()} == {"running"}
    assert totals(results).without_reward == 2


async def test_ctrl_c_ends_programs_and_discards_their_rollouts(
    proxy: ControlApi, tmp_path: Path, program: Program
) -> None:
    pids = tmp_path / "pids"
    text = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    running = asyncio.create_task(
        run_all(proxy, program(tmp_path, text), [task(1)], RunOptions(group_size=3, concurrency=2))
    )
    while not pids.exists() or pids.read_text().count("\n") < 2:
        await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [r["status"] for r in proxy.rollouts.values()] == ["discarded"] * 3
    for pid in pids.read_text().split():
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


async def test_a_program_that_cannot_be_started_fails_its_rollout(proxy: ControlApi, tmp_path: Path) -> None:
    script = tmp_path / "agent"
    script.write_text("no shebang, no format")
    script.chmod(0o755)
    (result,) = await run_all(proxy, ProcessRunner([str(script)]), [task(1)], RunOptions())
    assert (result.exit_code, "cannot be started" in (result.reason or "")) == (126, True)
    assert proxy.rollouts["r0"]["status"] == "failed"


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

    class Watched(BacklogGate):
        async def wait(self) -> None:
            open_at_gate.append(sum(r["status"] == "running" for r in proxy.rollouts.values()))

        def opened(self, rollout_ids: Iterable[str]) -> None:
            told.extend(f"{name} opened" for name in rollout_ids)

        def ended(self, rollout_id: str) -> None:
            told.append(f"{rollout_id} ended")

    async with ApiClient(proxy.url) as api:
        runner = Program("process")(tmp_path, REWARDS_TEN_TIMES_X)
        await run_tasks(api, [task(1), task(2), task(3)], runner, RunOptions(group_size=2), gate=Watched())
    assert open_at_gate == [0, 0, 0]
    assert sorted(told) == sorted(f"{name} {what}" for name in proxy.rollouts for what in ("opened", "ended"))


async def test_rollouts_whose_rewards_do_not_come_are_looked_at_seldom(proxy: ControlApi, tmp_path: Path) -> None:
    runner, seen = Program("process")(tmp_path, "pass"), list[str]()

    class Waiting(ApiClient):
        async def rollout(self, rollout_id: str) -> dict[str, Any]:
            seen.append(rollout_id)
            return await super().rollout(rollout_id) | {"awaits_reward": True}

    async with Waiting(proxy.url) as api:
        await run_tasks(api, [task(1)], runner, RunOptions(score_timeout_s=3.0))
    assert 3 < len(seen) < 8, "not five times a second"


async def test_a_proxy_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    async with ApiClient("http://127.0.0.1:9") as api:
        with pytest.raises(ApiError, match="no proxy answers at http://127.0.0.1:9; start it"):
            await run_tasks(api, [task(1)], ProcessRunner(["true"]), RunOptions(concurrency=2))


async def test_modules_that_cannot_be_imported_are_named(proxy: ControlApi, tmp_path: Path) -> None:
    runner = PreloadRunner([sys.executable, "agent.py"], ["no_such_module"])
    with pytest.raises(Exception, match="cannot import no_such_module"):
        await run_all(proxy, runner, [task(1)], RunOptions())


async def test_a_preloaded_module_finds_its_neighbours_and_none_of_ours(proxy: ControlApi, tmp_path: Path) -> None:
    """`tasks` is also the name of a module beside the preload server."""
    (tmp_path / "agent.py").write_text("import helper\nassert helper.tasks.MINE")
    (tmp_path / "helper.py").write_text("import tasks")
    (tmp_path / "tasks.py").write_text("MINE = True")
    runner = PreloadRunner([sys.executable, str(tmp_path / "agent.py")], ["helper"])
    (result,) = await run_all(proxy, runner, [task(1)], RunOptions())
    assert result.exit_code == 0


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no program '/nowhere/agent'"):
        make_runner(["/nowhere/agent", "x"])


def test_preload_needs_a_python_script() -> None:
    with pytest.raises(ConfigError, match=r"python script\.py"):
        make_runner(["node", "agent.js"], ["openai"])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[1]", "a task is a JSON object, got list"),
        ("{", "not JSON"),
        ('{"task_id": "a b"}', "task_id must be 1 to 200 characters"),
        ('{"task_id": true}', "task_id must be a string, got bool"),
    ],
)
def test_a_bad_task_is_named_by_file_and_line(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"ok": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match="tasks.jsonl:2: ") as caught:
        read_tasks(path)
    assert fault in caught.value.message


def test_a_task_without_an_id_is_named_by_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"a": 1, "b": 2}\n{"b": 2, "a": 1}\n{"a": 2}\n{"task_id": 7}\n')
    first, same, other, named = read_tasks(path)
    assert first.task_id == same.task_id != other.task_id
    assert named.task_id == "7"


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


def test_the_summary_holds_exact_numbers_by_task() -> None:
    results = [
        RolloutResult("r1", "t1", 0, None, 1.0),
        RolloutResult("r2", "t1", 0, None, 0.5),
        RolloutResult("r3", "t2", 1, "exit code 1: x", None),
    ]
    summary = summarize(results)
    assert summary["mean_reward"] == 0.75
    assert (summary["rollouts"], summary["failed"], summary["without_reward"]) == (3, 1, 1)
    assert summary["tasks"]["t1"]["rewards"] == [1.0, 0.5]  # type: ignore[index]
    assert summary["tasks"]["t2"]["failures"] == ["exit code 1: x"]  # type: ignore[index]
