"""Direct preference optimization: which pairs it learns from, which tokens, what it computes, and that it goes on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import LightningError
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Limits, Reward, RolloutName
from lightning_proxy.features.tune import preferences
from lightning_proxy.features.tune.lessons import NothingToLearn
from lightning_proxy.features.tune.offline import train_offline
from lightning_proxy.features.tune.preferences import (
    DPO,
    Pair,
    PairReader,
    Pairs,
    PairTrainer,
    collate_pairs,
    dpo_config,
    pair_dataset,
)
from lightning_proxy.features.tune.run import TuningRun, tune
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.serving.vllm import VllmServer
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.plugins import Offline, Run
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Sample
from support.rewarded import Traffic, traffic
from support.sections import PolicyConfig, TrainerConfig
from support.training import bench

__all__ = ["traffic"]

PROMPT = (0, 5, 6)
BETA = 0.5
SETTINGS = {"learning_rate": 0.02, "beta": BETA, "epochs": 6, "batch_tokens": 64, "held_out": 0.25}


async def rollout(
    store: Store, name: str, task: str | None, reward: float, *answers: Sequence[int], prompt: Sequence[int] = PROMPT,
    sampled: bool = True,
) -> None:  # fmt: skip
    """A rollout whose turns answer with `answers`; every turn adds two tokens of a tool's result."""
    ids = tuple(prompt)
    async with Recorder(store, merged=False) as recorder:
        for turn, answer in enumerate(answers):
            call = f"{name}-{turn}"
            start = CallStart(call, RolloutName(name, task), "chat/completions", "policy", 0, {}, time.time())
            choice = Choice(0, tuple(answer), (-1.0,) * len(answer), "stop")
            await recorder.start(start)
            reason = None if sampled else "redacted"
            await recorder.end(CallEnd(call, name, "ok", {}, 200, ids, (choice,), untrainable_reason=reason))
            ids = (*ids, *answer, 7, 8)
    await store.rewards.post([Reward(name, reward)], None, b"")


async def read(store: Store, among: Sequence[str] | None = None, **dpo: Any) -> Pairs:
    config = TrainerConfig.model_validate({"dpo": {"held_out": 0.0, **dpo}})
    return await PairReader(config, store, 100).read(among)


