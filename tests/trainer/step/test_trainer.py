"""The trainer on a tiny random Llama: the loss it minimises, what it refuses, what it writes, where it goes on from."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.types import Batch
from support.sections import PolicyConfig, TrainerConfig

torch = pytest.importorskip("torch")

from accelerate.tracking import GeneralTracker  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from lightning_proxy.trainer.step.trainer import LightningTrainer  # noqa: E402
from lightning_proxy.trainer.weights import MARKER  # noqa: E402
from support.ranks import VOCABULARY, batch, make_model, poisoned  # noqa: E402


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_model(directory)
    return directory


def trainer(model: Path, where: Path, **settings: object) -> LightningTrainer:
    config = TrainerConfig.model_validate(
        {"learning_rate": 1e-2, "lora_rank": 4, "report_to": [], "loss_type": "cispo", "dtype": "float32", **settings}
    )
    return LightningTrainer(config, PolicyConfig(model=str(model), directory=where))


def lora_weights(model: PeftModel) -> "torch.Tensor":
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_logprobs_are_those_of_the_model_and_aligned_with_the_tokens(model_directory: Path, tmp_path: Path) -> None:
    learner = trainer(model_directory, tmp_path)
    learner.step(batch(1))
    rows = [(5, 6, 7, 8), (5, 6, 9), (3,), (5, 6, 7, 8)]
    for row, found in zip(rows, learner.logprobs(rows), strict=True):
        with torch.no_grad():
            logits = learner.policy_model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        assert found == pytest.approx([0.0] + [logits[i, t].item() for i, t in enumerate(row[1:])], abs=1e-5)


def test_a_loss_that_is_not_finite_leaves_everything_untouched(model_directory: Path, tmp_path: Path) -> None:
    learner, twin = (trainer(model_directory, tmp_path, max_tokens_per_batch=20) for _ in range(2))
    for each in (learner, twin):
        each.step(batch(1))
    metrics = learner.step(poisoned(batch(2)))
    assert metrics["skipped"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(lora_weights(learner.model), lora_weights(twin.model))
    assert learner.step(batch(3))["loss"] == twin.step(batch(3))["loss"]
    assert torch.equal(lora_weights(learner.model), lora_weights(twin.model))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_resumed_run_is_equal_to_an_unbroken_one_bit_by_bit(
    model_directory: Path, tmp_path: Path, weights: str
) -> None:
    settings = {"lr_scheduler": "constant_with_warmup", "warmup_steps": 4, "weights": weights}
    first = trainer(model_directory, tmp_path, **settings)
    for step in (1, 2):
        first.step(batch(step))
    first.save(tmp_path / "checkpoint-2")
    unbroken = [first.step(batch(step)) for step in (3, 4)]
    second = trainer(model_directory, tmp_path, **settings, seed=5)
    assert second.load(tmp_path / "checkpoint-2") == 2
    resumed = [second.step(batch(step)) for step in (3, 4)]
    for name in ("loss", "grad_norm", "lr"):
        assert [m[name] for m in resumed] == [m[name] for m in unbroken]
    assert torch.equal(lora_weights(first.model), lora_weights(second.model))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_step_in_bfloat16_moves_what_is_trained_and_nothing_else(
    model_directory: Path, tmp_path: Path, weights: str
) -> None:
    learner = trainer(model_directory, tmp_path, dtype="bfloat16", weights=weights)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    metrics = learner.step(batch(1))
    assert metrics["skipped"] == 0.0 and metrics["grad_norm"] > 0
    moved = {name for name, p in learner.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if weights == "full" or "lora_B" in name}, (
        "the first step's A has no slope"
    )


@pytest.mark.parametrize(("now", "lr"), [("auto", [2.5e-3, 5e-3]), (4e-3, [1e-3, 2e-3])])
def test_auto_keeps_the_rate_of_the_checkpoint_and_one_that_is_set_counts(
    model_directory: Path, tmp_path: Path, now: Any, lr: list[float]
) -> None:
    warm = {"lr_scheduler": "constant_with_warmup", "warmup_steps": 4}
    first = trainer(model_directory, tmp_path, learning_rate=1e-2, **warm)
    first.step(batch(1))
    first.save(tmp_path / "checkpoint-1")
    second = trainer(model_directory, tmp_path, learning_rate=now, **warm)
    second.load(tmp_path / "checkpoint-1")
    assert ("the checkpoint's" in second.rate.reason) is (now == "auto")
    assert [second.step(batch(step))["lr"] for step in (2, 3)] == pytest.approx(lr)


def test_the_merged_checkpoint_and_the_adapter_compute_what_the_trainer_does(
    model_directory: Path, tmp_path: Path
) -> None:
    learner = trainer(model_directory, tmp_path)
    learner.step(batch(1))
    before = lora_weights(learner.model).clone()
    for form in ("merged", "adapter"):
        learner.save_weights(tmp_path / form, merged=form == "merged")
    assert torch.equal(before, lora_weights(learner.model))

    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.randint(0, VOCABULARY, (2, 12))
        untrained = base(input_ids=ids).logits
        expected = learner.model(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(input_ids=ids).logits
    assert (expected - untrained).abs().max() > 1e-2
    assert torch.allclose(merged, expected, atol=1e-4)
    assert torch.allclose(adapted, expected, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "w1"
    assert (tmp_path / "merged" / MARKER).exists() and (tmp_path / "adapter" / MARKER).exists()
    sizes = [(d / "model.safetensors").stat().st_size for d in (model_directory, tmp_path / "merged")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_a_trainer_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model"):
        LightningTrainer(TrainerConfig(), PolicyConfig(directory=tmp_path))


def test_a_restarted_trainer_goes_on_in_the_same_tensorboard_run(model_directory: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2), (3,)):
        learner = trainer(model_directory, tmp_path, report_to=["tensorboard"])
        for step in steps:
            learner.trackers.report(learner.step(batch(step)))
        learner.trackers.close()
    (directory,) = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(directory)).Reload()
    assert [event.step for event in events.Scalars("train/optimizer/loss")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "reason"), [("wandb", "pip install wandb"), ("tensorbored", "unknown tracker 'tensorbored', known are")]
)
def test_a_tracker_that_cannot_be_used_is_one_line(name: str, reason: str, tmp_path: Path) -> None:
    if name == "wandb" and find_spec(name):
        pytest.skip("wandb is installed")
    with pytest.raises(ConfigError, match=reason) as error:
        LightningTrainer(TrainerConfig(report_to=[name]), PolicyConfig(model="no such model", directory=tmp_path))
    assert "\n" not in error.value.message


def test_a_tracker_that_breaks_does_not_end_training(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "breaking", False, None

        def log(self, *_: Any, **__: Any) -> None:
            raise OSError("the server is away")

    class NeverBegins(Breaks):
        def start(self) -> None:
            raise OSError("no key\nfor the server")

    learner = trainer(model_directory, tmp_path)
    learner.trackers.trackers.append(Breaks())
    learner.trackers.report(learner.step(batch(1)))
    assert "step 1 did not reach breaking: the server is away" in caplog.text
    learner = trainer(model_directory, tmp_path)
    learner.trackers.trackers.append(NeverBegins())
    with pytest.raises(ConfigError, match="no key for the server"):
        learner.trackers.begin()


def test_a_step_without_samples_is_skipped(model_directory: Path, tmp_path: Path) -> None:
    metrics = trainer(model_directory, tmp_path).step(Batch(1, (), ()))
    assert metrics["skipped"] == 1.0 and metrics["trained_tokens"] == 0
