"""What each method of fine-tuning computes, that it goes on after a stop or a kill, and what becomes of its weights.

`tests/reference/test_gradients.py` compares the gradients with float64 ones.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_proxy.core.errors import ConfigError, LightningError, StoreUnavailable
from lightning_proxy.features.tune.lessons import Example, Lessons
from lightning_proxy.features.tune.run import BATCH_TOKENS, TuningRun, tune
from lightning_proxy.serving.vllm import VllmServer
from lightning_proxy.trainer.plugins import TrainerHooks
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Sample
from lightning_proxy.trainer.weights import MARKER
from support.sections import PolicyConfig, TrainerConfig
from support.training import OWN_ADAPTERS, bench

METHODS = ("sft", "dpo", "kto")
OF_TIME = {"step_s", "trained_tokens_per_s", "computed_tokens_per_s"}
RATES: dict[str, Any] = {name: {"learning_rate": 0.005, "epochs": 2} for name in METHODS}


def row(name: str, context: tuple[int, ...], *answer: int) -> Sample:
    ids, mask = (*context, *answer), (0,) * len(context) + (1,) * len(answer)
    zeros = (0.0,) * len(ids)
    return Sample(name, name, ids, mask, zeros, zeros, (1.0,) * len(ids), (name,))


ROWS = tuple(row(str(n), (0, 5, 6), 9 + n, 8 + n, 1) for n in range(6))
LESSONS = {
    "sft": Lessons(tuple(Example((one,)) for one in ROWS), (Example((ROWS[0],)),), {}),
    "dpo": Lessons(tuple(map(Example, zip(ROWS[::2], ROWS[1::2], strict=True))), (Example(ROWS[:2]),), {}),
    "kto": Lessons(tuple(Example((one,), n % 2 == 0) for n, one in enumerate(ROWS)), (), {}),
}


def made(base: Path, directory: Path, method: str, **section: Any) -> LightningTrainer:
    settings = {"report_to": [], "dtype": "float32", "group_size": 2, "tasks_per_step": 1}
    config = TrainerConfig.model_validate({**settings, method: {"learning_rate": 0.02, **section}})
    return LightningTrainer(config, PolicyConfig(model=str(base), directory=directory))


def never() -> bool:
    return False


# What it computes ----------------------------------------------------------------------------------------------------


def test_the_loss_of_sft_is_the_cross_entropy_of_the_answers_tokens(base: Path, tmp_path: Path) -> None:
    rows = (row("a", (0, 5, 6), 10, 11, 1), row("b", (0, 5), 12, 1), row("c", (0, 9, 8, 7), 13, 14, 15, 16, 1))
    model, total = AutoModelForCausalLM.from_pretrained(base), 0.0
    for sample in rows:
        ids, mask = torch.tensor([sample.token_ids]), torch.tensor([sample.mask])
        with torch.no_grad():
            total += float(model(ids, labels=ids.masked_fill(mask == 0, -100)).loss) * sum(sample.mask)
    lessons = tuple(Example((one,)) for one in rows)
    trainer = made(base, tmp_path, "sft", epochs=40)
    metrics = tune("sft", trainer, Lessons(lessons, lessons, {}), tmp_path / "run", never)
    assert metrics is not None and metrics["held_out_loss_before"] == pytest.approx(total / 10, abs=1e-5)
    counts = ("trained_tokens", "computed_tokens", "optimizer_steps", "token_accuracy")
    assert [metrics[name] for name in counts] == [400, 760, 40, 1.0]
    assert metrics["held_out_loss"] < 0.1
    assert metrics["loss"] == pytest.approx(metrics["held_out_loss"], rel=0.2)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_held_out_answers_that_are_better_become_the_likelier_ones(
    base: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BATCH_TOKENS, method, 64)
    chance, lessons = random.Random(2), list[Example]()
    for n in range(80):  # better answers have tokens of the upper half, others of the lower
        better, worse = (row(str(n), (0, n % 22), *chance.choices(half, k=4)) for half in (range(13, 24), range(2, 13)))
        lessons += [Example((better, worse))] if method == "dpo" else [Example((better,)), Example((worse,), False)]
    held = len(lessons) * 3 // 4
    given = Lessons(tuple(lessons[:held]), tuple(lessons[held:]), {})
    trainer = made(base, tmp_path, method, beta=0.5, epochs=6)
    metrics = tune(method, trainer, given, tmp_path / "run", never)
    assert metrics is not None
    assert metrics["held_out_accuracy_before"] < 0.8 < 0.9 <= metrics["held_out_accuracy"]
    assert metrics["held_out_margin"] > metrics["held_out_margin_before"] + 5 and metrics["loss"] < 0.4
    if method == "dpo":
        assert metrics["preference_margin"] > 1 and metrics["preference_accuracy"] > 0.95


def test_a_run_that_diverges_keeps_nothing(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BATCH_TOKENS, "dpo", 1)
    trainer = made(base, tmp_path, "dpo", learning_rate=1e30)
    with pytest.raises(LightningError, match=r"diverged .* lower tune.dpo.learning_rate"):
        tune("dpo", trainer, LESSONS["dpo"], tmp_path / "run", never)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "epochs"),
    [
        ("dpo", 2),  # one routine runs all of them
        *(pytest.param(*one, marks=pytest.mark.long) for one in (("sft", 2), ("kto", 1))),
    ],
)
def test_a_run_goes_on_from_each_of_its_checkpoints_and_where_it_was_stopped(
    base: Path, tmp_path: Path, method: str, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BATCH_TOKENS, method, 6)

    def run(out: Path, stopped: Callable[[], bool] = never) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        trainer = made(base, tmp_path, method, epochs=epochs, learning_rate=0.01)
        metrics = tune(method, trainer, LESSONS[method], out, stopped)
        assert set(trainer.model.peft_config) == {"default"}
        return {name: value for name, value in (metrics or {}).items() if name not in OF_TIME}, trainer.adapter()

    whole, stop_at, asked, left = tmp_path / "whole", tmp_path / "stopped", iter([False, True]), list[Path]()

    def keeps_what_a_kill_would_leave() -> bool:
        """Is asked after each step, before its checkpoint is written."""
        if any(whole.glob("checkpoint-*")):
            left.append(tmp_path / f"killed-{len(left)}")
            shutil.copytree(whole, left[-1])
        return False

    metrics, weights = run(whole, keeps_what_a_kill_would_leave)
    assert run(stop_at, lambda: next(asked, True))[0] == {}
    assert left
    for directory in (*left, stop_at, whole):  # `whole` was killed after its last checkpoint and before its end
        done = max(int(one.parent.name.rpartition("-")[2]) for one in directory.glob(f"checkpoint-*/{MARKER}"))
        left_to_do = list[None]()
        again, same = run(directory, lambda: bool(left_to_do.append(None)))  # noqa: B023
        assert len(left_to_do) == metrics["optimizer_steps"] - done, directory.name
        assert again == pytest.approx(metrics, abs=1e-5), directory.name
        assert all(torch.allclose(weight, weights[name], atol=1e-6) for name, weight in same.items()), directory.name


# A run among RL's steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dpo", *(pytest.param(one, marks=pytest.mark.long) for one in ("sft", "kto"))])
async def test_tuned_weights_are_published_and_rl_goes_on_with_every_rollout(
    method: str, base: Path, tmp_path: Path
) -> None:
    async with bench(base, tmp_path, "lora", **RATES) as b:
        rollouts, keep = await b.groups("t1", "t2"), AsyncMock(return_value=set())
        await b.loop(partial(TuningRun, method, hooks=TrainerHooks(keep=keep))).run(asyncio.Event())
        assert keep.await_count == 1, "the best version keeps its files"
        live = await b.store.versions.live()
        assert (live.version, live.verified, await b.steps_of(rollouts)) == (1, True, {None}), "nothing is claimed"
        assert not any((tmp_path / "policy" / method).iterdir()), "a finished run leaves nothing behind"
        await b.loop().run(asyncio.Event(), once=True)
        steps = await b.store.steps.all()
        assert [(s.metrics.get("method"), s.base, s.version) for s in steps] == [(method, 0, 1), (None, 1, 2)]
        assert await b.steps_of(rollouts) == {2}
        await b.loop(partial(TuningRun, method)).run(asyncio.Event())
        assert [s.metrics.get("method") for s in await b.store.steps.all()] == [method, None, method]


@pytest.mark.parametrize("method", METHODS)
async def test_what_a_method_makes_of_all_weights_is_published(
    method: str, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = {"base_url": "http://127.0.0.1:1/v1"}
    async with bench(base, tmp_path, weights="full", learning_rate=0.005, teacher=teacher, **RATES) as b:
        await b.groups("t1", "t2")
        await b.loop(partial(TuningRun, method)).run(asyncio.Event())
        assert f"the teacher is only used in RL: --method {method} ignores it" in caplog.text
        live = await b.store.versions.live()
        assert (live.version, live.publish, live.verified) == (1, "merged", True)
        (step,) = await b.store.steps.all()
        published, before = weights_in(Path(str(live.path))), weights_in(base)
        ours = b.trainer.adapter()
        assert all(torch.equal(weight, ours[name]) for name, weight in published.items())
        assert not any(torch.equal(weight, before[name]) for name, weight in published.items())
        b.loop()
        b.trainer.load(Path(str(step.checkpoint)))
        assert all(torch.equal(w, ours[name]) for name, w in b.trainer.adapter().items())


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


@pytest.mark.parametrize("moment", ["commit", "publish"])
async def test_a_run_that_was_killed_while_it_was_concluded_is_one_version(
    base: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    async with bench(base, tmp_path, **RATES) as b:
        await b.groups("t1", "t2")
        run = b.loop(partial(TuningRun, "sft"))
        with monkeypatch.context() as broken:
            broken.setattr(*{"commit": (b.store.steps, "trained"), "publish": (VllmServer, "sample")}[moment], crash)
            with pytest.raises(Crash):
                await run.run(asyncio.Event())
        weights = b.trainer.adapter()
        await b.loop(partial(TuningRun, "sft")).run(asyncio.Event())
        (step,), live = await b.store.steps.all(), await b.store.versions.live()
        assert (live.step, live.verified) == (step.step, True)
        assert all(torch.allclose(w, weights[name], atol=1e-6) for name, w in b.trainer.adapter().items())


async def test_a_stopped_run_is_resumed_with_its_own_lessons_and_starts_over_where_they_have_changed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[int, bool]]()

    def stopped(_: str, __: Any, lessons: Lessons, directory: Path, ___: Any) -> None:
        seen.append((len(lessons.train), (directory / "checkpoint").exists()))
        (directory / "checkpoint").touch()

    monkeypatch.setattr("lightning_proxy.features.tune.run.tune", stopped)
    async with bench(base, tmp_path, **RATES) as b:
        (_, learned, *_), others = await b.groups("t1"), {"sft": RATES["sft"] | {"epochs": 3}}
        for change in ("", "more", "settings", "deleted"):
            if change == "more":
                await b.groups("t2")
            elif change == "deleted":
                await b.store.rollouts.delete(learned)
            settings = others if change in ("settings", "deleted") else {}
            await b.loop(partial(TuningRun, "sft"), **settings).run(asyncio.Event())
        assert seen == [(2, False), (2, True), (4, False), (3, False)]


async def test_a_store_that_cannot_be_written_at_the_end_of_a_run_is_waited_for(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    monkeypatch.setattr("lightning_proxy.features.tune.lessons.HELD_OUT", 0.5)
    async with bench(base, tmp_path, **RATES | {"sft": {"epochs": 2}}) as b:
        await b.groups("t1", "t2")
        claim, failures = b.store.steps.claim, [StoreUnavailable("database is locked")]

        async def locked_once(*args: Any) -> int:
            if failures:
                raise failures.pop()
            return await claim(*args)

        monkeypatch.setattr(b.store.steps, "claim", locked_once)
        run = b.loop(partial(TuningRun, "sft"))
        step = await run.run(asyncio.Event())
        assert step is not None and not failures and (step.step, step.version) == (1, 1)
        assert step.metrics["held_out_loss_before"] > step.metrics["held_out_loss"], "it began with the first weights"


async def test_adapters_of_agents_are_not_fine_tuned(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora", policy=OWN_ADAPTERS) as b:
        with pytest.raises(ConfigError, match="one adapter for all agents"):
            b.loop(partial(TuningRun, "sft"))


async def test_nothing_is_fine_tuned_while_publication_is_stopped(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.collapse.STEPS", 1)
    async with bench(base, tmp_path, collapse={"max_kl": 1e-9}) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        with pytest.raises(LightningError, match="publishing has stopped: .* `lightning-proxy policy promote 0`"):
            await b.loop(partial(TuningRun, "sft")).run(asyncio.Event())
        assert len(await b.store.steps.all()) == 1
