"""The trainer on a tiny random Llama: the loss it minimises, what it refuses, what it writes, where it goes on from."""

import math
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.rate import automatic_rate
from lightning_proxy.trainer.types import Batch, Sample
from support.sections import PolicyConfig, TrainerConfig

torch = pytest.importorskip("torch")

from peft import PeftModel  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from lightning_proxy.trainer.checkpoint import atomic_directory  # noqa: E402
from lightning_proxy.trainer.report.metric_schema import by_tag  # noqa: E402
from lightning_proxy.trainer.step.trainer import LightningTrainer  # noqa: E402
from lightning_proxy.trainer.weights import MARKER  # noqa: E402

VOCABULARY = 64


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", unk_token="w2", pad_token="w1"
    ).save_pretrained(directory)
    return directory


def trainer(model: Path, where: Path, **settings: object) -> LightningTrainer:
    config = TrainerConfig.model_validate(
        {"learning_rate": 1e-2, "lora_rank": 4, "report_to": [], "loss_type": "cispo", "dtype": "float32", **settings}
    )
    return LightningTrainer(config, PolicyConfig(model=str(model), directory=where))


def batch(step: int = 1, *, tasks: int = 3, siblings: int = 4, drift: float = 0.0) -> Batch:
    """Rollouts of one or two rows that share a task's prompt; `drift` moves the behaviour log-probabilities about."""
    rng = random.Random(step)
    samples = []
    for task in range(tasks):
        prompt = [rng.randrange(VOCABULARY) for _ in range(6)]
        for sibling in range(siblings):
            for _ in range(1 + sibling % 2):
                answer = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
                n = len(answer)
                samples.append(
                    Sample(
                        rollout_id=f"{task}-{sibling}",
                        task_id=str(task),
                        token_ids=(*prompt, *answer),
                        mask=(0,) * 6 + (1,) * n,
                        logprobs=(0.0,) * 6 + tuple(-math.log(VOCABULARY) + rng.gauss(0, drift) for _ in answer),
                        advantages=(0.0,) * 6 + (rng.choice([-1.0, 1.0]),) * n,
                        temperatures=(1.0,) * (6 + n),
                    )
                )
    return Batch(step, tuple(samples), tuple(sorted({s.rollout_id for s in samples})), {"reward": 0.5})


def lora_weights(model: PeftModel) -> "torch.Tensor":
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def plain_loss(learner: LightningTrainer, given: Batch) -> "torch.Tensor":
    """Per-rollout mean over tokens of -(truncated weight) · advantage · logprob, row by row, averaged over rollouts."""
    per_rollout: dict[str, list[torch.Tensor]] = {}
    for sample in given.samples:
        ids = torch.tensor([sample.token_ids])
        logits = learner.policy_model(input_ids=ids).logits[0, :-1] / torch.tensor(sample.temperatures)[1:, None]
        logp = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        weight = (logp.detach() - torch.tensor(sample.logprobs)[1:]).exp().clamp(max=2.0)
        terms = -weight * torch.tensor(sample.advantages)[1:] * logp
        per_rollout.setdefault(sample.rollout_id, []).append(terms[torch.tensor(sample.mask)[1:] == 1])
    return torch.stack([torch.cat(terms).mean() for terms in per_rollout.values()]).mean()


def at_temperatures(given: Batch, *choices: float) -> Batch:
    samples = (replace(s, temperatures=(choices[i % len(choices)],) * len(s.mask)) for i, s in enumerate(given.samples))
    return replace(given, samples=tuple(samples))


def gradient(model: torch.nn.Module) -> "torch.Tensor":
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("budget", [8192, 20])
def test_a_step_minimises_the_per_rollout_loss_however_it_is_cut(
    model_directory: Path, tmp_path: Path, budget: int, seed: int
) -> None:
    learner = trainer(model_directory, tmp_path, max_tokens_per_batch=budget, max_grad_norm=1e9)
    learner.step(batch(1))
    found: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: found.append(gradient(learner.model)))
    given = at_temperatures(batch(seed, drift=0.8), 1.0, 0.7)
    expected = plain_loss(learner, given)
    expected.backward()
    expected_gradient = gradient(learner.model)
    metrics = learner.step(given)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert (found[0] - expected_gradient).norm() < 1e-4 * expected_gradient.norm()
    assert metrics["grad_norm"] == pytest.approx(expected_gradient.norm().item(), rel=1e-4)
    assert metrics["ratio_max"] > 2.0 and 0 < metrics["clip_share"] < 1


