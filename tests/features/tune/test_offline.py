"""What is learned from a store or an export, and `train --offline` as a process.

What it reads and leaves alone, and that a killed run ends as any other.
"""

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
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from traffic.server import read as read_traffic
from transformers import PreTrainedTokenizerFast

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import ConfigError, NotSaved
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Limits, Reward, RolloutName
from lightning_proxy.core.tokens import GREEDY, MEDIA, NOT_FOLLOWED, NOT_THE_POLICY
from lightning_proxy.core.tools import tool_calls
from lightning_proxy.features.tune.data import prepare
from lightning_proxy.features.tune.lessons import Example, LessonReader, Lessons, NothingToLearn, as_lesson
from lightning_proxy.features.tune.offline import train_offline
from lightning_proxy.proxy.api.views import answer_in
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.collector import Collector
from lightning_proxy.trainer.plugins import Offline, check
from lightning_proxy.trainer.plugins import Run as Asked
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Sifted
from support.calls import call
from support.models import VOCABULARY
from support.paths import TESTS
from support.sections import TrainerConfig, placed

PROMPT = (0, 5, 6)
WORDS = ["<bos>", "<end>", "<unk>", "<user>", "<assistant>", "<tool>", "What", "is", "seven", "plus", "two", "nine",
         "please", "call", "add", "7", "2", "So"]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments.a }}{% endfor %} <end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer(template: str = TEMPLATE, end: str = "<end>") -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token=end, chat_template=template)


class Recorded:
    """A store to record rollouts in, and to read lessons from."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def rollout(
        self, name: str, task: str | None, reward: float | None, *answers: Sequence[int], mode: Any = "train",
        agents: Sequence[str | None] = (None,), reason: str | None = None, prompt: Sequence[int] = PROMPT,
        key_id: str | None = None,
    ) -> None:  # fmt: skip
        """A rollout that answers in turn with `answers`, by `agents` in turn; every turn adds two tokens of context."""
        ids = tuple(prompt)
        for turn, answer in enumerate(answers):
            who = RolloutName(name, task, agents[turn % len(agents)], mode, key_id)
            request = {"messages": [{"role": "user", "content": f"{task} {turn}"}], "temperature": 0.7}
            await self.call(f"{name}-{turn}", who, request, {}, ids, answer, untrainable_reason=reason)
            ids = (*ids, *answer, 7, 8)
        if reward is not None:
            await self.post(Reward(name, reward))

    async def of_another_model(self, name: str, messages: list[Any], message: Any, finish: str = "stop") -> None:
        request = {"model": "teacher", "messages": messages}
        response = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}
        await self.call(name, RolloutName(name), request, response, untrainable_reason=NOT_THE_POLICY)
        await self.post(Reward(name, 1.0))

    async def call(
        self, call_id: str, who: RolloutName, request: dict[str, Any], response: Any, prompt: tuple[int, ...] = (),
        answer: Sequence[int] = (), finish: str = "stop", **end: Any,
    ) -> None:  # fmt: skip
        """One recorded call. One without tokens is another model's."""
        start = CallStart(call_id, who, "chat/completions", "policy", 3 if answer else None, request, time.time())
        choices = (Choice(0, tuple(answer), (-3.0,) * len(answer), finish),) if answer else ()
        ended = CallEnd(call_id, who.rollout_id, "ok", response, 200, prompt, choices, tool_calls=tool_calls(response))
        async with Recorder(self.store, merged=False) as recorder:
            await recorder.start(start)
            await recorder.end(ended._replace(**end))

    async def post(self, *rewards: Reward) -> None:
        await self.store.rewards.post([*rewards], None, b"")

    async def read(
        self, method: str, among: Any = None, shown_by: Any = None, agents: Any = (), sift: Any = None, **own: Any
    ) -> Lessons:
        team = {"agents": agents} if agents else {}
        settings = TrainerConfig.model_validate({method: own, **team})
        trainer: Any = SimpleNamespace(settings=settings, tokenizer=shown_by, max_tokens=100, vocabulary=None)
        return await LessonReader(method, self.store, trainer, sift).read(among)

    async def learned(self, method: str, **options: Any) -> dict[str, list[int]]:
        """The sampled tokens of what becomes likelier, by rollout."""
        lessons = await self.read(method, **options)
        return {
            row.rollout_id: [*compress(row.token_ids, row.mask)] for row in (e.rows[0] for e in lessons.train if e.up)
        }


@pytest.fixture
async def r(tmp_path: Path) -> AsyncIterator[Recorded]:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        yield Recorded(Store(database))


