"""Hints: what the policy is shown, what it says of its answers then, and what it learns from that."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.guides.step_metrics import GROUPS
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.returns import Rules
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, ModelCall, Reward, RolloutName
from lightning_proxy.trainer.guides.guides import Guides
from lightning_proxy.trainer.guides.hinted import WORDING, hinted_prompt
from lightning_proxy.trainer.guides.hints import Hints
from lightning_proxy.trainer.guides.sources import Recorded, comments, siblings, without_quotes
from lightning_proxy.trainer.guides.teacher import COUNTS as OF_TEACHERS
from lightning_proxy.trainer.loop import TrainingLoop
from lightning_proxy.trainer.publish import NoPublisher
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch
from support.calls import call
from support.sections import PolicyConfig, TrainerConfig

OF_GUIDES = {name for name, _, _ in GROUPS["guides"]}
COLOURS = ["red", "green", "blue", "black"]
QUESTIONS = [f"q{i}" for i in range(4)]
WORDS = ["<bos>", "<end>", "<unk>", "<user>", "<assistant>", *QUESTIONS, *COLOURS]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def save_heeding_model(directory: Path) -> Path:
    """A model that answers a question wrongly half of the time, but with the colour that its prompt names, if any."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<end>", unk_token="<unk>", pad_token="<end>",
        chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    # Plain questions get the next question's colour half of the time; hinted ones the colour of the hint.
    plain = [("{message}", q, COLOURS[c]) for i, q in enumerate(QUESTIONS) for c in (0, 1, 2, 3, *((i + 1) % 4,) * 2)]
    hinted = [(words, q, colour) for words in WORDING.values() for q in QUESTIONS for colour in COLOURS]
    for _ in range(150):
        loss = torch.zeros(())
        for words in ("{message}", *WORDING.values()):
            said = [(words.format(message=q, hint=colour), colour) for w, q, colour in plain + hinted if w == words]
            texts = [prompt(tokenizer, [{"role": "user", "content": text}]) + f"{c} <end>" for text, c in said]
            rows = torch.tensor(tokenizer(texts)["input_ids"])
            labels = rows.masked_fill(torch.arange(rows.shape[1]) < rows.shape[1] - 2, -100)
            loss = loss + model(input_ids=rows, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def prompt(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_heeding_model(tmp_path_factory.mktemp("heeding"))


class Lesson:
    """A store and a trainer whose model answers questions with colours."""

    def __init__(self, config: Config, store: Store) -> None:
        self.store = store
        self.trainer = LightningTrainer(config.trainer, config.policy)
        self.tokenizer: Any = self.trainer.processing_class
        self.guide = None
        if config.trainer.hints != "off":
            learner = self.trainer
            self.guide = Guides([Hints(config.trainer, store, self.tokenizer, learner.max_tokens, learner.scores_of)])
        self.loop = TrainingLoop(config, store, self.trainer, NoPublisher(), guide=self.guide)
        self.names = 0

    def says(self, question: str) -> torch.Tensor:
        """The log-probabilities of the colours."""
        ids = torch.tensor([self.ids([{"role": "user", "content": question}])])
        with torch.no_grad():
            logits = self.trainer.policy_model(input_ids=ids).logits[0, -1]
        return logits.log_softmax(-1)[len(WORDS) - 4 :]

    def ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return list(self.tokenizer(prompt(self.tokenizer, messages), add_special_tokens=False)["input_ids"])

    async def rollout(self, question: str, colour: str, reward: float = 0.0, comment: str | None = None,
                      task: str | None = None, **request: Any) -> str:  # fmt: skip
        """A rollout of one call that answered with a colour."""
        self.names += 1
        name, messages = f"{question}-{self.names}", [{"role": "user", "content": question}]
        body = {"messages": messages} | request
        answer = (WORDS.index(colour), 1)
        logprob = float(self.says(question)[COLOURS.index(colour)])
        async with Recorder(self.store, merged=False) as recorder:
            who = RolloutName(name, task)
            await recorder.start(CallStart(name, who, "chat/completions", "policy", 0, body, time.time()))
            choice = Choice(0, answer, (logprob, -0.01), "stop")
            await recorder.end(CallEnd(name, name, "ok", {}, 200, tuple(self.ids(messages)), (choice,)))
        await self.store.rewards.post([Reward(name, reward, comment=comment)])
        return name

    async def guided(self) -> Batch:
        """The next batch, with what the guide says."""
        batch = await self.loop.collector.next_batch(0, fewer=True)
        assert batch is not None and self.guide is not None
        return await self.guide.guided(batch)

    async def step(self) -> dict[str, Any] | None:
        if not await self.loop.train_once(fewer=True):
            return None
        last = await self.store.steps.last()
        assert last is not None
        return last.metrics


@asynccontextmanager
async def lesson(base: Path, tmp_path: Path, **trainer: Any) -> AsyncIterator[Lesson]:
    settings = {"learning_rate": 0.005, "report_to": [], "dtype": "float32", "group_size": 4, "tasks_per_step": 4}
    config = Config(
        store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db"),
        policy=PolicyConfig(model=str(base), directory=tmp_path / "policy"),
        trainer=TrainerConfig.model_validate({**settings, "group_timeout_s": 1e-9, **trainer}),
    )
    async with opened(config.store) as database:
        made = Lesson(config, Store(database))
        await made.loop.resume()
        yield made


async def test_comments_teach_where_rewards_teach_nothing(base: Path, tmp_path: Path) -> None:
    found = {}
    for hints in ("off", "comments"):
        torch.manual_seed(0)
        async with lesson(base, tmp_path / hints, hints=hints) as one:
            for _ in range(10):
                for colour in one.says("q1").exp().multinomial(8, replacement=True).tolist():
                    await one.rollout("q1", COLOURS[colour], comment="it is green", task="q1")
                metrics = await one.step()
                assert (metrics is None) == (hints == "off")
            found[hints] = float(one.says("q1")[COLOURS.index("green")].exp())
    assert found["off"] < 0.3 < 0.9 < found["comments"]


async def test_a_hint_is_told_to_the_policy_in_the_last_message_of_the_user(base: Path, tmp_path: Path) -> None:
    async with lesson(base, tmp_path, hints="comments", hint_weight=0.5, group_size=2) as one:
        before = {q: one.says(q) for q in ("q0", WORDING["comments"].format(message="q0", hint="it is red"))}
        said = await one.rollout("q0", "red", 1.0, "it is red", task="t")
        silent = await one.rollout("q0", "blue", 0.0, "  ", task="t")
        batch = await one.guided()
        (told,), (nothing,) = ([s.guidance for s in batch.samples if s.rollout_id == name] for name in (said, silent))
        plain, hinted = before.values()
        assert told[0].logprobs[-2] == pytest.approx(float(hinted[0]), abs=1e-4) and hinted[0] > plain[0] + 1
        assert [math.isnan(value) for value in told[0].logprobs[:-2]] == [True] * (len(told[0].logprobs) - 2)
        assert all(map(math.isnan, nothing[0].logprobs))
        assert told[0].weight == 0.5
        assert (batch.metrics["calls_hinted"], batch.metrics["calls_without_hint"]) == (1, 1)


@pytest.mark.parametrize(
    ("why", "settings", "asked"),
    [
        ("hints_not_shown", {}, {"chat_template_kwargs": {"add_generation_prompt": False}}),
        ("hints_not_shown", {}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("hints_too_long", {"max_sample_tokens": 8}, {}),
    ],
)
async def test_a_call_whose_hint_cannot_be_shown_is_counted_and_learns_from_its_reward(
    base: Path, tmp_path: Path, why: str, settings: dict[str, Any], asked: dict[str, Any]
) -> None:
    async with lesson(base, tmp_path, hints="comments", group_size=2, **settings) as one:
        for reward in (0.0, 1.0):
            await one.rollout("q0", "red", reward, "it is red", task="t", **asked)
        metrics = await one.step()
        assert metrics is not None
        assert (metrics[why], metrics["calls_hinted"], metrics["guided_share"], metrics["skipped"]) == (2, 0, 0, 0)
        assert {name for name in metrics if name in OF_GUIDES} == OF_GUIDES - {*OF_TEACHERS, "teacher_tokens"}


async def test_a_rollout_without_siblings_learns_from_its_comment(base: Path, tmp_path: Path) -> None:
    async with lesson(base, tmp_path, hints="comments", reward_weights={"reward": 0}) as one:
        lone = [await one.rollout("q0", "blue", 1.0, comment) for comment in ("it is red", None)]
        tasked = [
            await one.rollout("q1", "blue", 1.0, comment, task=f"t {comment}") for comment in ("it is green", None)
        ]
        while await one.step():
            pass
        dropped = [(await one.store.rollouts.get(name)).dropped for name in (*lone, *tasked)]
        assert dropped == [None, "no siblings", None, "no siblings"]


async def test_a_better_siblings_answer_is_a_hint_for_the_others(base: Path, tmp_path: Path) -> None:
    async with lesson(base, tmp_path, hints="siblings", group_size=3) as one:
        hinted = one.says(WORDING["siblings"].format(message="q0", hint="red"))
        best = await one.rollout("q0", "red", 1.0, task="t")
        worse = [await one.rollout("q0", "blue", reward, task="t") for reward in (0.0, 0.5)]
        alone = [await one.rollout("q1", "blue", reward, task="u") for reward in (0.0, 0.0, 0.0)]
        batch = await one.guided()
        told = {s.rollout_id: s.guidance[0].logprobs[-2] for s in batch.samples}
        assert math.isnan(told[best]) and told.keys() == {best, *worse}
        assert [told[name] for name in worse] == pytest.approx([float(hinted[2])] * 2, abs=1e-4)
        reasons = {(await one.store.rollouts.get(name)).dropped for name in alone}
        assert reasons == {"all rewards of the group are equal"}


def test_a_siblings_hint_is_all_that_the_same_agent_answered(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)

    def answered(name: str, agent: str | None, *words: str, **changed: Any) -> ModelCall:
        ids = tuple(map(WORDS.index, words))
        return call(name, agent, choices=(Choice(0, ids, (-1.0,) * len(ids), "stop"),), **changed)

    good = [answered("g1", "a", "red", "<end>"), answered("g2", "b", "blue"), answered("g3", "a", "green", "<end>"),
            answered("g4", "a", "black", trainable=False)]  # fmt: skip
    bad = [answered("b1", "a", "black"), answered("b2", "c", "black")]
    rules = Rules({"reward": 1.0})
    found = siblings([recorded(Reward("r", 1.0), calls=good), recorded(calls=bad)], rules, tokenizer)
    assert found == {"b1": "red\n\ngreen"}
    both = [recorded(Reward("r", 1.0), calls=calls, task=task) for calls, task in ((good, "t"), (bad, "t"), (bad, "u"))]
    assert siblings(both, rules, tokenizer) == {}


def recorded(*rewards: Reward, task: str = "t", calls: Sequence[ModelCall] = (call("c1"), call("c2"))) -> Recorded:
    return Recorded(task, calls, rewards)


def test_a_calls_own_comment_comes_before_its_rollouts_and_the_newest_counts() -> None:
    found = comments([recorded(
        Reward("r", 0.0, comment="old"), Reward("r", 0.0, "c1", comment="of c1"), Reward("r", 0.0, comment="all wrong"),
        Reward("r", 0.0, name="style", comment="too long"), Reward("r", 0.5, "c2", name="judge", comment="7"),
    )])  # fmt: skip
    assert found == {"c1": "of c1", "c2": "all wrong\ntoo long"}
    assert comments([recorded(Reward("r", 0.0, comment="bad"), Reward("r", 1.0))]) == {}  # a correction without words
    corrected = recorded(Reward("r", 0.0, comment="bad"), Reward("r", 1.0, "c1"), Reward("r", 1.0, "c2", "style"))
    assert comments([corrected]) == {"c2": "bad"}
    assert comments([recorded(Reward("r", 1.0, "c1"), Reward("r", 0.0, comment="bad"), calls=(call("c1"),))]) == {
        "c1": "bad"
    }


def test_a_long_hint_is_cut(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    messages = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "blue"}]
    ids = tuple(tokenizer(prompt(tokenizer, messages), add_special_tokens=False)["input_ids"])
    made = call("c", endpoint="chat/completions", prompt=ids, request={"messages": messages})
    lengths = [len(hinted_prompt(made, "red " * n, "comments", tokenizer) or ()) for n in (100, 10_000)]
    assert lengths[0] < lengths[1] < 1100


@pytest.mark.parametrize(
    ("said", "answer", "hint"),
    [
        ("3+4 is 7: not 'The sum of these two is 9.'", "The sum of these two is 9.", "3+4 is 7: not '…'"),
        ("3+4 is 7: not '9'", " 9\n", "3+4 is 7: not '…'"),
        ("3+4 is 7, not 9", "9", "3+4 is 7, not 9"),
        ("not `add up all of them` or “subtract the rest”", "add up all of them; subtract the rest", "not `…` or “…”"),
        ("call search_flights once", "search_flights(a); search_flights(b)", "call search_flights once"),
        ("wrong", "", "wrong"),
    ],
)  # fmt: skip
def test_what_a_comment_quotes_of_the_answer_is_no_hint(said: str, answer: str, hint: str) -> None:
    assert without_quotes(said, answer) == hint


async def test_a_comment_that_tells_what_was_answered_is_warned_of_once(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with lesson(base, tmp_path, hints="comments") as learner:
        for question in QUESTIONS:
            for colour in COLOURS:
                await learner.rollout(question, colour, comment=colour, task=question)
        assert learner.guide is not None
        batch = await learner.guided()
        await learner.guide.guided(batch)
        assert caplog.text.count("they make the policy's own answers likelier") == 1
