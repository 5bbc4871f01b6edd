"""The trainer on a tiny random Llama: what it leaves alone, what it writes, and where it goes on from; full disks."""

import errno
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_proxy.core.config.section import feature_sections
from lightning_proxy.core.errors import ConfigError, NotSaved
from lightning_proxy.trainer.checkpoint import atomic_directory
from lightning_proxy.trainer.step.trainer import STATE_FILE, LightningTrainer
from lightning_proxy.trainer.types import Batch
from support import ranks
from support.models import save_small_model
from support.ranks import batch, make_model, poisoned, shared_out
from support.sections import PolicyConfig, TrainerConfig

Learner = partial[LightningTrainer]
WARM = {"lr_scheduler": "constant_with_warmup", "warmup_steps": 4}


@pytest.fixture
def learner(directory: Path, tmp_path: Path) -> Learner:
    return partial(ranks.learner, directory / "model", tmp_path)


def weights_of(trainer: LightningTrainer) -> torch.Tensor:
    weights = {f"{name} {key}": w for name, own in trainer.weight_sets.all_weights().items() for key, w in own.items()}
    return torch.cat([weights[key].flatten() for key in sorted(weights)])


def test_a_loss_that_is_not_finite_or_no_samples_leave_everything_untouched(learner: Learner) -> None:
    trainer, twin = (learner(max_tokens_per_batch=20) for _ in range(2))
    for each in (trainer, twin):
        each.step(batch(1))
    metrics = trainer.step(poisoned(batch(2)))
    assert metrics["skipped"] == 1.0 and trainer.skipped_because == "advantages are not finite in rollout 2-4"
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(weights_of(trainer), weights_of(twin))
    empty = trainer.step(Batch(3, (), ()))
    assert (empty["skipped"], empty["trained_tokens"]) == (1.0, 0)
    assert trainer.step(batch(4))["loss"] == twin.step(batch(4))["loss"]
    assert torch.equal(weights_of(trainer), weights_of(twin))


@pytest.mark.parametrize("settings", [{}, {"weights": "full"}, {"adapters": {"writer": ["w"], "checker": ["c"]}}])
def test_a_resumed_run_is_equal_to_an_unbroken_one_bit_by_bit(
    learner: Learner, tmp_path: Path, settings: dict[str, Any]
) -> None:
    first = learner(**WARM, **settings)
    given = [shared_out(batch(step), first.weight_sets.names[:2]) for step in range(1, 5)]
    for one in given[:2]:
        first.step(one)
    first.save(tmp_path / "checkpoint-2")
    unbroken = [first.step(one) for one in given[2:]]
    in_another_order = {name: dict(reversed(own.items())) for name, own in settings.items() if name == "adapters"}
    second = learner(**WARM, **settings | in_another_order, seed=5)
    assert second.load(tmp_path / "checkpoint-2") == 2
    resumed = [second.step(one) for one in given[2:]]
    for name in ("loss", "grad_norm", "lr"):
        assert [m[name] for m in resumed] == [m[name] for m in unbroken]
    assert torch.equal(weights_of(first), weights_of(second))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_step_in_bfloat16_moves_what_is_trained_and_nothing_else(
    learner: Learner, tmp_path: Path, weights: str
) -> None:
    trainer = learner(dtype="bfloat16", weights=weights)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    metrics = trainer.step(batch(1))
    assert metrics["skipped"] == 0.0 and metrics["grad_norm"] > 0
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if weights == "full" or "lora_B" in name}, "A has no slope at first"
    assert {p.dtype for p in trainer.weight_sets.parameters()} == {torch.float32}
    trainer.save_weights(tmp_path / "files", merged=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "files").dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_files_of_all_weights_are_a_model_that_computes_what_the_trainer_does(tmp_path: Path, tied: bool) -> None:
    model, files = tmp_path / "model", tmp_path / "files"
    make_model(model, tied=tied)
    full = ranks.learner(model, tmp_path, weights="full")
    full.step(batch(1))
    full.save_weights(files, merged=True)
    before, after = (load_file(one / "model.safetensors").keys() for one in (model, files))
    assert before == after, "a tied head is not written twice"
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained(files)(ids).logits
        assert torch.allclose(written, full.policy_model(ids).logits, atol=1e-6)
    assert AutoTokenizer.from_pretrained(files).eos_token == "w1"