def names(pairs: Sequence[Example]) -> set[tuple[str, ...]]:
    return {tuple(row.rollout_id for row in pair.rows) for pair in pairs}


async def test_sft_takes_the_best_of_each_task_and_no_copies(r: Recorded) -> None:
    for name, task, reward, token in (
        ("old", "t1", 1.0, 10), ("copy", "t1", 1.0, 10), ("better", "t1", 2.0, 11), ("third", "t1", 0.5, 12),
        ("wrong", "t2", 0.0, 13), ("lone", None, 0.1, 14), ("running", "t3", None, 16),
    ):  # fmt: skip
        await r.rollout(name, task, reward, (token,))
    await r.rollout("held", "t3", 1.0, (15,), mode="eval")
    assert await r.learned("sft", top=2) == {"better": [11], "copy": [10], "lone": [14]}
    assert await r.learned("sft", min_reward=1.0) == {"better": [11], "copy": [10]}
    everything = await r.read("sft", min_reward=0.0)
    assert len(everything.train) == everything.metrics["rollouts_trained"] == 5
    assert everything.metrics["rollouts"] == 6


async def test_dpo_pairs_siblings_with_rewards_that_differ(r: Recorded) -> None:
    for name, reward, token in (("best", 1.0, 9), ("good", 0.9, 10), ("poor", 0.2, 11), ("worst", 0.0, 12)):
        await r.rollout(name, "t1", reward, (token, 1))
    await r.rollout("alone", None, 5.0, (13, 1))
    pairs = await r.read("dpo", margin=0.5)
    two = {("best", "worst"), ("good", "worst")}
    assert names(pairs.train) == two | {("good", "poor"), ("best", "poor")} and pairs.metrics["pairs"] == 4
    assert names((await r.read("dpo", margin=0.5, pairs_per_task=2)).train) == two
    one = await r.read("dpo", margin=0.5, pairs_per_task=1)
    again = await r.read("dpo", one.rollout_ids, margin=0.5, pairs_per_task=1)
    assert names(one.train) == {("best", "worst")} and again.digest == one.digest != pairs.digest


async def test_dpo_makes_no_pairs_of_copies_other_prompts_tenants_or_answers_without_tokens(r: Recorded) -> None:
    await r.rollout("lucky", "t1", 1.0, (9, 1))
    await r.rollout("unlucky", "t1", 0.0, (9, 1))
    await r.rollout("elsewhere", "t1", 0.0, (10, 1), prompt=(0, 5, 7))
    await r.rollout("redacted", "t1", 0.0, (11, 1), reason="redacted")
    for name, reward in (("tenant", 1.0), ("another", 0.0)):
        _, key = await r.store.keys.create(name, "agent", Limits(), recording=True, scope="own")
        await r.store.rollouts.open([(RolloutName(name, "t2", key_id=key.key_id), f"hash of {name}")], {})
        await r.rollout(name, "t2", reward, (9 + int(reward), 1))
    with pytest.raises(NothingToLearn, match="1 calls without tokens to learn from, 1 pairs with different prompts"):
        await r.read("dpo")
    await r.rollout("other", "t1", 0.0, (12, 1))
    await r.rollout("again", "t1", 0.0, (12, 1))
    (pair,) = (await r.read("dpo")).train
    assert [row.token_ids for row in pair.rows] == [(*PROMPT, 9, 1), (*PROMPT, 12, 1)]


async def test_kto_takes_every_rewarded_rollout_up_or_down(r: Recorded) -> None:
    for name, task, reward in (("up", "t1", 1.0), ("down", "t2", 0.0), ("lone", None, 0.3)):
        await r.rollout(name, task, reward, (9, 1))
    for threshold, up in ((0.0, {"up", "lone"}), (0.5, {"up"})):
        assert {*await r.learned("kto", threshold=threshold)} == up
        metrics = (await r.read("kto", threshold=threshold)).metrics
        assert (metrics["thumbs_up"], metrics["thumbs_down"]) == (len(up), 3 - len(up))


async def test_a_rollout_that_awaits_its_reward_function_is_not_learned_from_yet(r: Recorded) -> None:
    await r.rollout("scored", "t1", 1.0, (10,))
    await r.store.rollouts.use_function("scoring.py:reward")
    await r.rollout("awaits", "t1", 1.0, (11,))
    assert {*await r.learned("sft")} == {"scored"}


