"""When memory runs out in a pass, the step is what it would have been in smaller passes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.trainer.step.trainer import LightningTrainer
from support.ranks import batch, shared_out, trainer
from support.training import Start

ROOMY = 10_000


def run_out(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")


def with_memory_for(learner: LightningTrainer, most: int, *, backward: bool = False) -> LightningTrainer:
    """Memory for `most` tokens in a pass; with `backward` it lacks when the upper layer has its gradients already."""

    def look_forward(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].numel() > most:
            run_out()

    def look_backward(module: Any, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad and states.shape[1] > most:
            states.register_hook(run_out)

    model = learner.policy_model.base_model
    if backward:
        model.layers[0].register_forward_hook(look_backward)
    else:
        model.register_forward_pre_hook(look_forward, with_kwargs=True)
    return learner


TWO = {"adapters": ("writer",), "max_tokens_per_batch": ROOMY}
FULL = {"weights": "full", "max_tokens_per_batch": 60, "learning_rate": 1e-4}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("settings", [TWO, {**TWO, "gradient_checkpointing": True}, FULL])
def test_a_pass_is_halved_and_the_step_is_the_same(directory: Path, backward: bool, settings: Any) -> None:
    plain, short = (trainer(directory, **settings) for _ in range(2))
    with_memory_for(short, 40, backward=backward)
    given = shared_out(batch(1), plain.weight_sets.names)
    expected, found = plain.step(given), short.step(given)
    assert found["passes_halved"] >= 1 and found["rows_out_of_memory"] == 0 and short.left_out_because is None
    for name in ("loss", "grad_norm", "entropy", "kl", "trained_tokens", "ratio_max", "skipped"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    for name in plain.weight_sets.names:
        for key, weight in plain.adapter(name).items():
            torch.testing.assert_close(short.adapter(name)[key], weight, atol=1e-4, rtol=1e-3)
    following = shared_out(batch(2), plain.weight_sets.names)
    assert short.step(following)["passes_halved"] == 0, "the next step begins with passes that fit"


def test_a_sample_that_does_not_fit_alone_is_left_out_and_named(directory: Path) -> None:
    samples = sorted(batch(1).samples, key=lambda s: len(s.token_ids))
    given = replace(batch(1), samples=(*samples[:9], samples[-1]))
    learner = with_memory_for(trainer(directory), len(samples[-1].token_ids) - 2)
    metrics = learner.step(given)
    assert metrics["rows_out_of_memory"] == 1 and not metrics["skipped"]
    assert metrics["trained_tokens"] == sum(s.trained_tokens for s in samples[:9])
    named = f"1 row of rollout {samples[-1].rollout_id} took too much memory"
    assert learner.left_out_because is not None and named in learner.left_out_because


async def test_rollouts_that_do_not_fit_are_not_offered_again(bench: Start) -> None:
    async with bench() as b:
        rollouts = await b.groups("t1", "t2")
        loop = b.loop()
        with_memory_for(b.trainer, 1)
        await loop.resume()
        assert await loop.train_once()
        assert not await loop.train_once()
        assert await b.steps_of(rollouts) == {1}
        last = await b.last()
        assert "took too much memory" in last.metrics["left_out_because"]


async def test_between_steps_no_memory_is_kept_from_a_vllm(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    async with bench("lora") as b:
        loop, logprobs = b.loop(), b.trainer.logprobs

        def noted(*args: Any, **options: Any) -> Any:
            scores = logprobs(*args, **options)
            given_back.append(False)
            return scores

        def empty_cache() -> None:
            assert all(p.grad is None for p in b.trainer.weight_sets.parameters())
            given_back.append(True)

        monkeypatch.setattr("torch.cuda.empty_cache", empty_cache)
        b.trainer.logprobs = noted
        await b.groups("t1", "t2")
        await loop.resume()
        assert await loop.train_once()
        after_step, *scored, at_last = given_back
        assert after_step and scored and not any(scored) and at_last, "and after its weights were verified"


def test_samples_that_are_all_the_same_are_halved_down_to_one(directory: Path) -> None:
    """Their trees are as large as that of one of them, so no half is smaller."""
    (sample, *_) = batch(1).samples
    learner = with_memory_for(trainer(directory), 1)
    given = replace(batch(1), samples=tuple(replace(sample, rollout_id=f"r{i}") for i in range(3)))
    metrics = learner.step(given)
    assert (metrics["skipped"], metrics["rows_out_of_memory"], metrics["passes_halved"]) == (1, 3, 2)
    assert learner.skipped_because is not None and "took too much memory" in learner.skipped_because
