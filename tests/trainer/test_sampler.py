"""A server whose log-probabilities are not those of the weights that it should serve: a step sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.commands.show.steps import step_line
from lightning_proxy.core.records import Choice, Reward
from support.training import Bench, bench

STEP = {"group_size": 8, "tasks_per_step": 4}
TOKENS = 8  # of an answer: 256 in a step


async def answered(
    b: Bench, version: int, *, heat: float = 1.0, raw: bool = False, model: Any = None, tokens: int = TOKENS
) -> None:
    """A step's rollouts, whose agent asks for a temperature. With `raw` the server reports what it had before it."""
    torch.manual_seed(version)
    name = "base" if version == 0 or b.mode == "merged" else f"policy-v{version}"
    for task in ("t1", "t2", "t3", "t4") * STEP["group_size"]:
        choice = sampled(model or b.server.models[name], heat, raw, tokens)
        rollout_id = await b.record(task, choice, version, temperature=heat)
        await b.store.rewards.post([Reward(rollout_id, len(set(choice.token_ids)) / tokens)], None, b"")


@torch.no_grad()
def sampled(model: Any, heat: float, raw: bool, tokens: int) -> Choice:
    ids, logprobs = [0, 5, 6], []
    for _ in range(tokens):
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        hot = (logits / heat).log_softmax(-1)
        ids.append(int(torch.multinomial(hot.exp(), 1)))
        logprobs.append(float((logits.log_softmax(-1) if raw else hot)[ids[-1]]))
    return Choice(0, tuple(ids[3:]), tuple(logprobs), "stop")


async def step(b: Bench, **trainer: Any) -> Mapping[str, Any]:
    """The metrics of a step of a trainer that was just started."""
    loop = b.loop(**trainer)
    before = await b.store.steps.last()
    await loop.run(asyncio.Event(), once=True)
    last = await b.store.steps.last()
    assert last is not None and last.step == (before.step if before else 0) + 1
    return last.metrics


async def live(b: Bench) -> int:
    return (await b.store.versions.live()).version


async def test_few_tokens_and_rollouts_of_earlier_versions_say_nothing_of_the_sampler(
    base: Path, tmp_path: Path
) -> None:
    async with bench(base, tmp_path, **STEP) as b:
        await answered(b, 0, heat=0.6, raw=True, tokens=TOKENS - 1)
        assert (await step(b))["version"] == 1
        await answered(b, 0, heat=0.6, raw=True)
        stale = await step(b)
        assert (stale["version"], stale["staleness_mean"], stale["sampler_difference"]) == (2, 1, 0)


async def test_weights_that_moved_without_a_new_version_are_not_taken_for_a_wrong_sampler(
    base: Path, tmp_path: Path
) -> None:
    async with bench(base, tmp_path, "lora", policy={"promotion": "gated"}, **STEP, learning_rate=0.5) as b:
        for _ in range(3):
            await answered(b, 0)
            moved = await step(b)  # its version is not published, as another one is tested
        assert moved["kl"] > 0.01 and (moved["skipped"], moved["sampler_difference"]) == (0, 0)


NOTHING = {"mask": {"ratio_low": 0.5, "ratio_high": 5.0}, "loss": "icepop"}


async def test_a_mask_that_drops_all_tokens_is_named_and_nothing_is_published(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, **NOTHING) as b:
        for i in range(8):
            unlikely = Choice(0, (2, 3, 4, 5), (-9.0,) * 4, "stop")
            rollout_id = await b.record(f"t{i % 2}", unlikely, 0)
            await b.store.rewards.post([Reward(rollout_id, float(i > 3))], None, b"")
        found = await step(b)
        assert (found["masked_tokens"], found["trained_tokens"], found["skipped"]) == (32, 32, 1) and not await live(b)
        assert "32 masked" in (line := step_line(1, found).plain) and "warning: masked_tokens" in line
        why = "32 of 32 tokens with an advantage teach nothing: trainer.loss icepop"
        assert str(found["skipped_because"]).startswith(why)


@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("heat", [1.0, 0.3])
async def test_rounding_to_bfloat16_is_no_wrong_sampler(base: Path, tmp_path: Path, weights: str, heat: float) -> None:
    """The server computes in float32, so that all of the trainer's rounding shows."""
    async with bench(base, tmp_path, dtype="bfloat16", weights=weights, **STEP) as b:
        await answered(b, 0, heat=heat)
        found = await step(b)
        assert found["version"] == 1 and 1e-4 < found["sampler_difference"] < 0.1
        await answered(b, 1, heat=0.6, raw=True)
        assert (await step(b))["skipped"] == 1