async def test_whole_answers_of_trained_agents_are_learned_however_sampled_and_no_others(r: Recorded) -> None:
    await r.rollout("team", None, 1.0, (10,), (11,), (12,), agents=["writer", "checker"])
    for name, token, reason in (
        ("greedy", 13, GREEDY), ("forced", 14, NOT_FOLLOWED + "a thinking budget"), ("redacted", 15, "redacted"),
        ("seen", 16, MEDIA),
    ):  # fmt: skip
        await r.rollout(name, None, 1.0, (token,), reason=reason, agents=["writer"])
    assert await r.learned("sft", agents=["writer"]) == {"team": [10, 12], "greedy": [13], "forced": [14]}
    assert (await r.read("sft", agents=["writer"])).metrics["calls_of_others"] == 1


async def test_calls_that_are_sifted_out_or_pushed_down_are_no_lesson(r: Recorded) -> None:
    await r.rollout("a", None, 1.0, (10,), (11,), (12,))
    assert await r.learned("sft", sift=lambda calls: Sifted(calls, left_out={0}, negative={2})) == {"a": [11]}


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
async def test_tasks_are_held_out_whole_and_always_the_same(
    r: Recorded, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.features.tune.lessons.HELD_OUT", 0.3)
    for task in range(10):
        for sibling in range(2):
            await r.rollout(f"{task}-{sibling}", f"t{task}", float(sibling), (10 + sibling,))
    lessons, again = [await r.read(method) for _ in range(2)]
    tasks = [{row.task_id for one in part for row in one.rows} for part in (lessons.train, lessons.held_out)]
    assert [len(part) for part in tasks] == [7, 3] and not tasks[0] & tasks[1]
    assert lessons.digest == again.digest
    assert (lessons.metrics["groups_trained"], lessons.metrics["groups_held_out"]) == (7, 3)


async def test_rollouts_that_teach_nothing_are_an_error_that_says_why(r: Recorded) -> None:
    async def refused(method: str, said: str, **own: Any) -> None:
        with pytest.raises(NothingToLearn, match=said):
            await r.read(method, **own)

    await refused("sft", "0 rollouts of mode train are completed and have a reward; --method sft")
    await r.rollout("a", "t1", 0.0, (10,))
    await refused("kto", "--method kto needs two rows")
    await r.rollout("b", "t1", -2.0, (10,))
    await refused("sft", "2 rollouts .* reward .from -2 to 0.; .* above 0 .tune.sft")
    await refused("dpo", "siblings with rewards that differ by 3 or more .tune.dpo.margin", margin=3.0)
    await r.rollout("c", "t1", 1.0, (10,), reason="redacted")
    await refused("sft", "left out: 1 calls without tokens to learn from")


# Answers of other models ---------------------------------------------------------------------------------------------


def words(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


async def test_an_answer_of_another_model_is_what_it_adds_to_the_templates_prompt(r: Recorded) -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is seven plus two"}]}]
    add = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 7}'}}
    await r.of_another_model("a", asked, {"content": None, "tool_calls": [add]}, "tool_calls")
    await r.of_another_model("b", asked, {"content": "nine please"})
    await r.of_another_model("cut off", asked, {"content": "nine"}, "length")
    await r.of_another_model("odd", [{"role": "user"}, "odd"], {"content": "nine"})
    lessons = await r.read("sft", shown_by=tokenizer())
    assert await r.learned("sft", shown_by=tokenizer()) == {
        "a": words("call add 7 <end>"),
        "b": words("nine please <end>"),
        "cut off": words("nine"),
    }
    prompt = tuple(words("<user> What is seven plus two <end> <assistant>"))
    assert {one.rows[0].token_ids[:8] for one in lessons.train} == {prompt}
    assert lessons.metrics["calls_untokenised"] == 1
    forgetful = tokenizer(TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else 'So' }}"))
    with pytest.raises(NothingToLearn, match="4 calls of other models that the policy's chat template cannot"):
        await r.read("sft", shown_by=forgetful)


