"""`train --offline` as a process: what it reads, what it leaves alone, and that a killed run ends as any other."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import ConfigError, NotSaved
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.core.tools import tool_calls
from lightning_proxy.features.tune.data import prepare
from lightning_proxy.features.tune.offline import train_offline
from lightning_proxy.proxy.api.views import answer_in
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import TrainingSteps
from lightning_proxy.trainer.collect.collector import Collector
from lightning_proxy.trainer.plugins import Offline, check
from lightning_proxy.trainer.plugins import Run as Asked
from lightning_proxy.trainer.step.trainer import LightningTrainer
from support.models import VOCABULARY
from support.paths import TESTS
from support.sections import TrainerConfig, placed

KILLED = TESTS / "support" / "killed.py"
TASKS, SIBLINGS = 6, 4
EQUAL = "t0"  # the second step of the first epoch drops it
LIMIT = 500_000  # bytes: a checkpoint has more, the store less


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Last week's store: whole groups, one trained on before, one of equal rewards; a failed rollout, one that runs."""
    path = tmp_path_factory.mktemp("recorded") / "last-week.db"
    asyncio.run(_record(path))
    return path


async def _record(path: Path) -> None:
    source = random.Random(0)
    async with opened(StoreConfig(url=f"sqlite:///{path}")) as database:
        store = Store(database)
        async with Recorder(store, merged=False) as recorder:
            for task in range(TASKS):
                for sibling in range(SIBLINGS):
                    reward = 1.0 if f"t{task}" == EQUAL else float(sibling % 2)
                    await _rollout(recorder, store, f"t{task}", f"t{task}-{sibling}", reward, source)
            await _rollout(recorder, store, "t0", "failed", None, source)
            await store.rollouts.end("failed", "failed", None)
            await _rollout(recorder, store, "t0", "running", None, source)
        await database.checkpoint()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE rollouts SET step = 1 WHERE task_id = 't1'")
    connection.execute("INSERT INTO steps (step, status, base, created_at) VALUES (1, 'trained', 0, 1.0)")
    connection.commit()
    connection.close()


async def _rollout(
    recorder: Recorder, store: Store, task: str | None, name: str, reward: float | None, source: random.Random
) -> None:
    prompt: tuple[int, ...] = (0, 5, 6)
    for turn in range(2):
        call = f"{name}-{turn}"
        ids = tuple(source.randrange(2, VOCABULARY) for _ in range(4))
        request = {"messages": [{"role": "user", "content": f"{task} {turn}"}], "temperature": 0.7}
        rollout = RolloutName(name, task)
        await recorder.start(CallStart(call, rollout, "chat/completions", "policy", 3, request, time.time()))
        await recorder.end(CallEnd(call, name, "ok", {}, 200, prompt, (Choice(0, ids, (-3.0,) * 4, "stop"),)))
        prompt = (*prompt, *ids, 7, 8)
    if reward is not None:
        await store.rewards.post([Reward(name, 0.25 * reward, call_id=f"{name}-0", final=False)], None, b"")
        await store.rewards.post([Reward(name, reward)], None, b"")