def names(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    return [(pair.chosen.rollout_id, pair.rejected.rollout_id) for pair in pairs]


# What is learned from ------------------------------------------------------------------------------------------------


async def test_siblings_whose_rewards_differ_make_pairs_and_none_is_used_much_more_than_others(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        store = Store(database)
        for name, reward, token in (("best", 1.0, 9), ("good", 0.9, 10), ("poor", 0.2, 11), ("worst", 0.0, 12)):
            await rollout(store, name, "t1", reward, (token, 1))
        await rollout(store, "alone", None, 5.0, (13, 1))
        pairs = await read(store, margin=0.5)
        wanted = [("best", "worst"), ("good", "poor"), ("good", "worst"), ("best", "poor")]
        assert names(pairs.train) == wanted and pairs.metrics["pairs"] == 4
        assert names((await read(store, margin=0.5, pairs_per_task=2)).train) == wanted[:2]
        one = await read(store, margin=0.5, pairs_per_task=1)
        again = await read(store, one.rollout_ids, margin=0.5, pairs_per_task=1)
        assert names(one.train) == wanted[:1] and again.digest == one.digest, "a run goes on with what it began with"
        assert names((await read(store, margin=1.0)).train) == wanted[:1]
        with pytest.raises(NothingToLearn, match="in none of 1 tasks do two rewarded rollouts differ by 2 or more"):
            await read(store, margin=2.0)


async def test_copies_other_prompts_and_answers_without_tokens_make_no_pair(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        store = Store(database)
        await rollout(store, "lucky", "t1", 1.0, (9, 1))
        await rollout(store, "unlucky", "t1", 0.0, (9, 1))
        await rollout(store, "elsewhere", "t1", 0.0, (10, 1), prompt=(0, 5, 7))
        await rollout(store, "redacted", "t1", 0.0, (11, 1), sampled=False)
        with pytest.raises(NothingToLearn, match="1 pairs of different prompts, 1 calls without tokens to learn from"):
            await read(store)
        await rollout(store, "other", "t1", 0.0, (12, 1))
        await rollout(store, "again", "t1", 0.0, (12, 1))
        pairs = await read(store)
        assert len(pairs.train) == 1 and pairs.metrics["pairs_other_prompt"] == 1
        assert pairs.train[0].rejected.token_ids == (*PROMPT, 12, 1)


async def test_tasks_are_held_out_whole_and_always_the_same(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        store = Store(database)
        for task in range(8):
            for sibling in range(4):
                await rollout(store, f"{task}-{sibling}", f"t{task}", sibling % 2, (9 + sibling, 1))
        pairs, again = [await read(store, held_out=0.25) for _ in range(2)]
        tasks = [{pair.chosen.task_id for pair in part} for part in (pairs.train, pairs.held_out)]
        assert [len(part) for part in tasks] == [6, 2] and not tasks[0] & tasks[1]
        assert pairs.digest == again.digest


# What it computes ----------------------------------------------------------------------------------------------------


def row(name: str, *parts: tuple[int, Sequence[int]]) -> Sample:
    """A row of (sampled or not, tokens)."""
    ids = tuple(token for _, tokens in parts for token in tokens)
    mask = tuple(sampled for sampled, tokens in parts for _ in tokens)
    zeros = (0.0,) * len(ids)
    return Sample(name, name, ids, mask, zeros, zeros, (1.0,) * len(ids))


TOOLS = Pair(
    row("a", (0, PROMPT), (1, (9, 10)), (0, (7, 8)), (1, (11, 1))),
    row("b", (0, PROMPT), (1, (12, 1))),
)
PLAIN = Pair(row("c", (0, (0, 5)), (1, (13, 1))), row("d", (0, (0, 5)), (1, (14, 15, 1))))


def made(base: Path, directory: Path, **dpo: Any) -> LightningTrainer:
    settings = {"report_to": [], "dtype": "float32", "group_size": 2, "tasks_per_step": 1}
    config = TrainerConfig.model_validate({**settings, "dpo": {**SETTINGS, **dpo}})
    return LightningTrainer(config, PolicyConfig(model=str(base), directory=directory))


def never() -> bool:
    return False


def answer_logprob(model: Any, sample: Sample) -> torch.Tensor:
    """The log-probability of exactly the sampled tokens, computed alone and unpadded."""
    logp = model(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
    return torch.stack([logp[i - 1, sample.token_ids[i]] for i, sampled in enumerate(sample.mask) if sampled]).sum()


def test_loss_and_gradient_are_those_of_dpo_over_the_sampled_tokens_alone(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path)
    rows = pair_dataset(trainer, [TOOLS, PLAIN])
    reference = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        expected = [[float(answer_logprob(reference, sample)) for sample in pair] for pair in (TOOLS, PLAIN)]
    found = [[one["ref_chosen_logps"], one["ref_rejected_logps"]] for one in rows]
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-4)

    tuner = PairTrainer(
        model=trainer.model, args=dpo_config(trainer, tmp_path, 1), train_dataset=rows, data_collator=collate_pairs,
        processing_class=trainer.tokenizer,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():  # away from the reference, where LoRA's gradient is not half zero
        for parameter in trainer.weight_sets.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss = tuner.compute_loss(tuner.model.eval(), collate_pairs(list(rows)))
    loss.backward()
    gradients = [p.grad.clone() for p in trainer.weight_sets.parameters()]
    trainer.model.zero_grad()
    now = [[answer_logprob(trainer.policy_model, sample) for sample in pair] for pair in (TOOLS, PLAIN)]
    grown = [(a - ra) - (b - rb) for (a, b), (ra, rb) in zip(now, expected, strict=True)]
    own = -logsigmoid(BETA * torch.stack(grown)).mean()
    own.backward()
    assert float(loss.detach()) == pytest.approx(float(own.detach()), abs=1e-5)
    for gradient, parameter in zip(gradients, trainer.weight_sets.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-5)


def test_pairs_that_are_computed_together_train_the_same_weights(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = Pairs((TOOLS, PLAIN, TOOLS, PLAIN), (), {})
    longest, together, weights = 2 * len(TOOLS.chosen.token_ids), list[int](), list[dict[str, torch.Tensor]]()

    def collated(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        together.append(len(rows))
        return collate_pairs(rows)

    monkeypatch.setattr(preferences, "collate_pairs", collated)
    for most in (1, 2):
        monkeypatch.setattr(preferences, "PASS_TOKENS", most * longest)
        trainer = made(base, tmp_path / str(most), batch_tokens=4 * longest, epochs=2)
        assert tune(DPO, trainer, pairs, tmp_path / str(most) / "run", never) is not None
        weights.append(trainer.adapter())
    assert together == [1] * 8 + [2] * 4
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-4), name


def test_the_model_prefers_what_held_out_pairs_prefer(base: Path, tmp_path: Path) -> None:
    chance = random.Random(1)

    def pair(n: int) -> Pair:
        """The chosen answer has tokens of the upper half, the rejected one of the lower."""
        prompt = (0, chance.randrange(2, 24), chance.randrange(2, 24))
        sides = [(1, [chance.randrange(*among) for _ in range(4)]) for among in ((13, 24), (2, 13))]
        return Pair(row(f"{n}+", (0, prompt), sides[0]), row(f"{n}-", (0, prompt), sides[1]))

    pairs = [pair(n) for n in range(80)]
    metrics = tune(DPO, made(base, tmp_path), Pairs(tuple(pairs[:60]), tuple(pairs[60:]), {}), tmp_path / "run", never)
    assert metrics is not None
    assert metrics["held_out_accuracy_before"] < 0.8 < 0.9 <= metrics["held_out_accuracy"]
    assert metrics["held_out_margin"] > metrics["held_out_margin_before"] + 5
    assert metrics["preference_margin"] > 1 and metrics["preference_accuracy"] > 0.95 and metrics["loss"] < 0.3


def test_a_stopped_run_goes_on_to_the_same_weights(base: Path, tmp_path: Path) -> None:
    pairs = Pairs((TOOLS, PLAIN, Pair(PLAIN.rejected, PLAIN.chosen)), (TOOLS,), {})
    trainer = made(base, tmp_path / "whole", batch_tokens=1)
    whole = tune(DPO, trainer, pairs, tmp_path / "whole" / "run", never)
    weights = trainer.adapter()
    assert set(trainer.model.peft_config) == {"default"}
    asked = iter([False] * 7 + [True] * 20)
    assert tune(DPO, made(base, tmp_path, batch_tokens=1), pairs, tmp_path / "run", lambda: next(asked)) is None
    resumed = made(base, tmp_path, batch_tokens=1)
    metrics = tune(DPO, resumed, pairs, tmp_path / "run", never)
    assert metrics is not None and whole is not None
    for name in ("loss", "preference_margin", "held_out_margin", "held_out_margin_before", "optimizer_steps"):
        assert metrics[name] == pytest.approx(whole[name], abs=1e-5), name
    for name, weight in resumed.adapter().items():
        assert torch.allclose(weight, weights[name], atol=1e-5), name


def test_a_run_that_diverges_keeps_nothing(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path, learning_rate=1e30, batch_tokens=1)
    with pytest.raises(LightningError, match=r"diverged .* lower tune.dpo.learning_rate"):
        tune(DPO, trainer, Pairs((TOOLS, PLAIN), (), {}), tmp_path / "run", never)
    assert not (tmp_path / "run").exists()


# A run among RL's steps ----------------------------------------------------------------------------------------------


async def test_preferred_weights_are_published_and_rl_goes_on_with_the_next_version(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora", dpo=SETTINGS) as b:
        rollouts = await b.groups("t1", "t2")
        await b.loop(partial(TuningRun, DPO)).run(asyncio.Event())
        live = await b.store.versions.live()
        assert (live.version, live.verified, await b.steps_of(rollouts)) == (1, True, {None})
        await b.loop().run(asyncio.Event(), once=True)
        steps = await b.store.steps.all()
        assert [(s.metrics.get("method"), s.base, s.version) for s in steps] == [("dpo", 0, 1), (None, 1, 2)]
        assert (await b.store.versions.live()).verified


async def test_a_run_that_was_killed_while_it_was_published_is_one_version(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    async with bench(base, tmp_path, dpo=SETTINGS) as b:
        await b.groups("t1", "t2")
        with monkeypatch.context() as broken:
            broken.setattr(VllmServer, "sample", crash)
            with pytest.raises(Crash):
                await b.loop(partial(TuningRun, DPO)).run(asyncio.Event())
        await b.loop(partial(TuningRun, DPO)).run(asyncio.Event())
        assert len(await b.store.steps.all()) == 1
        assert ((await b.store.versions.live()).step, (await b.store.versions.live()).verified) == (1, True)


async def test_offline_it_needs_no_server_and_keeps_the_weights(base: Path, tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:///{tmp_path}/store.db")
    async with opened(store) as database:
        for sibling in range(4):
            await rollout(Store(database), f"r{sibling}", "t1", sibling % 2, (9 + sibling, 1))
    config = Config.model_validate({
        "store": store, "policy": {"model": str(base), "directory": tmp_path / "policy"},
        "trainer": {"report_to": [], "dtype": "float32"}, "tune": {"dpo": {"epochs": 1, "learning_rate": 0.02}},
    })  # fmt: skip
    await train_offline(config, Run("dpo"), Offline(None, tmp_path / "out"), asyncio.Event())
    assert (tmp_path / "out" / "adapter" / "COMPLETE").is_file()


@pytest.mark.parametrize(("pairs", "together"), [(23, 2), (23, 5), (1, 8), (7, 1), (8, 8)])
def test_a_step_takes_nearly_as_many_pairs_as_it_may(base: Path, tmp_path: Path, pairs: int, together: int) -> None:
    config = dpo_config(made(base, tmp_path), tmp_path, pairs, together)
    in_a_pass = config.per_device_train_batch_size
    assert in_a_pass <= together
    assert pairs - in_a_pass < in_a_pass * config.gradient_accumulation_steps <= pairs


async def test_no_pair_is_made_of_two_tenants_rollouts(traffic: Traffic) -> None:
    for name, reward in (("a", 1.0), ("b", 0.0)):
        _, key = await traffic.store.keys.create(name, "agent", Limits(), recording=True, scope="own")
        await traffic.store.rollouts.open([(RolloutName(name, "t", key_id=key.key_id), f"hash of {name}")], {})
        await traffic.rollout(name, "t", reward)
    with pytest.raises(NothingToLearn, match="in none of 2 tasks"):
        await PairReader(TrainerConfig(), traffic.store, 100).read()
