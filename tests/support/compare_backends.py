"""Takes one step on a Tinker service and one in this process, from the same adapter, and prints how far they are apart.

A program of its own: the server's client is of another version than the product's environment has. Arguments: the
model, a directory, the server's URL.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_proxy.features.tinker.tinker_trainer import TinkerTrainer
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample
from support.sections import PolicyConfig, TrainerConfig

# The server's ppo is clipped at 0.8 and 1.2, without a second bound, and its gradients are not clipped.
COMMON: dict[str, Any] = {
    "lora_rank": 8, "report_to": [], "learning_rate": 1e-3, "max_sample_tokens": 256, "dtype": "float32",
    "loss_type": "grpo", "clip_low": 0.2, "clip_high": 0.2, "importance_cap": 100.0, "max_grad_norm": 1e9,
}  # fmt: skip
PROMPT, LENGTHS, ADVANTAGES = 10, (24, 28, 20, 31), (-0.7, 1.0, -0.7, 1.0)


def compare(model: Path, directory: Path, url: str) -> dict[str, Any]:
    policy = PolicyConfig.model_validate({"model": str(model), "directory": str(directory)})
    there = {"backend": True, "tinker": {"base_url": url, "reduction": "mean"}}
    service = TinkerTrainer(TrainerConfig.model_validate(COMMON | there), policy)
    local = LightningTrainer(TrainerConfig.model_validate(COMMON), policy)
    service.save_weights(directory / "v0", merged=False)
    start = {name: weight.float() for name, weight in service.adapter().items()}
    local.weight_sets.set({"default": start})
    torch.manual_seed(0)
    rows = [tuple(torch.randint(3, 40_000, (length,)).tolist()) for length in LENGTHS]
    ours, theirs = local.logprobs(rows), service.logprobs(rows)
    batch = batch_of(rows, ours)
    told = {"service": service.step(batch), "local": local.step(batch)}
    service.save_weights(directory / "v1", merged=False)
    after, moved = service.logprobs(rows), local.logprobs(rows)
    service.save(directory / "1")
    service.load(directory / "1")
    resumed = service.logprobs(rows)
    service.close()
    return {
        "logprobs": apart(ours, theirs),
        "loss": [told["local"]["loss"], told["service"]["loss"]],
        **update(start, service.adapter(), local.adapter()),
        "after": apart(after, moved),
        "moved": apart(after, theirs),
        "resumed": apart(after, resumed),
    }


def batch_of(rows: list[tuple[int, ...]], logprobs: list[list[float]]) -> Batch:
    samples = []
    for i, (ids, scores) in enumerate(zip(rows, logprobs, strict=True)):
        mask = tuple(int(place >= PROMPT) for place in range(len(ids)))
        advantages = tuple(ADVANTAGES[i] * sampled for sampled in mask)
        sampled = tuple(score * m for score, m in zip(scores, mask, strict=True))
        samples.append(Sample(f"r{i}", "t", ids, mask, sampled, advantages, (1.0,) * len(ids)))
    return Batch(1, tuple(samples), tuple(s.rollout_id for s in samples), compared=len(samples))


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(x - y) for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True))


def update(start: Any, there: Any, here: Any) -> dict[str, float]:
    """How the two adapters moved: the cosine of the angle between the updates, and their difference by element."""
    theirs, ours = (
        torch.cat([(weights[name].cpu().double() - start[name].double()).flatten() for name in start])
        for weights in (there, here)
    )
    away = (theirs - ours).abs()
    cosine = torch.nn.functional.cosine_similarity(theirs, ours, 0)
    return {"cosine": float(cosine), "greatest": float(away.max()), "mean": float(away.mean())}


if __name__ == "__main__":
    found = compare(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    Path(sys.argv[2], "found.json").write_text(json.dumps(found))
