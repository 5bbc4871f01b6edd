"""Supervised fine-tuning: which rollouts it learns from, which tokens, what it computes, and that it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from traffic.recording import read
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import LightningError, StoreUnavailable
from lightning_proxy.core.records import CallEnd, CallStart, Choice, ModelCall, Reward, RolloutName
from lightning_proxy.core.tokens import GREEDY, MEDIA, NOT_FOLLOWED, NOT_THE_POLICY
from lightning_proxy.features.judge.table import Spoken
from lightning_proxy.features.tune.lessons import NothingToLearn
from lightning_proxy.features.tune.run import TuningRun, tune
from lightning_proxy.features.tune.sft import IGNORED, SFT, TraceReader, Traces, as_trace, dataset, mean_loss
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.loop import TrainingLoop
from lightning_proxy.trainer.plugins import Run as Asked
from lightning_proxy.trainer.plugins import TrainerCore
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Sample
from support.calls import call
from support.paths import TESTS
from support.sections import PolicyConfig, TrainerConfig, placed

KILLED = TESTS / "support" / "killed.py"
PROMPT = (0, 5, 6)
WORDS = ["<bos>", "<end>", "<unk>", "<user>", "<assistant>", "<tool>", "What", "is", "seven", "plus", "two", "nine",
         "please", "call", "add", "7", "2", "So"]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments.a }}{% endfor %} <end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )


class Recorded:
    """A store to record rollouts in."""

    def __init__(self, database: Any) -> None:
        self.store = Store(database)

    async def rollout(
        self, name: str, reward: float | None, *answers: Sequence[int], task: str | None = None, mode: Any = "train",
        agents: Sequence[str | None] = (None,), reason: str | None = None, temperature: float | None = None,
    ) -> None:  # fmt: skip
        """A rollout whose turns answer with `answers`, by `agents` in turn; every turn adds two tokens of context."""
        prompt = PROMPT
        async with Recorder(self.store, merged=False) as recorder:
            for turn, answer in enumerate(answers):
                call, who = f"{name}-{turn}", RolloutName(name, task, agents[turn % len(agents)], mode)
                request = {"messages": [], "temperature": temperature}
                choice = Choice(0, tuple(answer), (-1.0,) * len(answer), "stop")
                await recorder.start(CallStart(call, who, "chat/completions", "policy", 0, request, time.time()))
                await recorder.end(CallEnd(call, name, "ok", {}, 200, prompt, (choice,), untrainable_reason=reason))
                prompt = (*prompt, *answer, 7, 8)
        await self.reward(name, reward)

    async def told(self, name: str, messages: list[Any], message: dict[str, Any], **options: Any) -> None:
        """A rollout of one call that another model answered: no tokens are known."""
        request, tokens = {"model": "teacher", "messages": messages, **options}, ()
        finish = "tool_calls" if "tool_calls" in message else "stop"
        response = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}
        async with Recorder(self.store, merged=False) as recorder:
            start = CallStart(name, RolloutName(name), "chat/completions", "teacher", None, request, time.time())
            await recorder.start(start)
            await recorder.end(CallEnd(name, name, "ok", response, 200, tokens, (), untrainable_reason=NOT_THE_POLICY))
        await self.reward(name, 1.0)

    async def reward(self, name: str, reward: float | None) -> None:
        if reward is not None:
            await self.store.rewards.post([Reward(name, reward)], None, b"")

    async def traces(self, tokenizer: Any = None, **trainer: Any) -> Traces:
        sft = {"held_out": 0.0, **trainer.pop("sft", {})}
        config = TrainerConfig.model_validate({"sft": sft, **trainer})
        return await TraceReader(config, self.store, tokenizer, 100).read()


@asynccontextmanager
async def recorded(directory: Path) -> AsyncIterator[Recorded]:
    async with opened(StoreConfig(url=f"sqlite:///{directory}/store.db")) as database:
        yield Recorded(database)


def learned(samples: Sequence[Sample]) -> dict[str, list[int]]:
    """The tokens in the loss, by rollout."""
    rows = dataset(samples)
    return {
        s.rollout_id: [token for token in row["labels"] if token != IGNORED]
        for s, row in zip(samples, rows, strict=True)
    }


# What is learned from ------------------------------------------------------------------------------------------------


async def test_the_labels_are_the_answers_tokens_in_the_row_that_the_policy_saw(tmp_path: Path) -> None:
    async with recorded(tmp_path) as r:
        await r.rollout("a", 1.0, (10, 11), (12, 1))
        traces = await r.traces()
        (row,) = dataset(traces.train)
        assert row["input_ids"] == [*PROMPT, 10, 11, 7, 8, 12, 1]
        assert row["labels"] == [IGNORED] * 3 + [10, 11] + [IGNORED] * 2 + [12, 1]


async def test_the_best_of_each_task_are_taken_and_no_copies(tmp_path: Path) -> None:
    async with recorded(tmp_path) as r:
        await r.rollout("old", 1.0, (10,), task="t1")
        await r.rollout("copy", 1.0, (10,), task="t1")
        await r.rollout("better", 2.0, (11,), task="t1")
        await r.rollout("third", 0.5, (12,), task="t1")
        await r.rollout("wrong", 0.0, (13,), task="t2")
        await r.rollout("lone", 0.1, (14,))
        await r.rollout("held", 1.0, (15,), task="t3", mode="eval")
        await r.rollout("running", None, (16,), task="t3")
        assert learned((await r.traces(sft={"top": 2})).train) == {"better": [11], "copy": [10], "lone": [14]}
        assert learned((await r.traces(sft={"min_reward": 1.0})).train) == {"better": [11], "copy": [10]}
        everything = await r.traces(sft={"min_reward": 0.0})
        assert set(learned(everything.train)) == {"better", "copy", "third", "wrong", "lone"}
        assert everything.metrics["rollouts"] == 6 and everything.metrics["rollouts_trained"] == 5


async def test_a_rollout_that_awaits_its_reward_function_is_not_learned_from_yet(tmp_path: Path) -> None:
    async with recorded(tmp_path) as r:
        await r.rollout("scored", 1.0, (10,), task="t1")
        await r.store.rollouts.use_function("scoring.py:reward")
        await r.rollout("awaits", 1.0, (11,), task="t1")
        assert set(learned((await r.traces()).train)) == {"scored"}
        await Spoken(r.store.database, ["reward"]).record("reward", {"awaits": []})
        assert set(learned((await r.traces()).train)) == {"scored", "awaits"}


async def test_only_the_trained_agents_answers_are_learned(tmp_path: Path) -> None:
    async with recorded(tmp_path) as r:
        await r.rollout("a", 1.0, (10,), (11,), (12,), agents=["writer", "checker"])
        traces = await r.traces(agents=["writer"])
        assert learned(traces.train) == {"a": [10, 12]}
        assert traces.metrics["calls_of_others"] == 1


async def test_whole_answers_can_be_imitated_however_sampled_and_redacted_ones_or_images_not(tmp_path: Path) -> None:
    async with recorded(tmp_path) as r:
        await r.rollout("greedy", 1.0, (10,), reason=GREEDY, temperature=0.0)
        await r.rollout("forced", 1.0, (12,), reason=NOT_FOLLOWED + "a thinking budget")
        await r.rollout("redacted", 1.0, (11,), reason="redacted")
        await r.rollout("seen", 1.0, (13,), reason=MEDIA)
        assert learned((await r.traces()).train) == {"greedy": [10], "forced": [12]}


async def test_tasks_are_held_out_whole_and_always_the_same(tmp_path: Path) -> None:
    async with recorded(tmp_path) as r:
        for task in range(10):
            for sibling in range(2):
                await r.rollout(f"{task}-{sibling}", 1.0, (10 + sibling,), task=f"t{task}")
        traces, again = [await r.traces(sft={"held_out": 0.3}) for _ in range(2)]
        tasks = [{s.task_id for s in part} for part in (traces.train, traces.held_out)]
        assert [len(part) for part in tasks] == [7, 3] and not tasks[0] & tasks[1]
        assert len(traces.held_out) == 6 and traces.digest == again.digest


async def test_rollouts_that_teach_nothing_are_an_error_that_says_why(tmp_path: Path) -> None:
    async with recorded(tmp_path) as r:
        with pytest.raises(NothingToLearn, match="no rollout of mode train is completed and has a reward"):
            await r.traces()
        await r.rollout("a", 0.0, (10,))
        await r.rollout("b", -2.0, (10,))
        with pytest.raises(NothingToLearn, match="none of 2 rollouts has a reward above 0; theirs are from -2 to 0"):
            await r.traces()
        await r.rollout("c", 1.0, (10,), reason="redacted")
        with pytest.raises(NothingToLearn, match="1 rollouts have .* 1 calls without tokens to learn from"):
            await r.traces()


# Traces of other models ----------------------------------------------------------------------------------------------


def words(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


async def test_an_answer_of_another_model_is_what_it_adds_to_the_templates_prompt(
    tmp_path: Path, tokenizer: Any
) -> None:
    async with recorded(tmp_path) as r:
        asked = [{"role": "user", "content": [{"type": "text", "text": "What is seven plus two"}]}]
        call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 7}'}}
        await r.told("a", asked, {"content": None, "tool_calls": [call]})
        await r.told("b", asked, {"content": "nine please"})
        traces = await r.traces(tokenizer)
        assert learned(traces.train) == {"a": words("call add 7 <end>"), "b": words("nine please <end>")}
        assert {s.token_ids[:8] for s in traces.train} == {
            tuple(words("<user> What is seven plus two <end> <assistant>"))
        }


async def test_what_the_template_does_not_show_after_the_prompt_is_left_out_and_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    forgetful = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else 'So' }}")
    async with recorded(tmp_path) as r:
        await r.told("a", [{"role": "user", "content": "two"}], {"content": "nine"})
        await r.told("b", [{"role": "user"}, "odd"], {"content": "nine"})
        traces = await r.traces(tokenizer)
        assert learned(traces.train) == {"a": words("nine <end>")}
        assert traces.metrics["calls_untokenised"] == 1
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=forgetful)
        with pytest.raises(NothingToLearn, match="2 calls of other models that the policy's chat template does not"):
            await r.traces(tokenizer)


async def test_an_answer_that_was_cut_off_does_not_teach_to_end(tmp_path: Path, tokenizer: Any) -> None:
    async with recorded(tmp_path) as r:
        await r.told("a", [{"role": "user", "content": "two"}], {"content": "nine"})
        store = sqlite3.connect(tmp_path / "store.db")
        store.execute("UPDATE calls SET response = replace(response, '\"stop\"', '\"length\"')")
        store.commit()
        store.close()
        assert learned((await r.traces(tokenizer)).train) == {"a": words("nine")}


async def test_what_real_frameworks_were_answered_can_be_learned_from(tmp_path: Path, tokenizer: Any) -> None:
    """All chats of tests/traffic, tool calls and results included, by the template of Qwen2.5."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", chat_template=template
    )
    asked = [c for c in read().calls if c.path.endswith("chat/completions") and c.status == 200 and c.answer]
    traces = [as_trace(as_call(c.body, c.answer), tokenizer) for c in asked if len(c.answer["choices"]) == 1]
    assert len(traces) == 1990
    for trace in traces:
        assert trace is not None and trace.trainable
        assert trace.response_token_ids.index(tokenizer.eos_token_id) == len(trace.response_token_ids) - 1 > 0


