"""The gradients of sft, dpo and kto are those of an independent float64 computation, also after the weights moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_proxy.features.tune import methods
from reference.door import Trainer
from reference.loss import Policy
from reference.test_gradients import TOLERANCE, error
from reference.worlds import World, save_model

Json = dict[str, Any]
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


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen2", marks=pytest.mark.long)])
@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("method", LOSSES)
def test_gradients_are_those_of_float64(
    method: str, weights: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.BATCH_TOKENS, method, 4096)
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