class Run:
    """A directory with a configuration, in which the command is run."""

    def __init__(self, directory: Path, base: Path, **trainer: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.base, self.trainer = directory, base, trainer
        self.out = directory / "lightning-policy" / "offline"

    def settings(self) -> dict[str, Any]:
        trainer = {"group_size": SIBLINGS, "tasks_per_step": 2, "learning_rate": 0.02, "report_to": [], "threads": 1,
                   "keep_checkpoints": 2, "dtype": "float32", **self.trainer}  # fmt: skip
        return placed(policy={"model": str(self.base), "publish": "merged"}, trainer=trainer)

    def start(self, *arguments: str | Path, script: Path | None = None, **env: str) -> subprocess.Popen[str]:
        path = self.directory / "config.yaml"
        path.write_text(yaml.safe_dump(self.settings()))
        program = [str(script)] if script else ["-m", "lightning_proxy.cli"]
        return subprocess.Popen(
            [sys.executable, *program, "--config", str(path), "train", "--offline", *map(str, arguments)],
            cwd=self.directory, env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def train(self, *arguments: str | Path, script: Path | None = None, **env: str) -> tuple[int, str]:
        process = self.start(*arguments, script=script, **env)
        try:
            text, _ = process.communicate(timeout=200)
        finally:
            process.kill()
        return process.returncode, text

    def steps(self) -> dict[int, dict[str, Any]]:
        connection = sqlite3.connect(self.out / "store.db")
        rows = connection.execute("SELECT step, metrics FROM steps WHERE status = 'trained' ORDER BY step").fetchall()
        connection.close()
        return {step: json.loads(metrics) for step, metrics in rows}

    def losses(self) -> list[tuple[float, float, float]]:
        return [(m["loss"], m["grad_norm"], m["lr"]) for m in self.steps().values()]

    def state(self) -> dict[str, Any]:
        last = max(self.steps())
        found: dict[str, Any] = torch.load(self.out / "checkpoints" / str(last) / "state.pt", weights_only=True)
        return found


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def export(store: Path, target: Path) -> Path:
    environment = os.environ | {"LIGHTNING_STORE__URL": f"sqlite:///{store}"}
    command = [sys.executable, "-m", "lightning_proxy.cli", "export", str(target)]
    subprocess.run(command, check=True, env=environment, cwd=target.parent, capture_output=True)
    return target


@pytest.fixture(scope="module")
def whole(base: Path, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two epochs that nobody interrupted."""
    run = Run(tmp_path_factory.mktemp("whole"), base, lr_scheduler="linear", max_steps=10, lora_rank=128)
    before = files(recorded.parent)
    code, text = run.train("--data", recorded, "--epochs", "2")
    assert code == 0, text
    assert files(recorded.parent) == before, "the store was only to be read"
    said = (
        "step 1  reward",
        "epoch 1 of 2 is done after step 3",
        "epoch 2 of 2 is done after step 6",
        "vllm serve",
        "lightning-proxy up",
    )
    assert [one for one in said if one not in text] == [], text
    assert "promote best" not in text, "no version was published"
    yield run


async def test_a_store_on_a_server_has_to_be_made_a_file_first() -> None:
    config = Config.model_validate({"store": {"url": "postgresql://me:secret@h/db"}})
    with pytest.raises(ConfigError, match="store migrate postgresql://… sqlite:///copy.db`, and name it with --data"):
        await train_offline(config, Asked(), Offline(), asyncio.Event())


def test_every_group_is_trained_on_once_an_epoch_whatever_was_trained_on_before(whole: Run) -> None:
    steps = whole.steps()
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert [m["rollouts_trained"] / SIBLINGS for m in steps.values()] == [2, 1, 2, 2, 2, 1]
    assert steps[6]["epochs_done"] == 2
    assert max(abs(loss) for loss, _, _ in whole.losses()) > 0
    assert steps[1]["loss"] != steps[4]["loss"], "the second epoch goes on from the first"
    for file in ("adapter/adapter_model.safetensors", "adapter/COMPLETE", "model/config.json"):
        assert (whole.out / file).is_file()


@pytest.mark.long
def test_a_run_that_was_killed_gives_the_same_losses_and_weights(
    whole: Run, recorded: Path, base: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", base, **whole.trainer)
    arguments = ("--data", recorded, "--epochs", "2")
    for moment in ("save:3", "commit:2", "epoch:1"):  # each counted from the last kill on
        code, text = run.train(*arguments, script=KILLED, KILL_AT=moment)
        assert code == -signal.SIGKILL, text
    code, text = run.train(*arguments)
    assert code == 0, text
    assert run.losses() == whole.losses()
    _same(run.state(), whole.state())


def _same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _same(a[key], b[key])
    elif isinstance(a, list | tuple):
        for one, other in zip(a, b, strict=True):
            _same(one, other)
    else:
        assert a == b


@pytest.mark.long
def test_an_export_trains_to_the_same_weights_as_the_store(
    whole: Run, recorded: Path, base: Path, tmp_path: Path
) -> None:
    target = export(recorded, tmp_path / "week.jsonl")
    run = Run(tmp_path / "run", base, **whole.trainer)
    code, text = run.train("--data", target, "--epochs", "2")
    assert code == 0, text
    for (loss, norm, rate), (expected, expected_norm, expected_rate) in zip(run.losses(), whole.losses(), strict=True):
        assert (loss, norm, rate) == pytest.approx((expected, expected_norm, expected_rate), abs=1e-6)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["n"]}}}]


async def _tool_user(recorder: Recorder, store: Store, name: str, good: bool) -> None:
    """A rollout that calls a tool, is told what came of it, and answers; rewarded by two names, of calls as well."""
    made = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}' if good else "{}"}}
    asked: list[Any] = [{"role": "user", "content": "hi"}]
    called = {"role": "assistant", "content": None, "tool_calls": [made]}
    told = {"role": "tool", "tool_call_id": "t", "content": "3" if good else "Error: no such city"}
    answers = [(asked, called, "tool_calls"), ([*asked, called, told], {"role": "assistant", "content": "3"}, "length")]
    for i, (messages, message, finish) in enumerate(answers):
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}
        request = {"messages": messages, "tools": TOOLS}
        start = CallStart(f"{name}-{i}", RolloutName(name, "t"), "chat/completions", "policy", 3, request, time.time())
        await recorder.start(start)
        end = CallEnd(f"{name}-{i}", name, "ok", answer, 200, (0, i), (Choice(0, (4, 5), (-1.0, -1.0), finish),))
        await recorder.end(end._replace(tool_calls=tool_calls(answer)))
    style = Reward(name, 0.5 * good, f"{name}-1", name="style", final=False)
    score = Reward(name, 0.25 + 0.5 * good, f"{name}-0", name="judge", source="scripted", final=False)
    await store.rewards.post([style, score, Reward(name, 4.0 * good, name="style"), Reward(name, 1.0)], None, b"")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
async def test_an_export_holds_rewards_of_every_name_and_what_automatic_ones_are_for(
    tmp_path: Path, suffix: str
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    source = tmp_path / "week.db"
    async with opened(StoreConfig(url=f"sqlite:///{source}")) as database:
        async with Recorder(Store(database), merged=False) as recorder:
            for name in ("good", "bad"):
                await _tool_user(recorder, Store(database), name, name == "good")
        await database.checkpoint()
    settings = {"credit": "discounted", "baseline": "dr_grpo", "group_size": 2, "group_timeout_s": 1e-9}
    settings |= {
        "reward_weights": {"reward": 1.0, "style": 2.0, "judge": 8.0},
        "air": {"tool_error": -0.1, "bad_arguments": -0.1, "truncated": -0.1},
    }
    found = []
    for number, data in enumerate((source, export(source, tmp_path / f"week.{suffix}"))):
        async with opened(await prepare(data, tmp_path / str(number))) as database:
            collector = Collector(TrainerConfig.model_validate(settings), Store(database))
            batch = await collector.next_batch(0, fewer=True)
            calls = await Store(database).calls.of("good")
            said = [(answer_in(call.response), call.response["choices"][0]["finish_reason"]) for call in calls]
            assert batch is not None
            found.append((said, {s.call_ids[0]: s.advantages[-1] for s in batch.samples}))
    # Returns of the second call: 1 + 2 * (4 + 0.5) - 0.1 and 1 - 0.1; the first adds 8 * 0.75 and 8 * 0.25 - 2 * 0.1.
    assert found[0][1] == pytest.approx({"good-0": 6.6, "bad-0": -6.6, "good-1": 4.5, "bad-1": -4.5})
    assert found[1] == (found[0][0], pytest.approx(found[0][1]))


async def test_a_call_that_an_export_has_no_tokens_of_is_not_trainable(recorded: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in export(recorded, tmp_path / "week.jsonl").read_text().splitlines()]
    (tmp_path / "week.jsonl").write_text("\n".join(json.dumps(row | {"logprobs": None}) for row in rows))
    async with opened(await prepare(tmp_path / "week.jsonl", tmp_path / "out")) as database:
        (first, _) = await Store(database).calls.of("t1-1")
    assert first.untrainable_reason == "no token ids or log-probabilities in the export"


@pytest.mark.long
def test_more_epochs_go_on_where_the_last_one_ended(recorded: Path, base: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", base)
    for epochs, steps in ((1, 3), (2, 6), (2, 6)):
        code, text = run.train("--data", recorded, "--epochs", str(epochs))
        assert (code, len(run.steps())) == (0, steps), text


SFT = {"epochs": 12, "learning_rate": 0.02}


def test_the_command_tunes_and_says_how_it_goes(recorded: Path, base: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", base, sft=SFT | {"min_reward": 0.5})
    code, text = run.train("--data", recorded, "--method", "sft", "--epochs", "2")
    said = ("epoch 1 of 2: loss", "step 1", "sft loss", "the weights of step 1, as a LoRA adapter")
    assert (code, [one for one in said if one not in text]) == (0, []), text
    assert (run.out / "adapter" / "COMPLETE").is_file()


async def test_a_run_that_was_stopped_saves_the_weights_of_its_last_step_and_ends_no_epoch(
    recorded: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    run, stop, loop = Run(tmp_path / "run", base), asyncio.Event(), asyncio.get_running_loop()
    run.trainer["sft"] = {"epochs": 5, "learning_rate": 0.02}
    config, whole = Config.model_validate(run.settings()), LightningTrainer.save

    def full(self: LightningTrainer, directory: Path) -> None:
        if directory.name == "2":
            loop.call_soon_threadsafe(stop.set)
            raise NotSaved("the disk is full")
        whole(self, directory)

    def saved(step: int) -> bool:
        state = torch.load(run.out / "checkpoints" / str(step) / "state.pt", weights_only=True)
        found = load_file(run.out / "adapter" / "adapter_model.safetensors")
        return all(torch.equal(found[name], value) for name, value in state["adapters"]["default"].items())

    with monkeypatch.context() as broken:
        broken.setattr(LightningTrainer, "save", full)
        await train_offline(config, Asked(), Offline(recorded, run.out, 1), stop)
    assert list(run.steps()) == [1] and "epochs_done" not in run.steps()[1]
    assert saved(1)
    await train_offline(config, Asked("sft"), Offline(recorded, run.out), stop)  # in the middle of it
    assert list(run.steps()) == [1] and saved(1)
    await train_offline(config, Asked(), Offline(recorded, run.out, 1), asyncio.Event())
    assert list(run.steps()) == [1, 2, 3] and saved(3)


async def test_an_epoch_that_was_stopped_at_its_end_ends_also_after_a_run_of_sft(
    recorded: Path, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, stop = Run(tmp_path / "run", base), asyncio.Event()
    run.trainer["sft"] = {"epochs": 1}
    config = Config.model_validate(run.settings())
    whole = TrainingSteps.update_metrics

    async def told(self: TrainingSteps, step: int, metrics: dict[str, Any]) -> None:
        await whole(self, step, metrics)
        if step == 3:
            stop.set()

    with pytest.MonkeyPatch.context() as stopping:
        stopping.setattr(TrainingSteps, "update_metrics", told)
        await train_offline(config, Asked(), Offline(recorded, run.out, 1), stop)
    assert "epochs_done" not in run.steps()[3]
    await train_offline(config, Asked("sft"), Offline(recorded, run.out), asyncio.Event())
    await train_offline(config, Asked(), Offline(recorded, run.out, 2), asyncio.Event())
    assert "nothing in the data can be learned from" not in caplog.text
    assert {step: m["epochs_done"] for step, m in run.steps().items() if "epochs_done" in m} == {4: 1, 7: 2}


async def test_rollouts_without_a_task_that_are_not_trained_on_are_told_of(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = tmp_path / "live.db", tmp_path / "run" / "out"
    async with opened(StoreConfig(url=f"sqlite:///{source}")) as database:
        async with Recorder(Store(database), merged=False) as recorder:
            for i in range(3):
                await _rollout(recorder, Store(database), None, f"r{i}", float(i), random.Random(i))
        await database.checkpoint()
    config = Config.model_validate(Run(tmp_path / "run", base).settings())
    await train_offline(config, Asked(), Offline(source, out, 1), asyncio.Event())
    assert "nothing in the data can be learned from" in caplog.text
    assert "3 rollouts have no task: see trainer.lone_rollouts" in caplog.text


@pytest.mark.parametrize("exported", [False, True])
async def test_a_run_goes_on_with_the_data_that_it_began_with_and_says_so(
    recorded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, exported: bool
) -> None:
    caplog.set_level("INFO")
    store, out = tmp_path / "live.db", tmp_path / "out"
    store.write_bytes(recorded.read_bytes())
    source = export(store, tmp_path / "week.jsonl") if exported else store
    config = await prepare(source, out)
    before = config.path.read_bytes()
    source.unlink()
    assert await prepare(source, out) == config, "the original is not needed any more"
    assert "keeps the data that it began with; name another directory (--dir) for newer data" in caplog.text
    assert config.path.read_bytes() == before


@pytest.mark.parametrize("exported", [False, True])
async def test_what_is_published_after_a_run_has_a_number_that_no_recorded_call_has(
    recorded: Path, tmp_path: Path, exported: bool
) -> None:
    source = tmp_path / "last-week.db"
    source.write_bytes(recorded.read_bytes())
    with closing(sqlite3.connect(source)) as connection:
        for version in range(1, 4):  # the calls are of the last one
            row = (version, "ready", 1.0, str(tmp_path / "gone"))
            connection.execute("INSERT INTO policy_versions (version, status, created_at, path) VALUES (?,?,?,?)", row)
        connection.commit()
    config = await prepare(export(source, tmp_path / "week.jsonl") if exported else source, tmp_path / "out")
    async with opened(config) as database:
        store = Store(database)
        assert await store.versions.new("merged", 1, {}) == 4
        assert ((await store.versions.live()).version, (await store.versions.get(3)).path) == (0, None)
        assert {one.version for one in await store.rewards.since(0, 100)} == {3}
        assert await store.rewards.since(4, 100) == []


async def test_an_offline_runs_directory_is_of_one_store(recorded: Path, base: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", base)
    config = Config.model_validate(run.settings())
    offline = config.model_copy(update={"policy": config.policy.model_copy(update={"directory": run.out})})
    await prepare(recorded, run.out)
    with pytest.raises(ConfigError, match="holds an offline run: set store.url to sqlite:///"):
        check(offline, Asked())
    check(offline.model_copy(update={"store": StoreConfig(url=f"sqlite:///{run.out}/store.db")}), Asked())
    (tmp_path / "live" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds the checkpoints of another trainer"):
        await prepare(recorded, tmp_path / "live")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        ("{not json", "line 1 is not JSON"),
        ('{"messages": []}', "row 1: no rollout_id; what can be trained on is a store, or an export with --kind"),
    ],
)
async def test_data_that_cannot_be_trained_on_is_named(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=what):
        await prepare(tmp_path / "data.jsonl", tmp_path / "run")


@pytest.mark.long
def test_a_step_that_finds_the_disk_full_waits_for_space(
    whole: Run, recorded: Path, base: Path, tmp_path: Path
) -> None:
    """Files may not grow beyond a limit until the parent says so; PyTorch has an error of its own for it."""
    run = Run(tmp_path / "run", base, **whole.trainer)
    arguments = ("--data", recorded, "--epochs", "2")
    code, text = run.train(*arguments, script=KILLED, KILL_AT="step:2")
    assert code == -signal.SIGKILL, text
    process = run.start(*arguments)
    said = []
    try:
        assert process.stdout is not None
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
        for line in process.stdout:
            said.append(line)
            if "waits to be saved" in line:
                break
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        rest, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, "".join(said) + rest
    assert "step 2 waits to be saved" in said[-1] and "free some space" in said[-1], said[-1]
    assert run.losses() == whole.losses()
    _same(run.state(), whole.state())
