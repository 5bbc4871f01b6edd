"""Which rollouts each method of fine-tuning learns from, and which of their tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from traffic.recording import read as read_traffic
from transformers import PreTrainedTokenizerFast

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Limits, Reward, RolloutName
from lightning_proxy.core.tokens import GREEDY, MEDIA, NOT_FOLLOWED, NOT_THE_POLICY
from lightning_proxy.features.tune.lessons import Example, LessonReader, Lessons, NothingToLearn, as_lesson
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.calls import call
from support.sections import TrainerConfig

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
        async with Recorder(self.store, merged=False) as recorder:
            for turn, answer in enumerate(answers):
                call_id, who = f"{name}-{turn}", RolloutName(name, task, agents[turn % len(agents)], mode, key_id)
                choice = Choice(0, tuple(answer), (-1.0,) * len(answer), "stop")
                await recorder.start(CallStart(call_id, who, "chat/completions", "policy", 0, {}, time.time()))
                await recorder.end(CallEnd(call_id, name, "ok", {}, 200, ids, (choice,), untrainable_reason=reason))
                ids = (*ids, *answer, 7, 8)
        if reward is not None:
            await self.store.rewards.post([Reward(name, reward)], None, b"")

    async def of_another_model(self, name: str, messages: list[Any], message: Any, finish: str = "stop") -> None:
        request = {"model": "teacher", "messages": messages}
        response = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}
        async with Recorder(self.store, merged=False) as recorder:
            start = CallStart(name, RolloutName(name), "chat/completions", "teacher", None, request, time.time())
            await recorder.start(start)
            await recorder.end(CallEnd(name, name, "ok", response, 200, (), (), untrainable_reason=NOT_THE_POLICY))
        await self.store.rewards.post([Reward(name, 1.0)], None, b"")

    async def read(self, method: str, among: Any = None, shown_by: Any = None, agents: Any = (), **own: Any) -> Lessons:
        team = {"agents": agents} if agents else {}
        settings = TrainerConfig.model_validate({method: own, **team})
        trainer: Any = SimpleNamespace(settings=settings, tokenizer=shown_by, max_tokens=100, vocabulary=None)
        return await LessonReader(method, self.store, trainer).read(among)

    async def learned(self, method: str, **options: Any) -> dict[str, list[int]]:
        """The sampled tokens of what becomes likelier, by rollout."""
        rows = [one.rows[0] for one in (await self.read(method, **options)).train if one.up]
        return {row.rollout_id: [*compress(row.token_ids, row.mask)] for row in rows}


@pytest.fixture
async def r(tmp_path: Path) -> AsyncIterator[Recorded]:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        yield Recorded(Store(database))


def names(pairs: Sequence[Example]) -> set[tuple[str, ...]]:
    return {tuple(row.rollout_id for row in pair.rows) for pair in pairs}


async def test_sft_takes_the_best_of_each_task_and_no_copies(r: Recorded) -> None:
    await r.rollout("old", "t1", 1.0, (10,))
    await r.rollout("copy", "t1", 1.0, (10,))
    await r.rollout("better", "t1", 2.0, (11,))
    await r.rollout("third", "t1", 0.5, (12,))
    await r.rollout("wrong", "t2", 0.0, (13,))
    await r.rollout("lone", None, 0.1, (14,))
    await r.rollout("held", "t3", 1.0, (15,), mode="eval")
    await r.rollout("running", "t3", None, (16,))
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
    with pytest.raises(NothingToLearn, match="1 calls without tokens to learn from, 1 pairs of different prompts"):
        await r.read("dpo")
    await r.rollout("other", "t1", 0.0, (12, 1))
    await r.rollout("again", "t1", 0.0, (12, 1))
    (pair,) = (await r.read("dpo")).train
    assert [row.token_ids for row in pair.rows] == [(*PROMPT, 9, 1), (*PROMPT, 12, 1)]


async def test_kto_takes_every_rewarded_rollout_up_or_down(r: Recorded) -> None:
    for name, task, reward in (("up", "t1", 1.0), ("down", "t2", 0.0), ("lone", None, 0.3)):
        await r.rollout(name, task, reward, (9, 1))
    for threshold, up in ((0.0, {"up", "lone"}), (0.5, {"up"})):
        thumbs = await r.read("kto", threshold=threshold)
        assert {one.rows[0].rollout_id for one in thumbs.train if one.up} == up
        assert (thumbs.metrics["thumbs_up"], thumbs.metrics["thumbs_down"]) == (len(up), 3 - len(up))


async def test_a_rollout_that_awaits_its_reward_function_is_not_learned_from_yet(r: Recorded) -> None:
    await r.rollout("scored", "t1", 1.0, (10,))
    await r.store.rollouts.use_function("scoring.py:reward")
    await r.rollout("awaits", "t1", 1.0, (11,))
    assert set(await r.learned("sft")) == {"scored"}


async def test_whole_answers_of_trained_agents_are_learned_however_sampled_and_no_others(r: Recorded) -> None:
    await r.rollout("team", None, 1.0, (10,), (11,), (12,), agents=["writer", "checker"])
    for name, token, reason in (
        ("greedy", 13, GREEDY), ("forced", 14, NOT_FOLLOWED + "a thinking budget"), ("redacted", 15, "redacted"),
        ("seen", 16, MEDIA),
    ):  # fmt: skip
        await r.rollout(name, None, 1.0, (token,), reason=reason, agents=["writer"])
    assert await r.learned("sft", agents=["writer"]) == {"team": [10, 12], "greedy": [13], "forced": [14]}
    assert (await r.read("sft", agents=["writer"])).metrics["calls_of_others"] == 1


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
    with pytest.raises(NothingToLearn, match="0 rollouts of mode train are completed and have a reward; --method sft"):
        await r.read("sft")
    await r.rollout("a", "t1", 0.0, (10,))
    with pytest.raises(NothingToLearn, match="--method kto needs two rows"):
        await r.read("kto")
    await r.rollout("b", "t1", -2.0, (10,))
    with pytest.raises(NothingToLearn, match="2 rollouts .*; theirs are from -2 to 0; .* above 0 .tune.sft"):
        await r.read("sft")
    with pytest.raises(NothingToLearn, match="siblings with rewards that differ by 3 or more .tune.dpo.margin"):
        await r.read("dpo", margin=3.0)
    await r.rollout("c", "t1", 1.0, (10,), reason="redacted")
    with pytest.raises(NothingToLearn, match="left out: 1 calls without tokens to learn from"):
        await r.read("sft")


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
    learned = {row.rollout_id: [*compress(row.token_ids, row.mask)] for one in lessons.train for row in one.rows}
    assert learned == {"a": words("call add 7 <end>"), "b": words("nine please <end>"), "cut off": words("nine")}
    prompt = tuple(words("<user> What is seven plus two <end> <assistant>"))
    assert {one.rows[0].token_ids[:8] for one in lessons.train} == {prompt}
    assert lessons.metrics["calls_untokenised"] == 1
    forgetful = tokenizer(TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else 'So' }}"))
    with pytest.raises(NothingToLearn, match="4 calls of other models that the policy's chat template does not"):
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
