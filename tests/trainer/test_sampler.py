"""A server whose log-probabilities are not those of the weights that it should serve: a step sees it."""

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_proxy.commands.show.steps import step_line
from lightning_proxy.core.records import Choice
from support.training import Bench, Start, sample_varied

STEP = {"group_size": 8, "tasks_per_step": 4}
TOKENS = 8  # of an answer: 256 in a step


async def answered(b: Bench, version: int, *, heat: float = 1.0, raw: bool = False, tokens: int = TOKENS) -> None:
    """A step's rollouts, whose agent asks for a temperature. With `raw` the server reports what it had before it."""
    b.server.processed_logprobs = not raw
    await sample_varied(b, version, STEP["group_size"], tokens, heat)


async def step(b: Bench) -> Mapping[str, Any]:
    """The metrics of a step of a trainer that was just started."""
    before = len(await b.store.steps.all())
    await b.train()
    last = await b.last()
    assert last.step == before + 1
    return last.metrics


async def test_few_tokens_and_rollouts_of_earlier_versions_say_nothing_of_the_sampler(bench: Start) -> None:
    async with bench(**STEP) as b:
        await answered(b, 0, heat=0.6, raw=True, tokens=TOKENS - 1)
        assert (await step(b))["version"] == 1
        await answered(b, 0, heat=0.6, raw=True)
        stale = await step(b)
        assert (stale["version"], stale["staleness_mean"], stale["sampler_difference"]) == (2, 1, 0)


async def test_weights_that_moved_without_a_new_version_are_not_taken_for_a_wrong_sampler(bench: Start) -> None:
    async with bench("lora", policy={"promotion": "gated"}, **STEP, learning_rate=0.5) as b:
        for _ in range(3):
            await answered(b, 0)
            moved = await step(b)  # its version is not published, as another one is tested
        assert moved["kl"] > 0.01 and (moved["skipped"], moved["sampler_difference"]) == (0, 0)


async def test_a_mask_that_drops_all_tokens_is_named_and_nothing_is_published(bench: Start) -> None:
    async with bench(mask={"ratio_low": 0.5, "ratio_high": 5.0}, loss="icepop") as b:
        for i in range(8):
            unlikely = Choice(0, (2, 3, 4, 5), (-9.0,) * 4, "stop")
            await b.reward(await b.record(f"t{i % 2}", unlikely, 0), float(i > 3))
        found = await step(b)
        assert (found["masked_tokens"], found["trained_tokens"], found["skipped"]) == (32, 32, 1)
        assert (await b.live())[0] == 0
        assert "32 masked" in (line := step_line(1, found).plain) and "warning: masked_tokens" in line
        why = "32 of 32 tokens with an advantage teach nothing: trainer.loss icepop"
        assert str(found["skipped_because"]).startswith(why)


@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("heat", [1.0, 0.3])
async def test_rounding_to_bfloat16_is_no_wrong_sampler(bench: Start, weights: str, heat: float) -> None:
    """The server computes in float32, so that all of the trainer's rounding shows."""
    async with bench(dtype="bfloat16", weights=weights, **STEP) as b:
        await answered(b, 0, heat=heat)
        found = await step(b)
        assert found["version"] == 1 and 1e-4 < found["sampler_difference"] < 0.1
        await answered(b, 1, heat=0.6, raw=True)
        assert (await step(b))["skipped"] == 1
