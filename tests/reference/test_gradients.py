"""Gradients are those of an independent float64 computation: every loss, weighting, mask and term; sft, dpo, kto."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from reference.door import Trainer
from reference.loss import Policy, loss
from reference.worlds import SAMPLING, VOCABULARY, World, save_model

Json = dict[str, Any]
TOLERANCE = 5e-5  # of the greatest gradient; float32 against float64
AGENTS = {"writer": ["writer"]}
MASK = {"mask": {"tv": 0.02, "kl": 0.005, "ratio_low": 0.7, "ratio_high": 1.5}}
FAR: Json = {"noise": 1.5}
ALL: Json = {"sampling": [*SAMPLING], "noise": 0.6}

# By name: settings, and how the world is made.
CASES: dict[str, tuple[Json, Json]] = {
    "cispo": ({}, FAR),
    "grpo": ({"loss_type": "grpo"}, FAR),
    "sapo": ({"loss_type": "sapo"}, FAR),
    "vespo": ({"loss_type": "vespo"}, {}),
    "dapo": ({"loss_type": "dapo"}, FAR),
    "bnpo": ({"loss_type": "bnpo"}, FAR),
    "dr_grpo": ({"loss_type": "dr_grpo"}, FAR),
    "luspo": ({"loss_type": "luspo", "importance_level": "sequence"}, FAR),
    "gspo": ({"loss_type": "grpo", "importance_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}, {}),
    "cispo by answers": ({"importance_level": "sequence"}, FAR),
    "sapo by answers": ({"loss_type": "sapo", "importance_level": "sequence"}, FAR),
    "dppo_tv": ({"loss": "dppo_tv", **MASK}, FAR),
    "dppo_kl": ({"loss": "dppo_kl", **MASK}, FAR),
    "icepop": ({"loss": "icepop", **MASK}, FAR),
    "token weighting": ({"weighting": "token"}, {}),
    "rollout weighting": ({"loss_type": "dapo", "weighting": "rollout"}, {}),
    "sequence weighting": ({"weighting": "sequence"}, {}),
    "grpo's paper": ({"loss_type": "grpo", "importance_cap": None, "kl_coef": 0.3, "kl_estimator": "k3"}, FAR),
    "kl": ({"loss_type": "grpo", "kl_coef": 0.3}, {}),
    "kl of shaped samples": ({"kl_coef": 0.2}, ALL),
    "entropy": ({"entropy": {"coef": 0.3}}, {}),
    "entropy of shaped samples": ({"entropy": {"coef": 0.1}}, ALL),
    "echo": ({"context_loss": "echo", "echo_weight": 0.5}, {"results": True}),
    "teacher": ({}, {"teacher": True}),
    "small passes": ({"loss_type": "dapo", "max_tokens_per_batch": 30}, ALL),
    "checkpointing": ({"gradient_checkpointing": True, "kl_coef": 0.1}, {}),
    "full weights": ({"weights": "full", "kl_coef": 0.1, "entropy": {"coef": 0.1}}, ALL),
    "full weights, echo": ({"weights": "full", "context_loss": "echo"}, {"results": True}),
    **{f"sampled by {name}": ({"loss_type": "grpo"}, {"sampling": [name], "noise": 0.6}) for name in SAMPLING},
}


KINDS = pytest.mark.parametrize("kind", ["llama", pytest.param("qwen2", marks=pytest.mark.long)])


@KINDS
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_float64(name: str, kind: str, tmp_path: Path) -> None:
    compare(*CASES[name], kind, tmp_path, None)


@pytest.mark.parametrize("kind", ["qwen3", "granite", "gemma2"])
def test_gradients_of_all_weights_are_exact_where_logits_come_in_chunks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.step.scoring._LOGITS_PER_CHUNK", 5 * VOCABULARY)
    compare(*CASES["full weights"], kind, tmp_path, None)


@pytest.mark.parametrize("loss_type", ["grpo", pytest.param("dapo", marks=pytest.mark.long)])
def test_each_adapter_gets_the_gradients_of_its_own_rows(loss_type: str, tmp_path: Path) -> None:
    compare({"loss_type": loss_type, "kl_coef": 0.1}, {}, "llama", tmp_path, AGENTS)


def compare(settings: Json, world: Json, kind: str, directory: Path, adapters: Json | None) -> None:
    model = save_model(kind, directory / "model")
    trainer = Trainer(model, settings, adapters)
    weights = trainer.move(3, 0.02 if settings.get("weights") == "full" else 0.08)
    c = trainer.settings
    policies = {name: Policy(model, own, c["lora_alpha"] / c["lora_rank"]) for name, own in weights.items()}
    rows = World(1, policies, **world).rows()
    compared = dict.fromkeys(policies, 8)  # three of them taught nothing
    taken = trainer.step(rows, compared)
    total, counts = 0.0, Counter[str]()
    for name, policy in policies.items():
        expected, counted = loss(policy, [row for row in rows if row["adapter"] == name], compared[name], c)
        expected.backward()
        total, counts = total + float(expected.detach()), counts + counted
        assert error(taken.gradients[name], policy.weights) < TOLERANCE
    assert taken.metrics["loss"] == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert taken.metrics["outside_tokens"] == counts["outside"]
    assert taken.metrics["clip_share"] * taken.metrics["trained_tokens"] == pytest.approx(counts["clipped"])
    trainer.close()


def error(found: dict[str, Tensor], weights: dict[str, Tensor]) -> float:
    """The greatest difference of two gradients, in parts of the greatest gradient."""
    expected = {name: w.grad for name, w in weights.items() if w.grad is not None}
    most = max(float(grad.abs().max()) for grad in expected.values())
    assert most > 0 and found.keys() <= weights.keys()
    none = torch.zeros(())
    return max(float((found.get(name, none) - grad).abs().max()) for name, grad in expected.items()) / most


# Fine-tuning, also after the weights moved

BETA, UP, DOWN = 0.1, 1.7, 0.4
RUN = {"epochs": 3, "learning_rate": 0.02}
SETTINGS: dict[str, Json] = {
    "sft": {"sft": RUN},
    "dpo": {"dpo": RUN | {"beta": BETA}},
    "kto": {"kto": RUN | {"beta": BETA, "up_weight": UP, "down_weight": DOWN}},
}


def logprob(policy: Policy, row: Json) -> Tensor:
    """Return the sum of the log-probabilities of a row's answers."""
    of_answers = [policy.logits(a["prompt"], a["ids"]).log_softmax(-1) for a in row["answers"]]
    picked = [z.gather(1, torch.tensor(a["ids"])[:, None]) for z, a in zip(of_answers, row["answers"], strict=True)]
    return torch.cat(picked).sum()


