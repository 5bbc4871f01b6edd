"""Kahneman-Tversky optimization: which rows it learns from, what it computes, and that it goes on."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import Choice, Reward
from lightning_proxy.features.tune.lessons import NothingToLearn
from lightning_proxy.features.tune.preferences import (
    KTO,
    Thumb,
    ThumbReader,
    Thumbs,
    ThumbTrainer,
    collate_thumbs,
    kto_config,
    thumb_dataset,
)
from lightning_proxy.features.tune.run import TuningRun, tune
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Sample
from support.sections import PolicyConfig, TrainerConfig
from support.training import bench

SETTINGS = {"learning_rate": 0.02, "beta": 0.5, "epochs": 6, "batch_tokens": 64, "held_out": 0.25}


async def test_every_rewarded_rollout_has_a_thumb_and_siblings_are_not_needed(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        up, down = await b.rollout("t1", 1.0), await b.rollout("t2", 0.0)
        lone = await b.record(None, Choice(0, (9, 1), (-1.0, -1.0), "stop"), 0)
        await b.store.rewards.post([Reward(lone, 0.3)], None, b"")

        async def read(**kto: Any) -> dict[str, bool]:
            config = TrainerConfig.model_validate({"kto": {"held_out": 0.0, **kto}})
            thumbs = await ThumbReader(config, b.store, 100).read()
            return {thumb.sample.rollout_id: thumb.up for thumb in thumbs.train}

        assert await read() == {up: True, down: False, lone: True}
        assert await read(threshold=0.5) == {up: True, down: False, lone: False}


async def test_one_row_is_too_few(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        with pytest.raises(NothingToLearn, match="0 rollouts .* with 0 rows to learn from, and KTO needs two"):
            await ThumbReader(TrainerConfig(), Store(database), 100).read()


def thumb(name: str, up: bool, prompt: tuple[int, ...], *parts: tuple[int, tuple[int, ...]]) -> Thumb:
    """A row whose parts after the prompt are sampled or not."""
    pieces = [(0, prompt), *parts]
    ids = tuple(token for _, tokens in pieces for token in tokens)
    mask = tuple(sampled for sampled, tokens in pieces for _ in tokens)
    zeros = (0.0,) * len(ids)
    return Thumb(Sample(name, name, ids, mask, zeros, zeros, (1.0,) * len(ids), (name,)), up)


ROWS = (
    thumb("a", True, (0, 5, 6), (1, (9, 10)), (0, (7, 8)), (1, (11, 1))),
    thumb("b", False, (0, 4), (1, (12, 13, 1))),
    thumb("c", True, (0, 3), (1, (14, 1))),
)


def made(base: Path, directory: Path, **kto: Any) -> LightningTrainer:
    settings = {"report_to": [], "dtype": "float32", "group_size": 2, "tasks_per_step": 1}
    config = TrainerConfig.model_validate({**settings, "kto": {**SETTINGS, **kto}})
    return LightningTrainer(config, PolicyConfig(model=str(base), directory=directory))


def answer_logprob(model: Any, ids: Any, mask: Any) -> torch.Tensor:
    """The log-probability of exactly the sampled tokens, computed alone and unpadded."""
    logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return torch.stack([logp[i - 1, ids[i]] for i, sampled in enumerate(mask) if sampled]).sum()


def test_loss_and_gradient_are_those_of_kto_over_the_sampled_tokens_alone(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path, up_weight=2.0, down_weight=3.0)
    rows = thumb_dataset(trainer, ROWS)
    assert rows[1]["KL_ids"] == [0, 4, 9, 10, 7, 8, 11, 1] and rows[1]["KL_mask"] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert rows[0]["KL_ids"] == [0, 5, 6, 14, 1]
    kto = ThumbTrainer(
        model=trainer.model, args=kto_config(trainer, tmp_path, 3), train_dataset=rows, data_collator=collate_thumbs,
        processing_class=trainer.tokenizer,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():  # away from the reference, where LoRA's gradient is half zero
        for parameter in trainer.weight_sets.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss = kto.compute_loss(kto.model.eval(), collate_thumbs(list(rows)))
    loss.backward()
    gradients = [p.grad.clone() for p in trainer.weight_sets.parameters()]
    trainer.model.zero_grad()
    model = trainer.policy_model
    grown = [answer_logprob(model, r["ids"], r["mask"]) - r["ref_logps"] for r in rows]
    lent = [answer_logprob(model, r["KL_ids"], r["KL_mask"]).detach() - r["ref_KL_logps"] for r in rows]
    kl = torch.stack(lent).mean().clamp(min=0)
    sides = [1 if r["label"] else -1 for r in rows]
    weights = [2.0 if side == 1 else 3.0 for side in sides]
    losses = [w * (1 - torch.sigmoid(0.5 * s * (g - kl))) for w, s, g in zip(weights, sides, grown, strict=True)]
    own = torch.stack(losses).mean()
    own.backward()
    assert float(loss.detach()) == pytest.approx(float(own.detach()), abs=1e-5)
    for gradient, parameter in zip(gradients, trainer.weight_sets.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-5)


def test_held_out_answers_with_thumbs_up_become_the_likelier_ones(base: Path, tmp_path: Path) -> None:
    chance = random.Random(1)

    def one(n: int) -> Thumb:
        """Thumbs up have tokens of the upper half, thumbs down of the lower."""
        up = n % 2 == 0
        answer = tuple(chance.randrange(*((13, 24) if up else (2, 13))) for _ in range(4))
        return thumb(str(n), up, (0, chance.randrange(2, 24), chance.randrange(2, 24)), (1, answer))

    rows = tuple(one(n) for n in range(160))
    metrics = tune(KTO, made(base, tmp_path), Thumbs(rows[:120], rows[120:], {}), tmp_path / "run", lambda: False)
    assert metrics is not None
    assert metrics["held_out_accuracy_before"] < 0.8 < 0.9 <= metrics["held_out_accuracy"]
    assert metrics["held_out_margin"] > metrics["held_out_margin_before"] + 5
    assert metrics["loss"] < 0.4


def test_a_stopped_run_goes_on_to_the_same_weights(base: Path, tmp_path: Path) -> None:
    thumbs = Thumbs(ROWS, ROWS[:2], {})
    trainer = made(base, tmp_path / "whole", batch_tokens=1)
    whole = tune(KTO, trainer, thumbs, tmp_path / "whole" / "run", lambda: False)
    weights = trainer.adapter()
    asked = iter([False] * 5 + [True] * 20)
    assert tune(KTO, made(base, tmp_path, batch_tokens=1), thumbs, tmp_path / "run", lambda: next(asked)) is None
    resumed = made(base, tmp_path, batch_tokens=1)
    metrics = tune(KTO, resumed, thumbs, tmp_path / "run", lambda: False)
    assert metrics is not None and whole is not None
    for name in ("loss", "held_out_margin", "held_out_margin_before", "optimizer_steps"):
        assert metrics[name] == pytest.approx(whole[name], abs=1e-5), name
    for name, weight in resumed.adapter().items():
        assert torch.allclose(weight, weights[name], atol=1e-5), name


async def test_the_weights_are_published_and_verified(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora", kto=SETTINGS) as b:
        rollouts = await b.groups("t1", "t2")
        await b.loop(partial(TuningRun, KTO)).run(asyncio.Event())
        live = await b.store.versions.live()
        assert (live.version, live.verified, await b.steps_of(rollouts)) == (1, True, {None})
        (step,) = await b.store.steps.all()
        assert (step.metrics["method"], step.metrics["thumbs_up"]) == ("kto", 4)
