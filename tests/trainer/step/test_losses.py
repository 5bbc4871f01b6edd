"""Every loss type against a second implementation, in plain torch and token by token, and against numbers by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.step.losses import (
    GUIDE_LIMIT,
    LOSSES,
    Answers,
    answer_spans,
    loss_inputs,
    policy_loss,
    token_weights,
)  # fmt: skip
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Guidance, Sample
from support.paths import EXAMPLES
from support.sampled_row import row
from support.sections import PolicyConfig, TrainerConfig

VOCABULARY = 32
STILL = 1e-30  # a learning rate that changes no weight
# Every type with every level that it is made for.
TEACHER = {"base_url": "http://127.0.0.1:1/v1"}
CASES = [
    (loss_type, level)
    for loss_type, level in itertools.product(LOSSES, ("token", "sequence"))
    if (loss_type, level) not in (("luspo", "token"), ("vespo", "sequence"))
]


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


def plain_logps(model: PreTrainedModel, sample: Sample) -> Tensor:
    ids = torch.tensor([sample.token_ids])
    return torch.cat([torch.zeros(1), model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]])


def plain_loss(learner: LightningTrainer, given: Batch, base: LlamaForCausalLM | None = None) -> Tensor:
    """Token by token, as the papers have it; nothing of it is shared with what is tested."""
    c, total = learner.settings, torch.zeros(())
    rollouts = sorted({s.rollout_id for s in given.samples})
    lengths = {r: sum(sum(s.mask) for s in given.samples if s.rollout_id == r) for r in rollouts}
    for sample in given.samples:
        logps = plain_logps(learner.policy_model, sample)
        reference = None if base is None else plain_logps(base, sample).detach()
        weight = {
            "dapo": len(rollouts) / sum(lengths.values()), "bnpo": len(rollouts) / sum(lengths.values()),
            "dr_grpo": 1 / c.max_sample_tokens, "luspo": 1.0,
        }.get(c.loss_type, 1 / lengths[sample.rollout_id])  # fmt: skip
        for own in runs(sample):
            advantage = sample.advantages[own[0]]
            ratios = [(logps[i] - sample.logprobs[i]).exp() for i in own]
            if c.importance_level == "sequence":
                ratios = [torch.stack(ratios).log().mean().exp()] * len(own)
            said = [advantage + guided(c, sample, i, float(logps[i].detach())) for i in own]
            whole = math.exp(sum(float((logps[i] - sample.logprobs[i]).detach()) for i in own))
            for i, ratio, value in zip(own, ratios, said, strict=True):
                total = total + weight * term(c, ratio, value, logps[i], whole)
                if reference is not None:
                    own_ratio = (logps[i] - sample.logprobs[i]).exp().detach().clamp(max=c.importance_cap)
                    total = total + weight * c.kl_coef * own_ratio * (logps[i] - reference[i]) ** 2 / 2
    return total / (given.compared or len(rollouts))


def guided(c: TrainerConfig, sample: Sample, i: int, logp: float) -> float:
    if sample.guidance is None or math.isnan(said := sample.guidance.logprobs[i]):
        return 0.0
    return sample.guidance.weight * max(-GUIDE_LIMIT, min(said - logp, GUIDE_LIMIT))


def runs(sample: Sample) -> list[list[int]]:
    """Places of each answer; answers of these rows always have context between them."""
    found: list[list[int]] = []
    for i, sampled in enumerate(sample.mask):
        if sampled:
            found = [*found[:-1], [*found[-1], i]] if found and found[-1][-1] == i - 1 else [*found, [i]]
    return found


def term(c: TrainerConfig, ratio: Tensor, advantage: float, logp: Tensor, whole: float) -> Tensor:
    match c.loss_type:
        case "cispo":
            return -min(float(ratio.detach()), c.importance_cap) * advantage * logp
        case "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
        case "vespo":
            k, lam = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            return -math.exp(lam) * whole**k * math.exp(-lam * whole) * advantage * logp
        case _:
            clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
            if advantage < 0:
                ratio = ratio.clamp(max=max(c.importance_cap, 1 + c.clip_high))
            return -torch.minimum(ratio * advantage, clipped * advantage)


def gradient(learner: LightningTrainer, loss: Tensor) -> Tensor:
    parameters = [p for p in learner.model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


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


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_a_loss_is_that_of_a_plain_implementation_however_the_step_is_cut_and_calls_are_merged(
    model: Path, tmp_path: Path, loss_type: str, level: str
) -> None:
    settings = {"loss_type": loss_type, "importance_level": level, "kl_coef": 0.1}
    learner = trained_a_little(trainer(model, tmp_path, **settings))
    base = LlamaForCausalLM.from_pretrained(model)
    given = batch(learner)
    expected = plain_loss(learner, given, base)
    slope = gradient(learner, expected)
    for merged, budget in itertools.product((True, False), (8192, 20)):
        learner._cost = replace(learner._cost, max_nodes=budget)
        loss, found = taken(learner, batch(learner, merged=merged))
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-6)
        assert (found - slope).norm() < 1e-4 * slope.norm()


@pytest.mark.parametrize(("loss_type", "level"), [c for c in CASES if c[1] == "token" or c[0] == "cispo"])
def test_a_guides_log_probability_minus_the_policys_is_an_advantage_of_each_token(
    model: Path, tmp_path: Path, loss_type: str, level: str
) -> None:
    settings = {"loss_type": loss_type, "importance_level": level, "teacher": TEACHER}
    learner = trained_a_little(trainer(model, tmp_path, **settings))
    given, rng = batch(learner), random.Random(5)

    def says(sample: Sample) -> Guidance:
        chosen = [rng.choice([math.nan, -math.inf, -0.1, -2.0, -4.0, -9999.0]) for _ in sample.mask]
        return Guidance(tuple(chosen), rng.choice([0.5, 2.0]))

    told = tuple(replace(s, guidance=says(s)) if i % 3 else s for i, s in enumerate(given.samples))
    given = replace(given, samples=told)
    expected = plain_loss(learner, given)
    slope = gradient(learner, expected)
    for budget in (8192, 20):
        learner._cost = replace(learner._cost, max_nodes=budget)
        loss, found = taken(learner, given)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-6)
        assert (found - slope).norm() < 1e-4 * slope.norm()


def test_what_a_guide_says_is_measured(model: Path, tmp_path: Path) -> None:
    learner = trainer(model, tmp_path, teacher=TEACHER, learning_rate=1e-2)
    first, second = learner.logprobs([[3, 4, 5]])[0][1:]
    said = Guidance((math.nan, first - 1.0, math.nan), 0.5)
    metrics = learner.step(Batch(1, (replace(row("r", "t", ([3], [4, 5], [first, second], 0.0)), guidance=said),), ()))
    assert (metrics["guided_share"], metrics["guide_advantage"], metrics["guide_kl"]) == pytest.approx((0.5, 0.5, 1.0))
    assert learner.logprobs([[3, 4]])[0][1] < first  # the guide finds the token less likely than the policy does


def plain_entropy(learner: LightningTrainer, given: Batch) -> Tensor:
    """The mean entropy of the trained tokens."""
    found = []
    for sample in given.samples:
        logp = learner.policy_model(input_ids=torch.tensor([sample.token_ids])).logits[0, :-1]
        logp = (logp / torch.tensor(sample.temperatures[1:])[:, None]).log_softmax(-1)
        found += [-(logp[i - 1].exp() * logp[i - 1]).sum() for i, sampled in enumerate(sample.mask) if sampled]
    return torch.stack(found).mean()


@pytest.mark.parametrize("loss_type", ["cispo", "dapo", "sapo"])
def test_the_entropy_bonus_is_the_mean_over_tokens_whatever_the_loss_and_however_the_step_is_cut(
    model: Path, tmp_path: Path, loss_type: str
) -> None:
    learner = trained_a_little(trainer(model, tmp_path, loss_type=loss_type, entropy={"coef": 0.3}))
    given = batch(learner)
    warm = tuple(replace(s, temperatures=(1.5,) * len(s.token_ids)) for s in given.samples)
    given = replace(given, samples=warm)
    bonus = plain_entropy(learner, given)
    slope = gradient(learner, -0.3 * bonus)
    plain = trained_a_little(trainer(model, tmp_path / "plain", loss_type=loss_type))
    without, slope_without = taken(plain, given)
    for budget in (8192, 20):
        learner._cost = replace(learner._cost, max_nodes=budget)
        loss, found = taken(learner, given)
        assert loss - without == pytest.approx(-0.3 * float(bonus.detach()), rel=1e-4)
        assert (found - slope_without - slope).norm() < 1e-4 * slope.norm()


@pytest.mark.parametrize(("loss_type", "level"), [case for case in CASES if LOSSES[case[0]][1] == "own"])
def test_unchanged_policies_have_one_gradient_whatever_the_type_and_level(
    model: Path, tmp_path: Path, loss_type: str, level: str
) -> None:
    plain = trained_a_little(trainer(model, tmp_path / "cispo"))
    other = trained_a_little(trainer(model, tmp_path / "other", loss_type=loss_type, importance_level=level))
    slopes = [taken(learner, batch(learner, drift=0.0))[1] for learner in (plain, other)]
    assert (slopes[0] - slopes[1]).norm() < 1e-4 * slopes[0].norm()


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_the_terms_are_those_of_trl(model: Path, tmp_path: Path, loss_type: str, level: str) -> None:
    learner = trainer(model, tmp_path, loss_type=loss_type, importance_level=level, clip_low=0.15, clip_high=0.4)
    samples, config = batch(learner).samples, learner.settings
    term = {"bnpo": "dapo", "grpo": "dapo", "dr_grpo": "dapo", "luspo": "dapo"}.get(loss_type, loss_type)
    answers, weights = Answers.of(samples, torch.device("cpu")), token_weights(samples, config)
    mask, captured = answers.mask, answers.take_lists([sample.logprobs for sample in samples])
    logps = (captured + torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))).requires_grad_()
    ours = loss_inputs(samples, answers, logps, weights, config)
    theirs = MagicMock(
        loss_type=term, importance_sampling_level=level, epsilon_low=config.clip_low,
        epsilon_high=config.importance_cap if term == "cispo" else config.clip_high, beta=0.0, use_vllm=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, accelerator=MagicMock(num_processes=1, gather=lambda x: x),
        args=GRPOConfig(str(tmp_path), delta=config.importance_cap, use_cpu=True, report_to="none"),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros_like(logps), None),
    )  # fmt: skip
    averaged = mask.sum(1, keepdim=True) * len(mask) if term == "sapo" else 1.0  # over answers and their tokens
    given = {"prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask, "completion_mask": mask}
    given |= {"advantages": ours.advantages * ours.weights * averaged}
    given |= {
        "old_per_token_logps": captured,
        "num_items_in_batch": torch.tensor(float(theirs.args.steps_per_generation)),
    }
    (expected,) = torch.autograd.grad(GRPOTrainer._compute_loss(theirs, None, given), logps)
    (found,) = torch.autograd.grad(policy_loss(ours), logps)
    assert found.abs().sum() > 0
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-8)


def token_slopes(
    learner: LightningTrainer, sample: Sample, log_ratio: float, outside: Sequence[int] = ()
) -> list[float]:
    """d loss / d logp of each token of a rollout's only answer, times its length; every ratio is e^`log_ratio`.

    `outside`: places in the answer of tokens that the policy would not sample any more.
    """
    answers = Answers.of([sample], torch.device("cpu"))
    weights = token_weights([sample], learner.settings)
    logps = (answers.take_lists([sample.logprobs]) + log_ratio).requires_grad_()
    present = logps.index_fill(1, torch.tensor(outside, dtype=torch.long), -math.inf)
    given = loss_inputs([sample], answers, present, weights, learner.settings)
    (slopes,) = torch.autograd.grad(policy_loss(given), logps)
    scale = weights[sample.rollout_id]
    return [float(slope / scale) for slope in slopes[0]]


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name != "luspo"])  # it has a ratio of whole answers
def test_tokens_that_are_left_out_change_nothing_for_the_others(model: Path, tmp_path: Path, loss_type: str) -> None:
    learner = trainer(model, tmp_path, loss_type=loss_type)
    sample = row("r", "t", ([3], [4, 5, 6, 7], [-1.0] * 4, 1.0))
    whole, without = (token_slopes(learner, sample, 0.0, outside) for outside in ((), (1, 2)))
    assert without == pytest.approx([whole[0], 0.0, 0.0, whole[3]])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipping_by_hand_on_both_sides(model: Path, tmp_path: Path, level: str) -> None:
    grpo = trainer(model, tmp_path, loss_type="grpo", importance_level=level, clip_low=0.2, clip_high=0.3)
    cispo = trainer(model, tmp_path, loss_type="cispo", importance_level=level)
    # (advantage, ratio) -> what a token's log-probability is pulled by; of an answer of one token, token = sequence.
    by_hand = {
        (1.0, 0.5): (-0.5, -0.5), (1.0, 1.25): (-1.25, -1.25), (1.0, 1.5): (0.0, -1.5), (1.0, 3.0): (0.0, -2.0),
        (-1.0, 0.5): (0.0, 0.5), (-1.0, 0.9): (0.9, 0.9), (-1.0, 1.5): (1.5, 1.5), (-1.0, 3.0): (0.0, 2.0),
    }  # fmt: skip
    for (advantage, ratio), expected in by_hand.items():
        sample = row("r", "t", ([3], [4], [-1.0], advantage))
        found = [token_slopes(learner, sample, math.log(ratio))[0] for learner in (grpo, cispo)]
        assert found == pytest.approx(expected, abs=1e-5), (advantage, ratio)


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_no_token_is_pulled_harder_than_the_cap_however_stale(
    model: Path, tmp_path: Path, loss_type: str, level: str
) -> None:
    learner = trainer(model, tmp_path, loss_type=loss_type, importance_level=level)
    for advantage, log_ratio in itertools.product((1.0, -1.0), (-20, -2, -0.5, 0, 0.1, 0.5, 0.7, 1, 3, 20)):
        sample = row("r", "t", ([3], [4, 5, 6], [-1.0, -2.0, -0.5], advantage))
        pulls = token_slopes(learner, sample, log_ratio)
        assert all(0.0 <= -pull * advantage <= 2.0 + 1e-4 for pull in pulls), (log_ratio, pulls)


def test_a_sequence_is_an_answer_and_its_ratio_the_geometric_mean(model: Path, tmp_path: Path) -> None:
    learner = trainer(model, tmp_path, loss_type="cispo", importance_level="sequence")
    # Two answers in one row: ratios e^1 and e^-1 in the first (mean 1), e^0.5 in the second.
    sample = row("r", "t", ([3], [4, 5], [-2.0, -0.0], 1.0), ([6], [7], [-1.5], 1.0))
    answers = Answers.of([sample], torch.device("cpu"))
    logps = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]]).requires_grad_()
    weights = token_weights([sample], learner.settings)
    given = loss_inputs([sample], answers, logps, weights, learner.settings)
    (slopes,) = torch.autograd.grad(policy_loss(given), logps)
    assert (slopes * 3).flatten().tolist() == pytest.approx([-1.0, -1.0, -math.exp(0.5), 0.0])


def test_answers_are_told_apart_by_context_and_by_advantage() -> None:
    sample = row("r", "t", ([1, 2], [3, 4], [-1.0, -1.0], 1.0), ([], [5], [-1.0], -1.0), ([6], [7], [-1.0], -1.0))
    assert list(answer_spans(sample)) == [(2, 4), (4, 5), (6, 7)]


def test_the_kls_gradient_is_that_of_trls_below_the_cap(model: Path, tmp_path: Path) -> None:
    learner = trained_a_little(trainer(model, tmp_path, kl_coef=1.0, importance_cap=1e6))
    given = batch(learner)
    silent = replace(given, samples=tuple(replace(s, advantages=(0.0,) * len(s.mask)) for s in given.samples))
    base, total = LlamaForCausalLM.from_pretrained(model), torch.zeros(())
    weights = token_weights(given.samples, learner.settings, given.compared)
    for sample in given.samples:
        logps = plain_logps(learner.policy_model, sample)
        with torch.no_grad():
            gap = plain_logps(base, sample) - logps
        gap = gap + logps.detach() - logps  # TRL's formula: the ratio, with its gradient, times k3
        k3 = gap.exp() - gap - 1
        ratios = (logps - torch.tensor(sample.logprobs)).exp()
        total = total + weights[sample.rollout_id] * (ratios * k3 * torch.tensor(sample.mask)).sum()
    slope = gradient(learner, total)
    assert (taken(learner, silent)[1] - slope).norm() < 1e-4 * slope.norm()


def test_the_kl_to_the_base_model_is_measured_when_asked_for_and_is_none_at_first(model: Path, tmp_path: Path) -> None:
    learner = trainer(model, tmp_path, kl_metric=True, learning_rate=1e-2)
    given = batch(learner)
    assert learner.step(given)["kl_base"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(3):
        metrics = learner.step(given)
    assert metrics["kl_base"] > 1e-3
    assert metrics["kl_base"] != pytest.approx(metrics["kl"])
    assert "kl_base" not in trainer(model, tmp_path).step(given)


def test_a_high_kl_coefficient_keeps_the_policy_near_the_base_model(model: Path, tmp_path: Path) -> None:
    found = {}
    for coefficient in (0.0, 10.0):
        learner = trainer(model, tmp_path, kl_coef=coefficient, kl_metric=True, learning_rate=1e-2)
        given = batch(learner)
        for _ in range(8):
            found[coefficient] = learner.step(given)["kl_base"]
    assert found[10.0] < found[0.0] / 3


def test_what_is_clipped_is_counted_at_the_level_of_the_loss(model: Path, tmp_path: Path) -> None:
    shares = {}
    for level in ("token", "sequence"):
        learner = trainer(model, tmp_path, loss_type="grpo", importance_level=level)
        own = learner.logprobs([[3, 4, 5]])[0][1:]
        # Ratios 1.5 and 1/1.5: each outside of [0.8, 1.3], their geometric mean is 1.
        moved = [own[0] - math.log(1.5), own[1] + math.log(1.5)]
        shares[level] = learner.step(Batch(1, (row("r", "t", ([3], [4, 5], moved, 1.0)),), ()))["clip_share"]
    assert shares == {"token": 0.5, "sequence": 0.0}


def test_what_is_clipped_is_counted_on_the_side_that_the_advantage_pulls_to(model: Path, tmp_path: Path) -> None:
    # Ratios 4, 0.25 and 1, as TRL counts: (cispo, grpo) -> shares of three tokens.
    by_hand = {1.0: (1 / 3, 1 / 3), -1.0: (0.0, 1 / 3), 0.0: (0.0, 0.0)}
    learners = [trainer(model, tmp_path, loss_type=loss_type) for loss_type in ("cispo", "grpo")]
    own = learners[0].logprobs([[3, 4, 5, 6]])[0][1:]
    moved = [own[0] - math.log(4), own[1] + math.log(4), own[2]]
    for advantage, expected in by_hand.items():
        given = Batch(1, (row("r", "t", ([3], [4, 5, 6], moved, advantage)),), ())
        assert tuple(learner.step(given)["clip_share"] for learner in learners) == pytest.approx(expected)


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