def test_a_checkpoints_rate_counts_if_none_is_set(learner: Learner, tmp_path: Path) -> None:
    first = learner(**WARM)
    first.step(batch(1))
    first.save(tmp_path / "checkpoint-1")
    second = learner(learning_rate="auto", **WARM)
    second.load(tmp_path / "checkpoint-1")
    assert "the checkpoint's" in second.rate.reason
    assert [second.step(batch(step))["lr"] for step in (2, 3)] == pytest.approx([2.5e-3, 5e-3])


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
    ("name", "reason"), [("aim", "pip install aim"), ("tensorbored", "unknown tracker 'tensorbored'; choose from")]
)
def test_a_tracker_that_cannot_be_used_or_no_model_is_one_line(name: str, reason: str, tmp_path: Path) -> None:
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

        def start(self) -> None:
            raise OSError("no key\nfor the server")

    trainer = learner()
    trainer.trackers.begin()
    trainer.trackers.trackers.append(Breaks())
    trainer.trackers.report(trainer.step(batch(1)))
    assert "step 1 did not reach breaking: the server is away" in caplog.text
    trainer = learner()
    trainer.trackers.trackers.append(Breaks())
    with pytest.raises(ConfigError, match="no key for the server"):
        trainer.trackers.begin()


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lora_rank": 8}, "trainer.lora_rank 4 → 8"),
        ({"lora_alpha": 64}, "trainer.lora_alpha 32 → 64"),
        ({"lora_targets": ["q_proj"]}, 'trainer.lora_targets "language" → ["q_proj"]'),
        ({"weights": "full"}, 'trainer.weights "lora" → "full"'),
    ],
)
def test_a_checkpoint_of_other_weights_is_refused(
    learner: Learner, tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    learner().save(tmp_path / "1")
    other = learner(**settings)
    before = weights_of(other).clone()
    with pytest.raises(ConfigError, match=f"configuration: {re.escape(what)}; set it back, or start over"):
        other.load(tmp_path / "1")
    if "weights" in settings:
        (tmp_path / "1" / "config.json").unlink()
        with pytest.raises(ConfigError, match="does not fit the configuration"):
            other.load(tmp_path / "1")
    assert torch.equal(weights_of(other), before)


def test_another_base_model_is_refused_and_one_that_was_moved_is_not(base: Path, tmp_path: Path) -> None:
    ranks.learner(base, tmp_path).save(tmp_path / "1")
    ranks.learner(save_small_model(tmp_path / "moved"), tmp_path).load(tmp_path / "1")
    other = save_small_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=rf'policy.model "{base}" → "{other}"'):
        ranks.learner(other, tmp_path).load(tmp_path / "1")


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "rubbish"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(learner: Learner, tmp_path: Path, damage: str) -> None:
    saved = learner()
    saved.save(tmp_path / "1")
    path = tmp_path / "1" / STATE_FILE
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "rubbish": b"rubbish" * 99}.get(damage, b""))
    if damage == "gone":
        path.unlink()
    with pytest.raises(ConfigError, match=r"state.pt is damaged .*: restore it from a backup, make an earlier"):
        saved.load(tmp_path / "1")


def test_without_optimizer_state_its_moments_and_the_schedule_begin_anew_and_that_is_said(
    learner: Learner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = learner(lr_scheduler="linear", max_steps=4)
    saved.save(tmp_path / "1")
    state = torch.load(tmp_path / "1" / STATE_FILE, weights_only=True)
    del state["optimizer"]
    torch.save(state, tmp_path / "1" / STATE_FILE)
    rates = [saved.step(batch(step))["lr"] for step in (1, 2)]
    assert saved.optimizer.state and rates[1] < rates[0]
    saved.load(tmp_path / "1")
    assert "has no optimizer state: the moments and the schedule start over" in caplog.text
    assert not saved.optimizer.state and saved.step(batch(1))["lr"] == rates[0]


@pytest.mark.parametrize("there", [0, 1, 3])
def test_training_resumes_on_any_gpus(
    learner: Learner, tmp_path: Path, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "1" / STATE_FILE
    (again := learner()).save(file.parent)
    torch.save({**torch.load(file), "cuda_rng": [torch.get_rng_state()] * 2}, file)
    seeded = list[int]()
    monkeypatch.setattr("torch.cuda.is_available", lambda: there > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda rng, device: seeded.append(device))
    again.load(file.parent)
    assert seeded == list(range(min(there, 2)))


def test_no_secret_is_in_a_checkpoint(learner: Learner, tmp_path: Path) -> None:
    teacher = {"base_url": "http://h/v1", "api_key": "sk-of-the-teacher"}
    learner(judge={"model": "openai/gpt"}, teacher=teacher).save(tmp_path / "1")
    text = (tmp_path / "1" / "config.json").read_text()
    saved = json.loads(text)
    assert "sk-of-the-teacher" not in text and not [key for key in saved if "key" in key]
    assert {key.split(".")[0] for key in saved} == {"trainer", "policy", "weights of policy", *feature_sections()}


def test_an_unfinished_directory_changes_nothing(tmp_path: Path) -> None:
    def written(name: str) -> None:
        with atomic_directory(tmp_path / "1") as directory:
            assert not list(directory.iterdir())
            (directory / name).touch()
            if name == "too much":
                raise OSError(errno.ENOSPC, "No space left on device")

    def found() -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]

    written("a")
    with pytest.raises(NotSaved, match=r"/1 cannot be written: .*No space left"):
        written("too much")
    assert found() == ["1", "1/a"]
    written("b")
    assert found() == ["1", "1/b"]
