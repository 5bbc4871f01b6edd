"""The trainer on a tiny random Llama: the loss it minimises, what it refuses, what it writes, where it goes on from."""

import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch
from lightning_proxy.trainer.weights import MARKER
from support import training
from support.ranks import VOCABULARY, batch, poisoned
from support.sections import PolicyConfig, TrainerConfig

Learner = partial[LightningTrainer]
WARM = {"lr_scheduler": "constant_with_warmup", "warmup_steps": 4}


@pytest.fixture
def learner(directory: Path, tmp_path: Path) -> Learner:
    return partial(training.learner, directory / "model", tmp_path)


def weights_of(trainer: LightningTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def test_logprobs_are_those_of_the_model_and_aligned_with_the_tokens(learner: Learner) -> None:
    trainer = learner()
    trainer.step(batch(1))
    rows = [(5, 6, 7, 8), (5, 6, 9), (3,), (5, 6, 7, 8)]
    for row, found in zip(rows, trainer.logprobs(rows), strict=True):
        with torch.no_grad():
            logits = trainer.policy_model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        assert found == pytest.approx([0.0] + [logits[i, t].item() for i, t in enumerate(row[1:])], abs=1e-5)


def test_a_loss_that_is_not_finite_or_no_samples_leave_everything_untouched(learner: Learner) -> None:
    trainer, twin = (learner(max_tokens_per_batch=20) for _ in range(2))
    for each in (trainer, twin):
        each.step(batch(1))
    metrics = trainer.step(poisoned(batch(2)))
    assert metrics["skipped"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(weights_of(trainer), weights_of(twin))
    empty = trainer.step(Batch(3, (), ()))
    assert (empty["skipped"], empty["trained_tokens"]) == (1.0, 0)
    assert trainer.step(batch(4))["loss"] == twin.step(batch(4))["loss"]
    assert torch.equal(weights_of(trainer), weights_of(twin))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_resumed_run_is_equal_to_an_unbroken_one_bit_by_bit(learner: Learner, tmp_path: Path, weights: str) -> None:
    first = learner(**WARM, weights=weights)
    for step in (1, 2):
        first.step(batch(step))
    first.save(tmp_path / "checkpoint-2")
    unbroken = [first.step(batch(step)) for step in (3, 4)]
    second = learner(**WARM, weights=weights, seed=5)
    assert second.load(tmp_path / "checkpoint-2") == 2
    resumed = [second.step(batch(step)) for step in (3, 4)]
    for name in ("loss", "grad_norm", "lr"):
        assert [m[name] for m in resumed] == [m[name] for m in unbroken]
    assert torch.equal(weights_of(first), weights_of(second))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_step_in_bfloat16_moves_what_is_trained_and_nothing_else(learner: Learner, weights: str) -> None:
    trainer = learner(dtype="bfloat16", weights=weights)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    metrics = trainer.step(batch(1))
    assert metrics["skipped"] == 0.0 and metrics["grad_norm"] > 0
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if weights == "full" or "lora_B" in name}, "A has no slope at first"


@pytest.mark.parametrize(("now", "lr"), [("auto", [2.5e-3, 5e-3]), (4e-3, [1e-3, 2e-3])])
def test_auto_keeps_the_rate_of_the_checkpoint_and_one_that_is_set_counts(
    learner: Learner, tmp_path: Path, now: Any, lr: list[float]
) -> None:
    first = learner(**WARM)
    first.step(batch(1))
    first.save(tmp_path / "checkpoint-1")
    second = learner(learning_rate=now, **WARM)
    second.load(tmp_path / "checkpoint-1")
    assert ("the checkpoint's" in second.rate.reason) is (now == "auto")
    assert [second.step(batch(step))["lr"] for step in (2, 3)] == pytest.approx(lr)


def test_the_merged_checkpoint_and_the_adapter_compute_what_the_trainer_does(
    learner: Learner, directory: Path, tmp_path: Path
) -> None:
    model, trainer = directory / "model", learner()
    trainer.step(batch(1))
    before = weights_of(trainer).clone()
    for form in ("merged", "adapter"):
        trainer.save_weights(tmp_path / form, merged=form == "merged")
    assert torch.equal(before, weights_of(trainer))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.randint(0, VOCABULARY, (2, 12))
        untrained = base(input_ids=ids).logits
        expected = trainer.model(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(input_ids=ids).logits
    assert (expected - untrained).abs().max() > 1e-2
    assert torch.allclose(merged, expected, atol=1e-4)
    assert torch.allclose(adapted, expected, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "w1"
    assert (tmp_path / "merged" / MARKER).exists() and (tmp_path / "adapter" / MARKER).exists()
    sizes = [(d / "model.safetensors").stat().st_size for d in (model, tmp_path / "merged")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_a_restarted_trainer_goes_on_in_the_same_tensorboard_run(learner: Learner, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2), (3,)):
        trainer = learner(report_to=["tensorboard"])
        for step in steps:
            trainer.trackers.report(trainer.step(batch(step)))
        trainer.trackers.close()
    (directory,) = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(directory)).Reload()
    assert [event.step for event in events.Scalars("train/optimizer/loss")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "reason"), [("wandb", "pip install wandb"), ("tensorbored", "unknown tracker 'tensorbored', known are")]
)
def test_a_tracker_that_cannot_be_used_or_no_model_is_one_line(name: str, reason: str, tmp_path: Path) -> None:
    if name == "wandb" and find_spec(name):
        pytest.skip("wandb is installed")
    with pytest.raises(ConfigError, match=reason) as error:
        LightningTrainer(TrainerConfig(report_to=[name]), PolicyConfig(model="no such model", directory=tmp_path))
    assert "\n" not in error.value.message
    with pytest.raises(ConfigError, match=r"policy\.model"):
        LightningTrainer(TrainerConfig(), PolicyConfig(directory=tmp_path))


def test_a_tracker_that_breaks_does_not_end_training(learner: Learner, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "breaking", False, None

        def log(self, *_: Any, **__: Any) -> None:
            raise OSError("the server is away")

    class NeverBegins(Breaks):
        def start(self) -> None:
            raise OSError("no key\nfor the server")

    trainer = learner()
    trainer.trackers.trackers.append(Breaks())
    trainer.trackers.report(trainer.step(batch(1)))
    assert "step 1 did not reach breaking: the server is away" in caplog.text
    trainer = learner()
    trainer.trackers.trackers.append(NeverBegins())
    with pytest.raises(ConfigError, match="no key for the server"):
        trainer.trackers.begin()