def gain(policy: Policy, start: Policy, row: Json) -> Tensor:
    return logprob(policy, row) - logprob(start, row).detach()


def sft(policy: Policy, _: Policy, rows: Sequence[Json]) -> Tensor:
    """Mean cross-entropy over the answers' tokens."""
    tokens = sum(len(answer["ids"]) for row in rows for answer in row["answers"])
    return -torch.stack([logprob(policy, row) for row in rows]).sum() / tokens


def dpo(policy: Policy, start: Policy, pairs: Sequence[Json]) -> Tensor:
    """arXiv 2305.18290, equation 7."""
    margins = [gain(policy, start, pair["chosen"]) - gain(policy, start, pair["rejected"]) for pair in pairs]
    return -torch.stack([logsigmoid(BETA * margin) for margin in margins]).mean()


def kto(policy: Policy, start: Policy, thumbs: Sequence[Json]) -> Tensor:
    """arXiv 2402.01306, equation 8: the KL is that of each prompt with the answer of the row before it, at least 0."""
    with torch.no_grad():
        lent = [_lent(one["row"], thumbs[i - 1]["row"]) for i, one in enumerate(thumbs)]
        kl = torch.stack([gain(policy, start, row) for row in lent]).mean().clamp(min=0)
    losses = []
    for one in thumbs:
        over = BETA * (gain(policy, start, one["row"]) - kl)
        losses.append(UP * (1 - over.sigmoid()) if one["up"] else DOWN * (1 - (-over).sigmoid()))
    return torch.stack(losses).mean()


def _lent(row: Json, other: Json) -> Json:
    """A row's first prompt with all that follows the other's first prompt."""
    first, cut = row["answers"][0]["prompt"], len(other["answers"][0]["prompt"])
    return {"answers": [answer | {"prompt": [*first, *answer["prompt"][cut:]]} for answer in other["answers"]]}


LOSSES: dict[str, Callable[[Policy, Policy, Sequence[Json]], Tensor]] = {"sft": sft, "dpo": dpo, "kto": kto}


@KINDS
@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("method", LOSSES)
def test_gradients_of_fine_tuning_are_those_of_float64(
    method: str, weights: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_proxy.features.tune.run import BATCH_TOKENS  # loads trl

    monkeypatch.setitem(BATCH_TOKENS, method, 4096)
    model = save_model(kind, tmp_path / "model")
    trainer = Trainer(model, SETTINGS[method] | {"weights": weights})
    scale = trainer.settings["lora_alpha"] / trainer.settings["lora_rank"]
    start = Policy(model, trainer.move(3, 0.02 if weights == "full" else 0.08)["default"], scale)
    rows = World(1, {"default": start}).rows(6)
    for row in rows[1::2]:
        row["answers"] = row["answers"][:1]
    pairs = [{"chosen": a, "rejected": b} for a, b in zip(rows[::2], rows[1::2], strict=False)]
    lessons = {"sft": rows, "dpo": pairs, "kto": [{"row": row, "up": i % 3 != 0} for i, row in enumerate(rows)]}[method]
    taken = trainer.tune(method, lessons)
    assert len(taken) == RUN["epochs"], "each epoch is one step over all lessons"
    for held, gradients in taken:
        policy = Policy(model, held, scale)
        LOSSES[method](policy, start, lessons).backward()
        assert error(gradients, policy.weights) < TOLERANCE
    trainer.close()