def test_with_the_sampling_policy_unchanged_all_losses_have_one_gradient(model_directory: Path, tmp_path: Path) -> None:
    norms = []
    for loss_type in ("cispo", "grpo"):
        learner = trainer(model_directory, tmp_path, loss_type=loss_type)
        found = learner.logprobs([s.token_ids for s in batch().samples])
        samples = tuple(
            Sample(s.rollout_id, s.task_id, s.token_ids, s.mask,
                   tuple(a * b for a, b in zip(logp, s.mask, strict=True)), s.advantages, s.temperatures)
            for s, logp in zip(batch().samples, found, strict=True)
        )  # fmt: skip
        metrics = learner.step(Batch(1, samples, ()))
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-6) and metrics["clip_share"] == 0.0
        norms.append(metrics["grad_norm"])
    assert norms == pytest.approx([norms[0]] * 2, rel=1e-5)


def test_steps_make_rewarded_tokens_likelier(model_directory: Path, tmp_path: Path) -> None:
    learner, given = trainer(model_directory, tmp_path), batch()
    good = [s for s in given.samples if max(s.advantages) > 0]

    def likelihood() -> float:
        return sum(sum(logp) for logp in learner.logprobs([s.token_ids for s in good]))

    before = likelihood()
    for _ in range(5):
        learner.step(given)
    assert likelihood() > before + 1.0


