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
from lightning_proxy.commands.run.programs import LocalRunner
from lightning_proxy.commands.run.run import RolloutResult, RunOptions, require_success, run_tasks
from lightning_proxy.commands.run.summary import summarize, totals
from lightning_proxy.commands.run.tasks import Task, read_tasks
from lightning_proxy.proxy.errors import ConfigError, LightningError
from support.control_api import ControlApi
from support.paths import ROOT
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
    names += ["LIGHTNING_TASK", "LIGHTNING_URL", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"]
    text = f"import os, sys; print(*[os.environ[n] for n in {names!r}], sys.argv[1], __name__, sep='|')"
    logs = tmp_path / "logs"
    await run_all(proxy, program(tmp_path, text, "extra"), [task(1)], RunOptions(logs=logs))
    seen = (logs / "r0.log").read_text().strip().split("|")
    base = f"{proxy.url}/rollouts/r0"
    ours = [f"{base}/v1", f"{base}/v1", "k-r0", "r0", '{"x": 1}', proxy.url, base, "k-r0"]
    assert seen == [*ours, "extra", "__main__"]


@pytest.mark.parametrize("size", [10, 200_000])
async def test_a_task_is_in_a_file_and_also_in_a_variable_if_one_can_be_so_long(
    proxy: ControlApi, tmp_path: Path, program: Program, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the program starts gets it, too, and the client reads either."""
    for stale in ("LIGHTNING_TASK", "LIGHTNING_TASK_FILE", "LIGHTNING_ROLLOUT_ID", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(stale, "{}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT.parent))
    seen = tmp_path / "seen"
    child = f"""
import json, os
from lightning_proxy import client
with open(os.environ["LIGHTNING_TASK_FILE"]) as file:
    task = json.load(file)
assert task == client.task() == {{"x": "\u00e9" * {size}}}
assert ("LIGHTNING_TASK" in os.environ) == ({size} < 1000)
assert os.stat(file.name).st_mode & 0o077 == 0 or os.stat(os.path.dirname(file.name)).st_mode & 0o077 == 0
assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
open({str(seen)!r}, "w").write(file.name)
"""
    (tmp_path / "child.py").write_text(child)
    text = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(tmp_path / 'child.py')!r}]))"
    line = json.dumps({"x": "\u00e9" * size}, ensure_ascii=False)
    (result,) = await run_all(proxy, program(tmp_path, text), [Task("long", line)], RunOptions())
    assert result.reason is None
    assert not Path(seen.read_text()).exists()


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
    (result,) = await run_all(proxy, LocalRunner([str(script)]), [task(1)], RunOptions())
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
            await run_tasks(api, [task(1)], LocalRunner(["true"]), RunOptions(concurrency=2))


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
    (tmp_path / "agent_module.py").write_text("import sys\nprint('imported', file=sys.stderr)")
    runner = LocalRunner([sys.executable, str(tmp_path / "agent.py")], modules, say=said.append)
    results = await run_all(proxy, runner, [task(n) for n in (0, 1, 2)], RunOptions(concurrency=1))
    name, last = ("preload", "imported") if modules else ("fork", "no output")
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


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no program '/nowhere/agent'"):
        LocalRunner(["/nowhere/agent", "x"])


def test_preload_needs_a_python_script() -> None:
    with pytest.raises(ConfigError, match=r"python script\.py"):
        LocalRunner(["node", "agent.js"], ["openai"])


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
