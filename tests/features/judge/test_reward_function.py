"""A user's function gives completed rollouts their reward, also with `rescore`: real processes, proxy and store."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from lightning_proxy.core.records import Event, Reward
from lightning_proxy.features.judge.scoring import Spoken
from lightning_proxy.store.calls import Events
from support.command_line import lightning
from support.judging import completed, given, until, values
from support.paths import ROOT
from support.served import Client, proxy_in_front

Logged = pytest.LogCaptureFixture


def written(directory: Path, body: str, name: str = "reward") -> str:
    """A file with a function of this body; returns it as `rewards.function` names it."""
    file = directory / "scoring.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    file.write_text(f"import os\nimport time\n\n\ndef {name}(rollout):\n{lines}\n")
    return f"{file}:{name}"


@pytest.fixture
def scored(start: Any, tmp_path: Path) -> Any:
    """A proxy with a function of this body."""
    return lambda body, name="reward", **more: start(rewards={"function": written(tmp_path, body, name), **more})


async def test_a_completed_rollout_gets_what_the_function_returns(scored: Any) -> None:
    """A number has the function's name; a dict has several; None is not a reward. What it prints is for the log."""
    body = """
import asyncio, numpy
print('{"values": {}}', flush=True)
async def later():
    await asyncio.sleep(0)
    return 0.25
answer = rollout['calls'][0]['response']['choices'][0]['message']['content']
return {
    'number': len(rollout['calls']) + len(answer), 'dict': {'reward': True, 'short': 0.5}, 'none': None,
    'bool': numpy.array(1) == 1, 'scalar': numpy.float32(1), 'async': later(),
}[rollout['rollout_id']]"""
    expected = {"number": {"reward": 5.0}, "dict": {"reward": 1.0, "short": 0.5}, "none": {}}
    expected |= {"bool": {"reward": 1.0}, "scalar": {"reward": 1.0}, "async": {"reward": 0.25}}
    async with scored(body) as system:
        for name, worth in expected.items():
            await completed(system, name, "four")
            found = await given(system, name)
            assert {r["name"]: r["reward"] for r in found} == worth
            assert not found or re.fullmatch("function:reward@[0-9a-f]{12}", found[0]["source"])
        assert (await system.get("/rollouts/number"))["reward"] == 5.0
        async with system.store() as store:  # it has spoken: a second answer is none
            spoken = Spoken(store.database, ["reward"])
            assert await spoken.record("reward", {"number": [Reward("number", 9.0)]}) == []
        for status in ("failed", "discarded"):
            await system.chat(status)
            await system.post(f"/rollouts/{status}/end", {"status": status})
            assert await given(system, status) == [], "it is not asked about"


async def test_a_reader_sees_the_reward_of_a_rollout_that_awaits_none(
    scored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function's answer comes between two reads of one `GET /rollouts/{id}`."""
    reads, asked = Events.of, tmp_path / "asked"

    async def of(events: Events, rollout_id: str) -> list[Event]:
        async with system.store() as store:
            await Spoken(store.database, ["reward"]).record("reward", {rollout_id: [Reward(rollout_id, 0.5)]})
        return await reads(events, rollout_id)

    async with scored(f"open({str(asked)!r}, 'w').close()\ntime.sleep(60)") as system:
        await completed(system, "r")
        await until(asked.exists)
        with monkeypatch.context() as patched:
            patched.setattr(Events, "of", of)
            during = await system.get("/rollouts/r")
        after = await system.get("/rollouts/r")
    assert [(seen["awaits_reward"], len(seen["rewards"])) for seen in (during, after)] == [(True, 0), (False, 1)]


FAULTS = {
    "1 / 0": "ZeroDivisionError: division by zero (scoring.py:8)",
    "sys.exit(3)": "SystemExit: 3 (scoring.py:8)",
    "os._exit(7)": "the function's process ended (exit code 7)",
    "time.sleep(60)": "no answer within 0.5 s",
    "'much'": "'much' is not a finite number; return one, a dict of them or None",
    "float('nan')": "nan is not a finite number",
    "{1: 0.5}": "1 is not a reward name",
    "{'style': 1.0, 'reward': -1e300}": "reward: -1e+300 is outside of rewards.range, -10000 to 10000",
}


async def test_a_fault_of_the_function_is_a_line_in_the_log_and_no_reward(scored: Any, caplog: Logged) -> None:
    body = f"import sys\nwhich = int(rollout['rollout_id'])\nreturn eval({[*FAULTS, '1.0']!r}[which])"
    async with scored(body, timeout_s=0.5) as system:
        for i in range(len(FAULTS) + 1):
            await completed(system, str(i))
            assert [r["reward"] for r in await given(system, str(i))] == ([1.0] if i == len(FAULTS) else [])
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "rewards." in r.getMessage()]
    for i, (line, said) in enumerate(zip(lines, FAULTS.values(), strict=True)):
        assert line.startswith(f"rewards.function: no reward for rollout {i}: ") and said in line and "\n" not in line