def test_logprobs_are_those_of_the_model_and_aligned_with_the_tokens(model_directory: Path, tmp_path: Path) -> None:
    learner = trainer(model_directory, tmp_path)
    learner.step(batch())
    rows = [(5, 6, 7, 8), (5, 6, 9), (3,), (5, 6, 7, 8)]
    for row, found in zip(rows, learner.logprobs(rows), strict=True):
        with torch.no_grad():
            logits = learner.policy_model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        assert found == pytest.approx([0.0] + [logits[i, t].item() for i, t in enumerate(row[1:])], abs=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_leaves_everything_untouched(
    model_directory: Path, tmp_path: Path, poison: float
) -> None:
    learner, twin = (trainer(model_directory, tmp_path, max_tokens_per_batch=20) for _ in range(2))
    for each in (learner, twin):
        each.step(batch(1))
    last = batch(2).samples[-1]
    bad = Sample(
        last.rollout_id, last.task_id, last.token_ids, last.mask, last.logprobs,
        tuple(a * poison if m else 0.0 for a, m in zip(last.advantages, last.mask, strict=True)), last.temperatures,
    )  # fmt: skip
    metrics = learner.step(Batch(2, (*batch(2).samples[:-1], bad), ()))
    assert metrics["skipped"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(lora_weights(learner.model), lora_weights(twin.model))
    assert learner.step(batch(3))["loss"] == twin.step(batch(3))["loss"]
    assert torch.equal(lora_weights(learner.model), lora_weights(twin.model))


def test_bfloat16_weights_train_too(model_directory: Path, tmp_path: Path) -> None:
    learner = trainer(model_directory, tmp_path, dtype="bfloat16")
    before = lora_weights(learner.model).clone()
    metrics = learner.step(batch())
    assert learner.policy_model.dtype == torch.bfloat16
    assert metrics["skipped"] == 0.0 and metrics["grad_norm"] > 0
    assert not torch.equal(before, lora_weights(learner.model))


def test_a_step_without_samples_is_skipped(model_directory: Path, tmp_path: Path) -> None:
    metrics = trainer(model_directory, tmp_path).step(Batch(1, (), ()))
    assert metrics["skipped"] == 1.0 and metrics["trained_tokens"] == 0


def test_resuming_gives_the_losses_of_an_unbroken_run(model_directory: Path, tmp_path: Path) -> None:
    settings = {"lr_scheduler": "constant_with_warmup", "warmup_steps": 4}
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


def test_a_resumed_run_takes_the_rate_that_is_configured_now(model_directory: Path, tmp_path: Path) -> None:
    first = trainer(model_directory, tmp_path, learning_rate=1e-2, lr_scheduler="constant_with_warmup", warmup_steps=4)
    first.step(batch(1))
    first.save(tmp_path / "checkpoint-1")
    second = trainer(model_directory, tmp_path, learning_rate=4e-3, lr_scheduler="constant_with_warmup", warmup_steps=4)
    second.load(tmp_path / "checkpoint-1")
    assert [second.step(batch(step))["lr"] for step in (2, 3)] == pytest.approx([1e-3, 2e-3])


def test_auto_keeps_the_rate_of_the_checkpoint_and_of_those_after_it(model_directory: Path, tmp_path: Path) -> None:
    warm = {"lr_scheduler": "constant_with_warmup", "warmup_steps": 4}
    first = trainer(model_directory, tmp_path, learning_rate=1e-2, **warm)
    first.step(batch(1))
    first.save(tmp_path / "checkpoint-1")
    second = trainer(model_directory, tmp_path, learning_rate="auto", **warm)
    second.load(tmp_path / "checkpoint-1")
    assert "the checkpoint's" in second.rate.reason
    assert [second.step(batch(step))["lr"] for step in (2, 3)] == pytest.approx([2.5e-3, 5e-3])
    second.save(tmp_path / "checkpoint-3")
    third = trainer(model_directory, tmp_path, learning_rate="auto", **warm)
    third.load(tmp_path / "checkpoint-3")
    assert third.rate.value == 1e-2


def test_where_nothing_was_trained_auto_begins_by_its_rule(model_directory: Path, tmp_path: Path) -> None:
    trainer(model_directory, tmp_path, learning_rate=1e-5).save(tmp_path / "checkpoint-0")
    learner = trainer(model_directory, tmp_path, learning_rate="auto")
    learner.load(tmp_path / "checkpoint-0")
    assert learner.step(batch(1))["lr"] == learner.rate.value == automatic_rate(learner.model.config.hidden_size)


def test_going_back_to_the_untrained_weights_keeps_the_rate(model_directory: Path, tmp_path: Path) -> None:
    trainer(model_directory, tmp_path, learning_rate="auto").save(tmp_path / "checkpoint-0")
    first = trainer(model_directory, tmp_path, learning_rate=1e-2)
    first.step(batch(1))
    first.save(tmp_path / "checkpoint-1")
    second = trainer(model_directory, tmp_path, learning_rate="auto")
    second.load(tmp_path / "checkpoint-1")
    second.load(tmp_path / "checkpoint-0")
    assert second.step(batch(2))["lr"] == second.rate.value == 1e-2


def test_a_checkpoint_whose_configuration_has_no_rate_takes_that_of_auto(model_directory: Path, tmp_path: Path) -> None:
    first = trainer(model_directory, tmp_path, learning_rate=1e-2)
    first.step(batch(1))
    first.save(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "config.json").write_text("{}")
    second = trainer(model_directory, tmp_path, learning_rate="auto")
    second.load(tmp_path / "checkpoint-1")
    assert second.rate.value == automatic_rate(second.model.config.hidden_size)


def test_a_directory_that_was_not_finished_never_appears(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-1"
    with atomic_directory(target) as temporary:
        (temporary / "a").write_text("old")

    class PowerCut(Exception):
        pass

    with pytest.raises(PowerCut), atomic_directory(target) as temporary:
        (temporary / "a").write_text("half")
        raise PowerCut
    assert (target / "a").read_text() == "old"
    with atomic_directory(target) as temporary:
        assert not list(temporary.iterdir())
        (temporary / "a").write_text("new")
    assert (target / "a").read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_the_merged_checkpoint_and_the_adapter_compute_what_the_trainer_does(
    model_directory: Path, tmp_path: Path
) -> None:
    learner = trainer(model_directory, tmp_path)
    learner.step(batch())
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


def test_metrics_reach_tensorboard_with_those_of_the_batch(model_directory: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    learner = trainer(model_directory, tmp_path, report_to=["tensorboard"])
    for step in (7, 8):
        metrics = learner.step(batch(step))
        learner.trackers.report(metrics)
    learner.trackers.close()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    assert {f"train/{tag}" for tag in by_tag(metrics)} == set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("train/reward")] == [7, 8]
    assert events.Scalars("train/optimizer/loss")[-1].value == pytest.approx(metrics["loss"], rel=1e-5)


def test_a_trainer_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model"):
        LightningTrainer(TrainerConfig(), PolicyConfig(directory=tmp_path))


def test_rollouts_that_taught_nothing_make_the_step_smaller(model_directory: Path, tmp_path: Path) -> None:
    given = batch()
    whole = trainer(model_directory, tmp_path / "a").step(given)
    among_more = trainer(model_directory, tmp_path / "b").step(replace(given, compared=2 * len(given.rollout_ids)))
    assert among_more["loss"] == pytest.approx(whole["loss"] / 2, rel=1e-4)
    assert among_more["grad_norm"] == pytest.approx(whole["grad_norm"] / 2, rel=1e-4)


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
    class Breaks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if begins:
                raise OSError("no key\nfor the server")

        def on_log(self, *_: Any, **__: Any) -> None:
            raise OSError("the server is away")

    begins: list[int] = []
    learner = trainer(model_directory, tmp_path)
    learner.trackers.callbacks.append(Breaks())
    learner.trackers.report(learner.step(batch()))
    assert "step 1 did not reach every tracker: the server is away" in caplog.text
    begins.append(1)
    learner = trainer(model_directory, tmp_path)
    learner.trackers.callbacks.append(Breaks())
    with pytest.raises(ConfigError, match="no key for the server"):
        learner.trackers.begin()