def as_call(request: Any, response: Any) -> ModelCall:
    return call("c", request=request, response=response, trainable=False, untrainable_reason=NOT_THE_POLICY)


# What it computes ----------------------------------------------------------------------------------------------------


def row(name: str, context: Sequence[int], answer: Sequence[int]) -> Sample:
    """A sample as RL has it: the loss is over the answer."""
    n, zeros = len(context) + len(answer), (0.0,) * (len(context) + len(answer))
    mask = (0,) * len(context) + (1,) * len(answer)
    return Sample(name, name, (*context, *answer), mask, zeros, zeros, (1.0,) * n)


ROWS = (row("a", (0, 5, 6), (10, 11, 1)), row("b", (0, 5), (12, 1)), row("c", (0, 9, 8, 7), (13, 14, 15, 16, 1)))


def made(base: Path, directory: Path, **sft: Any) -> LightningTrainer:
    settings = {"report_to": [], "dtype": "float32", "learning_rate": 0.05, "group_size": 2, "tasks_per_step": 1}
    config = TrainerConfig.model_validate({**settings, "sft": {"learning_rate": 0.02, **sft}})
    return LightningTrainer(config, PolicyConfig(model=str(base), directory=directory))


def never() -> bool:
    return False


def test_the_loss_is_the_cross_entropy_of_the_answers_tokens_packed_or_not(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    total, count = 0.0, 0
    for sample in ROWS:
        with torch.no_grad():
            logp = model(torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        answer = [i for i, trained in enumerate(sample.mask) if trained]
        total -= sum(float(logp[i - 1, sample.token_ids[i]]) for i in answer)
        count += len(answer)
    trainer = made(base, tmp_path, epochs=1)
    assert mean_loss(trainer, ROWS) == pytest.approx(total / count, abs=1e-5)
    metrics = tune(SFT, trainer, Traces(ROWS, (), {}), tmp_path / "run", never)
    assert metrics is not None
    assert metrics["loss"] == pytest.approx(total / count, abs=1e-5)
    assert (metrics["trained_tokens"], metrics["computed_tokens"], metrics["optimizer_steps"]) == (count, 19, 1)


def test_the_tiny_model_says_what_it_was_shown(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path, epochs=40)
    before = greedy(trainer, ROWS)
    metrics = tune(SFT, trainer, Traces(ROWS, ROWS[:1], {}), tmp_path / "run", never)
    assert metrics is not None
    assert metrics["held_out_loss"] < 0.1 < metrics["held_out_loss_before"]
    assert metrics["token_accuracy"] == 1.0
    assert greedy(trainer, ROWS) == [[10, 11, 1], [12, 1], [13, 14, 15, 16, 1]] != before


def greedy(trainer: LightningTrainer, samples: Sequence[Sample]) -> list[list[int]]:
    found = []
    for sample in samples:
        ids = list(sample.token_ids[: sample.mask.index(1)])
        start = len(ids)
        for _ in range(sample.trained_tokens):
            with torch.no_grad():
                ids.append(int(trainer.policy_model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[start:])
    return found


def test_a_stopped_run_goes_on_to_the_same_weights(base: Path, tmp_path: Path) -> None:
    sft, traces = {"epochs": 10, "batch_tokens": 6}, Traces(ROWS, ROWS[:1], {})
    trainer = made(base, tmp_path / "whole", **sft)
    whole = tune(SFT, trainer, traces, tmp_path / "whole" / "run", never)
    weights = trainer.adapter()
    asked = iter([False] * 7 + [True] * 9)
    assert tune(SFT, made(base, tmp_path, **sft), traces, tmp_path / "run", lambda: next(asked)) is None
    resumed = made(base, tmp_path, **sft)
    metrics = tune(SFT, resumed, traces, tmp_path / "run", never)
    assert metrics is not None and whole is not None
    for name in ("loss", "held_out_loss", "held_out_loss_before", "optimizer_steps"):
        assert metrics[name] == pytest.approx(whole[name], abs=1e-6), name
    for name, weight in resumed.adapter().items():
        assert torch.allclose(weight, weights[name], atol=1e-6), name


def test_a_run_that_diverges_keeps_nothing(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path, learning_rate=1e30, epochs=8)
    with pytest.raises(LightningError, match=r"diverged .* lower tune.sft.learning_rate"):
        tune(SFT, trainer, Traces(ROWS, (), {}), tmp_path / "run", never)
    assert not (tmp_path / "run").exists()


# A run among RL's steps ----------------------------------------------------------------------------------------------


async def test_rl_goes_on_from_the_fine_tuned_weights_with_every_rollout_of_its_own(base: Path, tmp_path: Path) -> None:
    async with recorded(tmp_path) as r:
        for task in ("t1", "t2"):
            for sibling in range(4):
                await r.rollout(f"{task}-{sibling}", float(sibling % 2), (10 + sibling, 1), task=task)
        config = Config.model_validate({
            "policy": {"model": str(base), "directory": tmp_path / "policy"},
            "trainer": {"group_size": 4, "tasks_per_step": 2, "report_to": [], "dtype": "float32", "max_steps": 9},
        })  # fmt: skip

        async def run(kind: Any) -> LightningTrainer:
            trainer = LightningTrainer(config.trainer, config.policy)
            once = {"once": True} if kind is TrainingLoop else {}
            await kind(TrainerCore(config, r.store, trainer, Asked()), None).run(asyncio.Event(), **once)
            return trainer

        tuned = (await run(partial(TuningRun, SFT))).adapter()
        (step,) = await r.store.steps.all()
        assert (step.step, step.metrics["method"], step.metrics["rollouts_trained"]) == (1, "sft", 4)
        assert not any((tmp_path / "policy" / "sft").iterdir()), "a finished run leaves nothing behind"
        assert await r.store.steps.rollouts_of(1) == [], "nothing is claimed"

        trainer = made(base, tmp_path / "other")
        trainer.load(Path(str(step.checkpoint)))
        for name, weight in trainer.adapter().items():
            assert torch.equal(weight, tuned[name]), name
        after = (await run(TrainingLoop)).adapter()
        assert [s.metrics.get("method") for s in await r.store.steps.all()] == ["sft", None]
        assert len(await r.store.steps.rollouts_of(2)) == 8, "RL takes all of them, those that were imitated too"
        assert any(not torch.equal(weight, tuned[name]) for name, weight in after.items())
        await run(partial(TuningRun, SFT))
        assert [s.metrics.get("method") for s in await r.store.steps.all()] == ["sft", None, "sft"]


async def test_a_store_that_cannot_be_written_at_the_end_of_a_run_is_waited_for(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    async with recorded(tmp_path) as r:
        for name in ("a", "b"):  # one of them is held out
            await r.rollout(name, 1.0, (10, 11, 1))
        trainer = made(base, tmp_path, epochs=20, held_out=0.5)
        untuned = mean_loss(trainer, [row("a", PROMPT, (10, 11, 1))])
        config = Config(
            policy=PolicyConfig(model=str(base), directory=tmp_path),
            trainer=trainer.settings,
            **{one.name: one for one in trainer.settings.sections},
        )
        claim, failures = r.store.steps.claim, [StoreUnavailable("database is locked")]

        async def locked_once(*args: Any) -> int:
            if failures:
                raise failures.pop()
            return await claim(*args)

        monkeypatch.setattr(r.store.steps, "claim", locked_once)
        step = await TuningRun(SFT, TrainerCore(config, r.store, trainer, Asked()), None).run(asyncio.Event())
        assert step is not None and not failures
        assert (step.step, step.metrics["optimizer_steps"]) == (1, 20)
        assert step.metrics["held_out_loss_before"] == pytest.approx(untuned), "it was done again from the beginning"
        assert greedy(trainer, [row("a", PROMPT, (10, 11, 1))]) == [[10, 11, 1]]


# The command ---------------------------------------------------------------------------------------------------------


class Run:
    """A directory with a store and a configuration, in which the command is run."""

    def __init__(self, directory: Path, base: Path) -> None:
        self.directory, self.out = directory, directory / "lightning-policy" / "offline"
        directory.mkdir(exist_ok=True)
        trainer = {"learning_rate": 0.02, "report_to": [], "threads": 1, "dtype": "float32", "group_size": 2,
                   "sft": {"epochs": 4, "learning_rate": 0.02, "batch_tokens": 16, "held_out": 0.25}}  # fmt: skip
        config = placed(policy={"model": str(base), "publish": "lora"}, trainer=trainer)
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
        asyncio.run(self._record())

    async def _record(self) -> None:
        async with opened(StoreConfig(url=f"sqlite:///{self.directory}/lightning.db")) as database:
            for task in range(8):
                for sibling in range(2):
                    name, answer = f"{task}-{sibling}", (10 + task, 10 + sibling, 1)
                    await Recorded(database).rollout(name, float(sibling), answer, task=f"t{task}")

    def train(self, *arguments: str, script: Path | None = None, **env: str) -> tuple[int, str]:
        program = [str(script)] if script else ["-m", "lightning_proxy.cli"]
        found = subprocess.run(
            [sys.executable, *program, "train", "--offline", *arguments], cwd=self.directory, timeout=200, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        return found.returncode, found.stdout

    def adapter(self, step: int) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = torch.load(self.out / "checkpoints" / str(step) / "state.pt", weights_only=True)
        return found["adapters"]["default"]


def test_the_command_tunes_and_says_how_it_goes(base: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", base)
    code, text = run.train("--method", "sft", "--epochs", "2", "--min-reward", "0.5")
    assert code == 0, text
    for said in ("epoch 1 of 2: loss", "(held out", "step 1", "sft loss", "the weights of step 1, as a LoRA adapter"):
        assert said in text, text
    assert (run.out / "adapter" / "COMPLETE").is_file()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--method", "ppo"), "--method is rl, sft, dpo, kto; got 'ppo'"),
        (("--min-reward", "1"), "--min-reward needs --method sft"),
        (("--epochs", "2"), "--epochs needs --offline or another method than rl"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path: Path, arguments: tuple[str, ...], what: str) -> None:
    command = [sys.executable, "-m", "lightning_proxy.cli", "train", *arguments]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert found.returncode == 2 and what in found.stderr, found.stderr


@pytest.mark.long
def test_a_killed_run_ends_as_any_other(base: Path, tmp_path: Path) -> None:
    whole, run = Run(tmp_path / "whole", base), Run(tmp_path / "run", base)
    assert whole.train("--method", "sft")[0] == 0
    for moment in ("save:9", "commit:1"):
        code, text = run.train("--method", "sft", script=KILLED, KILL_AT=moment)
        assert code == -signal.SIGKILL, text
    code, text = run.train("--method", "sft")
    assert code == 0 and "resuming the run" in text, text
    expected = whole.adapter(1)
    for name, weight in run.adapter(1).items():
        assert torch.allclose(weight, expected[name], atol=1e-6), name