@pytest.mark.parametrize("how", ["late", "proxy ends"])
async def test_what_the_function_starts_ends_with_it_and_sees_none_of_our_keys(
    scored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also in a session of its own with a parent that has ended."""
    monkeypatch.setenv("LIGHTNING_PROXY__ADMIN_KEYS", "[SECRET-SECRET-SECRET]")
    pid, waits = tmp_path / "pid", "time.sleep(60)\n" if how == "late" else ""
    body = f"os.system('setsid sleep 1000 >/dev/null 2>&1 & echo $! > {pid}')\n{waits}"
    body += "return float('SECRET' in str(os.environ))"

    def is_gone() -> bool:
        status = Path("/proc", pid.read_text().strip(), "status")
        return not status.exists() or "\nState:\tZ" in status.read_text()

    async with scored(body, timeout_s=3) as system:
        await completed(system, "r")
        assert await values(system, ["r"]) == [None if how == "late" else 0.0]
        if how == "late":
            await until(is_gone)
    await until(is_gone)


async def test_a_changed_file_is_another_version_and_a_broken_one_is_waited_for(
    scored: Any, tmp_path: Path, caplog: Logged
) -> None:
    async with scored("return 1.0") as system:
        await completed(system, "r1")
        (first,) = await given(system, "r1")
        written(tmp_path, "return (")
        await completed(system, "r2")
        await until(lambda: "SyntaxError" in caplog.text)
        written(tmp_path, "return 2.25")
        (second,) = await given(system, "r2")
    assert (first["reward"], second["reward"]) == (1.0, 2.25)
    assert first["source"] != second["source"]
    assert caplog.text.count("rollouts wait for it") == 1


async def test_a_name_that_does_not_count_in_training_is_told_of_once(scored: Any, caplog: Logged) -> None:
    async with scored("return 1.0", name="exact") as system:
        for name in ("r1", "r2"):
            await completed(system, name)
            assert await given(system, name)
    assert caplog.text.count("exact does not count in training, only reward does") == 1


async def test_without_the_function_nothing_waits_for_it_any_more(scored: Any, start: Any) -> None:
    async with scored("time.sleep(60)") as system, system.store() as store:
        await completed(system, "r")
        assert await store.rollouts.awaiting(["r", "s"]) == {"r"}
    async with start() as system, system.store() as store:
        assert not await store.rollouts.awaiting(["r"])
        await completed(system, "s")
        assert not await store.rollouts.awaiting(["s"])


async def test_a_killed_proxy_forgets_no_rollout_and_gives_none_two_rewards(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy:
        proxy.set("rewards", function=written(tmp_path, "time.sleep(0.02)\nreturn 1.0", name="scored"))
        proxy.set("proxy", workers=2)
        await proxy.start()
        async with aiohttp.ClientSession() as session:
            client = Client(proxy)
            await asyncio.gather(*(client.turn(session, f"r{i}", stream=False) for i in range(60)))
        await proxy.end(signal.SIGKILL)
        await proxy.start()
        await until(lambda: proxy.rows("SELECT COUNT(*) FROM awaiting_rewards") == [(0,)])
        counts = proxy.rows("SELECT COUNT(*) FROM rewards WHERE name = 'scored' GROUP BY rollout_id")
        assert counts == [(1,)] * 60
        await proxy.end(signal.SIGTERM)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nowhere.py:reward", "nowhere.py (No such file or directory)"),
        ("scoring.py:rewrad", "LookupError: the file has no function rewrad"),
        ("broken.py:reward", "ModuleNotFoundError: No module named 'no_such_module' (broken.py:1)"),
        ("scoring.py", "a file and a function in it are needed, as in scoring.py:reward, got"),
    ],
)
def test_a_function_that_is_not_there_is_a_clear_error_at_the_start(tmp_path: Path, function: str, said: str) -> None:
    written(tmp_path, "return 1.0")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    config = tmp_path / "config.yaml"
    settings = {"store": {"url": f"sqlite:///{tmp_path}/store.db"}, "rewards": {"function": f"{tmp_path}/{function}"}}
    config.write_text(yaml.safe_dump(settings))
    done = lightning("--config", config, "serve")
    assert done.returncode == 2
    assert "rewards.function: " in done.stderr and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_the_example_of_the_documents_works(start: Any, tmp_path: Path) -> None:
    """The file of docs/rewards.md, as it stands there."""
    document = (ROOT / "docs" / "rewards.md").read_text()
    (example,) = re.findall(r"```python\n(# scoring\.py\n.*?)```", document, re.DOTALL)
    (tmp_path / "scoring.py").write_text(example)
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "add-5-2", "answer": "7"}\n')
    async with start(rewards={"function": f"{tmp_path}/scoring.py:reward"}) as system:
        for name, text in (("r1", " 7"), ("r2", "It is 7, of course"), ("r3", "8")):
            await completed(system, name, text, X_Task_Id="add-5-2")
        await completed(system, "of-no-task")
        assert await values(system, ["r1", "r2", "r3", "of-no-task"]) == [1.0, 0.1, 0.0, None]


# `rescore`


async def rescored(system: Any, directory: Path, body: str, *options: str) -> Any:
    return (await system.lightning("rescore", "--reward", written(directory, body), "--json", *options)).json


async def recorded(system: Any, **headers: str) -> None:
    """The completed rollouts `a` and `b` of one call each, with a reward."""
    for rollout_id in "ab":
        await system.chat(rollout_id, **headers)
        await system.post("/reward", {"rollout_id": rollout_id, "reward": 0.25})


async def test_the_new_value_stands_beside_the_old_one_with_the_functions_name_and_version(
    tmp_path: Path, start: Any
) -> None:
    body = "assert rollout['calls'][0]['response']\nreturn {'a': 1, 'b': 0.25}[rollout['rollout_id']]"
    async with start() as system:
        await recorded(system)
        done = await system.lightning("rescore", "--reward", written(tmp_path, body))
        assert done.returncode == 0, done.stderr
        assert "2 rollouts asked about, 0 failed, 0 without a reward, 0 scored by this version before" in done.stdout
        assert "reward: mean 0.625" in done.stdout
        old, new = await given(system, "a")
        assert (old["reward"], new["name"], new["reward"]) == (0.25, "reward", 1.0)
        assert new["source"].startswith("function:reward@")
        assert [r["reward"] for r in (await system.get("/rollouts"))["data"]] == [0.25, 1.0]
        told = await rescored(system, tmp_path, body)
        assert (told["asked"], told["scored_before"]) == (0, 2), "a version is asked once"
        assert (await rescored(system, tmp_path, body, "--again"))["asked"] == 2
        assert [one["reward"] for one in await given(system, "a")] == [0.25, 1.0, 1.0]


async def test_a_rollout_that_it_fails_for_is_named_and_can_be_asked_about_alone(tmp_path: Path, start: Any) -> None:
    async with start() as system:
        await recorded(system)
        fails = written(tmp_path, "return {'a': 1}[rollout['rollout_id']]")
        done = await system.lightning("rescore", "--reward", fails)
        assert done.returncode == 1 and "no reward for rollout b: KeyError: 'b' (scoring.py:6)" in done.stderr
        assert await values(system, ["a", "b"]) == [1.0, 0.25]
        told = await rescored(system, tmp_path, "return 0", "b")
        assert (told["asked"], told["means"]) == (1, {"reward": 0.0})
        assert await values(system, ["a", "b"]) == [1.0, 0.0]


async def test_the_group_is_offered_to_the_trainer_again_once_all_of_it_is_scored(tmp_path: Path, start: Any) -> None:
    async with start() as system:
        await recorded(system, X_Task_ID="t")
        async with system.store() as store:
            await store.database.execute("UPDATE rollouts SET step = 1")
        for options, step in (((), 1), (("--again", "--retrain"), None)):
            await rescored(system, tmp_path, "return 1", *options)
            assert [r["step"] for r in (await system.get("/rollouts"))["data"]] == [step, step]


async def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, start: Any) -> None:
    async with start() as system:
        for asked, said in (
            (["--reward", "gone.py:reward"], "cannot read"),
            (["--reward", written(tmp_path, "return 1"), "nobody"], "no rollout 'nobody'"),
            ([], "--reward FILE.py:NAME"),
        ):
            done = await system.lightning("rescore", *asked)
            assert done.returncode in (1, 2) and done.stdout == ""
            assert said in done.stderr and done.stderr.count("\n") == 1