def test_what_real_frameworks_were_answered_can_be_learned_from() -> None:
    """All chats of tests/traffic, tool calls and results included, by the template of Qwen2.5."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    shown_by = tokenizer(template, "<|im_end|>")
    asked = [c for c in read_traffic().calls if c.path.endswith("chat/completions") and c.status == 200 and c.answer]
    foreign: Any = {"trainable": False, "untrainable_reason": NOT_THE_POLICY}
    calls = [call("c", request=c.body, response=c.answer, **foreign) for c in asked if len(c.answer["choices"]) == 1]
    assert len(calls) == 1990
    for lesson in (as_lesson(one, shown_by) for one in calls):
        assert lesson is not None and lesson.trainable
        assert lesson.response_token_ids.index(shown_by.eos_token_id) == len(lesson.response_token_ids) - 1 > 0


# Offline -------------------------------------------------------------------------------------------------------------

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

    def answers() -> list[tuple[int, ...]]:
        return [tuple(source.randrange(2, VOCABULARY) for _ in range(4)) for _ in range(2)]

    async with opened(StoreConfig(url=f"sqlite:///{path}")) as database:
        r = Recorded(Store(database))
        for task in range(TASKS):
            for sibling in range(SIBLINGS):
                reward = 1.0 if f"t{task}" == EQUAL else float(sibling % 2)
                await r.rollout(f"t{task}-{sibling}", f"t{task}", reward, *answers())
        for name in ("failed", "running"):
            await r.rollout(name, "t0", None, *answers())
        await r.store.rollouts.end("failed", "failed", None)
        await database.checkpoint()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE rollouts SET step = 1 WHERE task_id = 't1'")
        connection.execute("INSERT INTO steps (step, status, base, created_at) VALUES (1, 'trained', 0, 1.0)")
        connection.commit()


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
        with closing(sqlite3.connect(self.out / "store.db")) as store:
            rows = store.execute("SELECT step, metrics FROM steps WHERE status = 'trained' ORDER BY step").fetchall()
        return {step: json.loads(metrics) for step, metrics in rows}

    def state(self, step: int) -> Any:
        return torch.load(self.out / "checkpoints" / str(step) / "state.pt", weights_only=True)

    def outcome(self) -> Any:
        """What a run of the same seed must come to: its losses, and all that is in its last checkpoint."""
        losses = [(m["loss"], m["grad_norm"], m["lr"]) for m in self.steps().values()]
        return losses, plain(self.state(max(self.steps())))


def plain(value: Any) -> Any:
    """The value with lists in place of tensors."""
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def export(store: Path, target: Path) -> Path:
    environment = os.environ | {"LIGHTNING_STORE__URL": f"sqlite:///{store}"}
    command = [sys.executable, "-m", "lightning_proxy.cli", "export", str(target)]
    subprocess.run(command, check=True, env=environment, cwd=target.parent, capture_output=True)
    return target


@pytest.fixture(scope="module")
def whole(base: Path, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two epochs that nobody interrupted."""
    run = Run(tmp_path_factory.mktemp("whole"), base, lr_scheduler="linear", max_steps=10, lora_rank=128)
    before = files(recorded.parent)
    code, text = run.train("--data", recorded, "--epochs", "2")
    assert code == 0, text
    assert files(recorded.parent) == before, "the store was only to be read"
    said = ("step 1  reward", *(f"epoch {n} of 2 is done after step {3 * n}" for n in (1, 2)), "vllm serve")
    assert [one for one in (*said, "lightning-proxy up") if one not in text] == [], text
    assert "promote best" not in text, "no version was published"
    return run


async def test_a_store_on_a_server_has_to_be_made_a_file_first() -> None:
    config = Config.model_validate({"store": {"url": "postgresql://me:secret@h/db"}})
    with pytest.raises(ConfigError, match="store migrate postgresql://… sqlite:///copy.db`, and name it with --data"):
        await train_offline(config, Asked(), Offline(), asyncio.Event())


def test_every_group_is_trained_on_once_an_epoch_whatever_was_trained_on_before(whole: Run) -> None:
    steps = whole.steps()
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert [m["rollouts_trained"] / SIBLINGS for m in steps.values()] == [2, 1, 2, 2, 2, 1]
    assert steps[6]["epochs_done"] == 2
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
    for _ in range(2):  # a run that is done adds nothing
        code, text = run.train(*arguments)
        assert code == 0, text
        assert run.outcome() == whole.outcome()


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["n"]}}}]


async def _tool_user(r: Recorded, name: str, good: bool) -> None:
    """A rollout that calls a tool, is told what came of it, and answers; rewarded by two names, of calls as well."""
    made = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}' if good else "{}"}}
    asked: list[Any] = [{"role": "user", "content": "hi"}]
    called = {"role": "assistant", "content": None, "tool_calls": [made]}
    told = {"role": "tool", "tool_call_id": "t", "content": "3" if good else "Error: no such city"}
    said, end = {"role": "assistant", "content": "3"}, "length" if good else "stop"
    answers = [(asked, called, "tool_calls"), ([*asked, called, told], said, end)]
    for i, (messages, message, finish) in enumerate(answers):
        request = {"messages": messages, "tools": TOOLS}
        response = {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}
        await r.call(f"{name}-{i}", RolloutName(name, "t"), request, response, (0, i), (4, 5), finish)
    style = Reward(name, 0.5 * good, f"{name}-1", name="style", final=False)
    score = Reward(name, 0.25 + 0.5 * good, f"{name}-0", name="judge", source="scripted", final=False)
    await r.post(style, score, Reward(name, 4.0 * good, name="style"), Reward(name, 1.0))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
