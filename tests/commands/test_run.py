"""`run` against a control API: its patience, what it preloads, a server that dies, and bounded, redacted logs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightning_proxy.commands.api_client import ApiClient, ApiError
from lightning_proxy.commands.run.output import ProgramLog, redaction
from lightning_proxy.commands.run.run import RunOptions
from lightning_proxy.commands.run.runner import LocalRunner, runner_for
from lightning_proxy.commands.run.tasks import read_tasks
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, LightningError
from support.control_api import ControlApi, run_all, served, task


@pytest.fixture
async def proxy() -> AsyncIterator[ControlApi]:
    async with served() as api:
        yield api


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


KILLS_ITS_SERVER = """
import json, os, psutil, time
if json.loads(os.environ["LIGHTNING_TASK"])["x"] == 1:
    names = {one: {*map(os.path.basename, one.cmdline())} for one in psutil.Process().parents()}
    [one for one in names if names[one] & {"fork_server.py", "preload.py"}][-1].kill()  # guards are forks of it
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
    assert said == [f"{why}. 1 programs failed; the server is started again"]


async def test_a_preloaded_module_finds_its_neighbours_and_none_of_ours(proxy: ControlApi, tmp_path: Path) -> None:
    """`tasks` is also the name of a module beside the preload server."""
    (tmp_path / "agent.py").write_text("import helper\nassert helper.tasks.MINE")
    (tmp_path / "helper.py").write_text("import tasks")
    (tmp_path / "tasks.py").write_text("MINE = True")
    command = [sys.executable, str(tmp_path / "agent.py")]
    (result,) = await run_all(proxy, LocalRunner(command, ["helper"]), [task(1)], RunOptions())
    assert result.exit_code == 0
    why = "cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.raises(LightningError, match=why):
        await run_all(proxy, LocalRunner(command, ["no_such_module"]), [task(1)], RunOptions())
    with pytest.raises(ConfigError, match=r"python script\.py"):
        LocalRunner(["node", "agent.js"], ["openai"])


def test_tasks_in_parquet_are_those_of_the_same_lines(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"question": "é?", "of": {"answer": [1]}}, {"question": "b", "of": {"answer": [2, 3]}}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    same = read_tasks(tmp_path / "tasks.jsonl")
    found = [(task.task_id, json.loads(task.line)) for task in read_tasks(tmp_path / "tasks.parquet")]
    assert found == [(task.task_id, row) for task, row in zip(same, rows, strict=True)]
    (tmp_path / "broken.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"cannot read .*broken\.parquet"):
        read_tasks(tmp_path / "broken.parquet")


SECRET = "sk-" + "A1b2C3d4" * 4
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEabc\n-----END PRIVATE KEY-----"
TEXT = f"""
import sys
print("begins", flush=True)
print("key", {SECRET!r})
print({KEY!r})
sys.stdout.write("x" * 300_000 + "\\n")
sys.stderr.write("ends with {SECRET}")
sys.exit(3)
"""
REDACTS = Config.model_validate({"recording": {"redact": {"secrets": True}}})


@pytest.mark.parametrize("preload", [[], ["json"]], ids=["process", "preload"])
async def test_a_log_has_no_secret(proxy: ControlApi, tmp_path: Path, preload: list[str]) -> None:
    (tmp_path / "agent.py").write_text(TEXT)
    runner = runner_for(REDACTS, [sys.executable, str(tmp_path / "agent.py")], preload, print)
    (result,) = await run_all(proxy, runner, [task(1)], RunOptions(logs=tmp_path / "logs"))
    log = tmp_path / "logs" / "r0.log"
    text = log.read_text()
    assert text.startswith("begins\nkey [redacted]\n[redacted]\n") and text.endswith("ends with [redacted]")
    assert result.reason == "exit code 3: ends with [redacted]"
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("most", [200, 1000, 10_000])
def test_what_is_kept_is_the_beginning_and_the_end(tmp_path: Path, size: int, most: int) -> None:
    log = ProgramLog(tmp_path / "log", most=most)
    said = b"".join(b"%d\n" % n for n in range(5000))
    for at in range(0, len(said), size):
        log.write(said[at : at + size])
    log.close()
    kept = (tmp_path / "log").read_bytes()
    found = re.fullmatch(rb"(?s)(.*)\n\[(\d+) bytes left out\]\n(.*)", kept)
    assert found and len(kept) <= most
    before, left_out, after = found.groups()
    assert before + said[len(before) :][: int(left_out)] + after == said


def test_a_short_log_is_there_at_once_and_a_key_that_comes_in_pieces_is_taken_out_whole(tmp_path: Path) -> None:
    log = ProgramLog(tmp_path / "log", redaction(REDACTS))
    log.write(b"begins\nand ")
    assert (tmp_path / "log").read_bytes() == b"begins\n"
    for piece in KEY.splitlines(keepends=True):
        log.write(piece.encode())
    log.write(b"\nafter \xff")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"begins\nand [redacted]\nafter \xff"
