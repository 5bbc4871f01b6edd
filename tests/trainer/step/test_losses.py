"""Every loss type against a second implementation, in plain torch and token by token, and against numbers by hand."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Guidance
from support.paths import EXAMPLES
from support.sampled_row import row
from support.sections import PolicyConfig, TrainerConfig

VOCABULARY = 32
STILL = 1e-30  # a learning rate that changes no weight
# Every type with every level that it is made for.
TEACHER = {"base_url": "http://127.0.0.1:1/v1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w1")
    tokenizer.save_pretrained(directory)
    return directory


def trainer(model: Path, where: Path, **settings: Any) -> LightningTrainer:
    given = {"learning_rate": STILL, "lora_rank": 4, "report_to": [], "dtype": "float32", "max_sample_tokens": 64}
    config = TrainerConfig.model_validate({**given, **settings})
    return LightningTrainer(config, PolicyConfig(model=str(model), directory=where))


def batch(learner: LightningTrainer, *, drift: float = 0.6, merged: bool = True) -> Batch:
    """Rollouts of one to three calls with an advantage each, as one row or as one row a call; `compared` is one more
    than there are. The captured log-probabilities are the policy's own, moved about."""
    rng, found = random.Random(3), []
    for task, sibling in itertools.product(range(3), range(4)):
        history, turns = [], []
        for _ in range(1 + sibling % 3):
            context = [rng.randrange(VOCABULARY) for _ in range(4)] if history else [task + 2, 5, 6, 7]
            answer = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
            ids = [*history, *context, *answer]
            own = learner.logprobs([ids])[0][-len(answer) :]
            turn = (answer, [logp + rng.gauss(0, drift) for logp in own], rng.choice([-1.5, -1.0, 0.5, 2.0]))
            turns.append((context if merged else [*history, *context], *turn))
            history = ids
        for own_rows in [turns] if merged else [[turn] for turn in turns]:
            found.append(row(f"{task}-{sibling}", str(task), *own_rows))
    return Batch(1, tuple(found), (), compared=len({s.rollout_id for s in found}) + 1)


def taken(learner: LightningTrainer, given: Batch) -> tuple[float, Tensor]:
    """Loss and gradient of a step that is too small to move the weights."""
    found: list[Tensor] = []

    def keep(*_: Any) -> None:
        found.append(torch.cat([p.grad.flatten().clone() for p in learner.model.parameters() if p.grad is not None]))

    handle = learner.optimizer.register_step_pre_hook(keep)
    learner.settings = learner.settings.model_copy(update={"max_grad_norm": 1e9})
    metrics = learner.step(given)
    handle.remove()
    assert metrics["skipped"] == 0.0
    return metrics["loss"], found[0]


def trained_a_little(learner: LightningTrainer) -> LightningTrainer:
    """The adapter is no longer the one that adds nothing."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return learner


def test_what_a_guide_says_is_measured(model: Path, tmp_path: Path) -> None:
    learner = trainer(model, tmp_path, teacher=TEACHER, learning_rate=1e-2)
    first, second = learner.logprobs([[3, 4, 5]])[0][1:]
    said = Guidance((math.nan, first - 1.0, math.nan), 0.5)
    metrics = learner.step(Batch(1, (replace(row("r", "t", ([3], [4, 5], [first, second], 0.0)), guidance=said),), ()))
    assert (metrics["guided_share"], metrics["guide_advantage"], metrics["guide_kl"]) == pytest.approx((0.5, 0.5, 1.0))
    assert learner.logprobs([[3, 4]])[0][1] < first  # the guide finds the token less likely than the policy does


@pytest.mark.parametrize("place", ["captured log-probabilities", "advantages"])
def test_a_skipped_step_says_what_was_not_finite_and_where(model: Path, tmp_path: Path, place: str) -> None:
    learner = trainer(model, tmp_path)
    field = "advantages" if place == "advantages" else "logprobs"
    first, *others = batch(learner).samples
    bad = replace(first, **{field: tuple(math.nan if m else 0.0 for m in first.mask)})
    metrics = learner.step(Batch(1, (bad, *others), ()))
    assert metrics["skipped"] == 1.0
    assert learner.skipped_because == f"{place} not finite in rollout {first.rollout_id}"
    assert learner.step(Batch(2, tuple(others), ()))["skipped"] == 0.0
    assert learner.skipped_because is None


def test_a_gradient_that_is_not_finite_is_told_from_a_loss(model: Path, tmp_path: Path) -> None:
    learner = trainer(model, tmp_path)
    given = batch(learner)
    parameter = next(p for p in learner.model.parameters() if p.requires_grad)
    handle = parameter.register_hook(lambda slope: slope * math.inf)
    assert learner.step(given)["skipped"] == 1.0
    handle.remove()
    assert learner.skipped_because is not None
    assert learner.skipped_because.startswith("the gradient is not finite over rollouts 0-0, 0-1, ")
    assert learner.skipped_because.endswith("and 7 more")


def test_a_loss_of_ones_own_takes_the_place_of_trls(model: Path, tmp_path: Path) -> None:
    own = {"loss": f"{EXAMPLES}/hooks/loss.py:clipped"}
    settings = {"loss_type": "grpo", "clip_low": 0.2, "clip_high": 0.2, "importance_cap": 1e6}
    expected, slope = taken(built := trained_a_little(trainer(model, tmp_path / "a", **settings)), batch(built))
    by_hand = trained_a_little(trainer(model, tmp_path / "b", **settings, **own))
    loss, found = taken(by_hand, batch(by_hand))
    assert loss == pytest.approx(expected, rel=1e-5) and (found - slope).norm() < 1e-5 * slope.norm()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return given.logprobs.sum()", r"a tensor of shape \(\d+, \d+\) is needed, one number per token"),
        ("return given.nothing", r"AttributeError: .*nothing.* \(line 2\)"),
        ("return -given.ratios * given.advantages", r"it has no gradient, .* given\.ratios .* carry none"),
        ("return (-given.ratios * given.advantages).requires_grad_()", r"it has no gradient, .*"),
    ],
)
def test_a_wrong_loss_is_named(model: Path, tmp_path: Path, body: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f(given):\n    {body}\n")
    learner = trainer(model, tmp_path, loss=f"{tmp_path}/mine.py:f")
    with pytest.raises(ConfigError, match=f"^trainer.loss {tmp_path}/mine.py:f: {told}$"):
        learner.step(batch(learner))