async def test_an_export_holds_rewards_of_every_name_and_what_automatic_ones_are_for(
    r: Recorded, tmp_path: Path, suffix: str
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    for name in ("good", "bad"):
        await _tool_user(r, name, name == "good")
    settings = {
        "credit": "discounted", "baseline": "dr_grpo", "group_size": 2, "group_timeout_s": 1e-9,
        "reward_weights": {"reward": 1.0, "style": 2.0, "judge": 8.0},
        "air": {"tool_error": -0.1, "bad_arguments": -0.1, "truncated": -0.1},
    }  # fmt: skip
    source, found = tmp_path / "store.db", []
    for number, data in enumerate((source, export(source, tmp_path / f"week.{suffix}"))):
        async with opened(await prepare(data, tmp_path / str(number))) as database:
            batch = await Collector(TrainerConfig.model_validate(settings), Store(database)).next_batch(0, fewer=True)
            calls = await Store(database).calls.of("good")
        assert batch is not None
        ends = [(call.finish_reason, call.response["choices"][0]["finish_reason"]) for call in calls]
        said = [answer_in(call.response) for call in calls]
        found.append((said, ends, {one.call_ids: one for one in batch.samples}))
    assert found[0] == found[1]


async def test_a_call_that_an_export_has_no_tokens_of_is_not_trainable(recorded: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in export(recorded, tmp_path / "week.jsonl").read_text().splitlines()]
    (tmp_path / "week.jsonl").write_text("\n".join(json.dumps(row | {"logprobs": None}) for row in rows))
    async with opened(await prepare(tmp_path / "week.jsonl", tmp_path / "out")) as database:
        (first, _) = await Store(database).calls.of("t1-1")
    assert first.untrainable_reason == "no token ids or log-probabilities in the export"


@pytest.mark.parametrize(
    ("weights", "served"),
    [("lora", "the weights of step 1 as a LoRA adapter"), ("full", "/model --served-model-name policy")],
)
def test_the_command_tunes_and_says_how_it_goes(
    recorded: Path, base: Path, tmp_path: Path, weights: str, served: str
) -> None:
    run = Run(tmp_path / "run", base, sft={"learning_rate": 0.02, "min_reward": 0.5}, weights=weights)
    data = export(recorded, tmp_path / "week.jsonl") if weights == "full" else recorded
    code, text = run.train("--data", data, "--method", "sft", "--epochs", "2")
    said = ("epoch 1 of 2: loss", "step 1", "sft loss", served)
    assert (code, [one for one in said if one not in text]) == (0, []), text
    assert (run.out / "adapter" / "COMPLETE").is_file() == ("adapter" in text) == (weights == "lora")
    before, after = (load_file(model / "model.safetensors") for model in (base, run.out / "model"))
    assert before.keys() == after.keys() and not all(torch.equal(after[name], value) for name, value in before.items())


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
        found = load_file(run.out / "adapter" / "adapter_model.safetensors")
        return all(torch.equal(found[name], value) for name, value in run.state(step)["adapters"]["default"].items())

    with monkeypatch.context() as broken:
        broken.setattr(LightningTrainer, "save", full)
        await train_offline(config, Asked(), Offline(recorded, run.out, 1), stop)
    assert list(run.steps()) == [1] and "epochs_done" not in run.steps()[1]
    assert saved(1)
    await train_offline(config, Asked("sft"), Offline(recorded, run.out), stop)  # in the middle of it
    assert list(run.steps()) == [1] and saved(1)
    await train_offline(config, Asked(), Offline(recorded, run.out, 1), asyncio.Event())
    assert list(run.steps()) == [1, 2, 3] and saved(3)
    await train_offline(config, Asked("sft"), Offline(recorded, run.out), asyncio.Event())
    await train_offline(config, Asked(), Offline(recorded, run.out, 2), asyncio.Event())
    assert {step: m["epochs_done"] for step, m in run.steps().items() if "epochs_done" in m} == {3: 1, 7: 2}


async def test_rollouts_without_a_task_that_are_not_trained_on_are_told_of(
    r: Recorded, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(3):
        await r.rollout(f"r{i}", None, float(i), (9, 9 + i))
    config = Config.model_validate(Run(tmp_path / "run", base).settings())
    await train_offline(config, Asked(), Offline(tmp_path / "store.db", tmp_path / "out", 1), asyncio.Event())
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
        ('{"messages": []}', "line 1 has no rollout_id; only a store, or an export with --kind transitions, can"),
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
    assert run.outcome() == whole.outcome()
