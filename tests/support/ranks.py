"""Training on several real processes: `accelerate launch … ranks.py WHAT DIRECTORY` does what `lead` does in one."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_proxy.features.distributed.ranks import Ranks
from lightning_proxy.trainer.step.processes import Processes
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Guidance, Sample
from support.models import save_llama
from support.sections import PolicyConfig, TrainerConfig

VOCABULARY = 64
OWN = ("checker", "writer")  # all others share one
# The KL is to a frozen copy, which is sharded too.
FULL = {"weights": "full", "kl_coef": 0.1}
ROWS = [(5, 6, 7, 8), (5, 6, 9)]


def make_model(directory: Path, *, tied: bool = True) -> None:
    save_llama(
        directory, VOCABULARY, hidden_size=36, intermediate_size=70, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, tie_word_embeddings=tied,
    )  # fmt: skip


def learner(
    model: Path, directory: Path, adapters: Any = None, processes: Processes | None = None, **settings: Any
) -> LightningTrainer:
    """A trainer in float32 without a loop. `settings`: of the section `trainer`."""
    given = {"learning_rate": 1e-2, "lora_rank": 4, "report_to": [], "dtype": "float32", **settings}
    publish: Any = "lora" if adapters else "auto"
    policy = PolicyConfig(model=str(model), directory=directory, adapters=adapters or {}, publish=publish)
    return LightningTrainer(TrainerConfig.model_validate(given), policy, processes)


def trainer(
    directory: Path, adapters: Sequence[str] = (), processes: Processes | None = None, **settings: Any
) -> LightningTrainer:
    """One of a model in `directory`, which takes several passes for a step."""
    given = {"max_tokens_per_batch": 30, "teacher": {"base_url": "http://127.0.0.1:1/v1"}, **settings}
    own = {name: [name] for name in adapters}
    return learner(directory / "model", directory / "policy", own, processes, **given)


def batch(step: int, tasks: int = 3, siblings: int = 5) -> Batch:
    rng = random.Random(step)
    samples = []
    for task in range(tasks):
        prompt = [rng.randrange(VOCABULARY) for _ in range(6)]
        for sibling in range(siblings):
            answer = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))]
            n = len(answer)
            samples.append(
                Sample(
                    f"{task}-{sibling}", str(task), (*prompt, *answer), (0,) * 6 + (1,) * n,
                    (0.0,) * 6 + tuple(-math.log(VOCABULARY) + rng.gauss(0, 0.5) for _ in answer),
                    (0.0,) * 6 + (rng.choice([-1.0, 1.0]),) * n, (1.0,) * (6 + n),
                )
            )  # fmt: skip
    return Batch(step, tuple(samples), tuple(sorted({s.rollout_id for s in samples})), {"reward": 0.5})


def poisoned(given: Batch) -> Batch:
    """One sample's advantage is not a number: one rank meets it, and nobody else."""
    *others, last = given.samples
    bad = replace(last, advantages=tuple(math.nan if m else 0.0 for m in last.mask))
    return replace(given, samples=(*others, bad))


def shared_out(given: Batch, adapters: Sequence[str]) -> Batch:
    """The adapters take its samples in turns."""
    samples = (replace(s, adapter=adapters[i % len(adapters)]) for i, s in enumerate(given.samples))
    return replace(given, samples=tuple(samples))


def guided(given: Batch) -> Batch:
    """Every other sample has a guide, which says nothing of some tokens."""
    rng = random.Random(given.step)
    said = [tuple(rng.choices((math.nan, -1.0, -4.0, -8.0), k=len(sample.mask))) for sample in given.samples[1::2]]
    samples = [*given.samples]
    samples[1::2] = [replace(s, guidance=Guidance(one, 0.3)) for s, one in zip(samples[1::2], said, strict=True)]
    return replace(given, samples=tuple(samples))


def lead(learner: LightningTrainer, out: Path) -> dict[str, Any]:
    """Everything that the training loop asks of a trainer, on rank 0; what came of it."""
    given = [batch(1), guided(batch(2)), poisoned(batch(3)), batch(4, 1, 1), replace(batch(5), samples=())]
    metrics = [learner.step(shared_out(one, learner.weight_sets.names)) for one in given]
    before = learner.logprobs(ROWS)
    learner.save(out / "checkpoint")
    if learner.settings.weights == "lora":
        learner.save_weights(out / "adapter", merged=False)
    learner.save_weights(out / "merged", merged=True)
    kept = learner.adapter()
    learner.remember_served()
    metrics.append(learner.step(batch(6)))
    moved = learner.adapter()
    learner.load(out / "checkpoint")
    metrics.append(learner.step(batch(6)))
    found = {"metrics": metrics, "kept": kept, "moved": moved, "again": learner.adapter(), "before": before}
    found["all"] = {name: learner.adapter(name) for name in learner.weight_sets.names}
    return found | {
        "old": learner.logprobs(ROWS, served=True),
        "now": learner.logprobs(ROWS, adapter=learner.weight_sets.names[-1]),
    }


def main(what: str, directory: Path) -> None:
    rank = int(os.environ["RANK"])
    out = directory / what
    out.mkdir(exist_ok=True)
    adapters = OWN if what.startswith("adapters") else ()
    ranks = Ranks()
    # The seed differs at first, and must not stay so. A sharded base is computed as on GPUs: with checkpointing.
    # Of passes one machine's memory plan may allow longer ones than another's.
    own: Any = {"seed": rank, "max_tokens_per_batch": 30 + 40 * rank, **(FULL if what.startswith("full") else {})}
    learner = trainer(directory, adapters, ranks, gradient_checkpointing=what.endswith("fsdp"), **own)
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    recomputed: list[int] = []  # the times that a layer was computed in a backward pass
    learner.policy_model.base_model.layers[0].mlp.register_forward_pre_hook(
        lambda *_: recomputed.append(1) if torch._C._current_graph_task_id() >= 0 else None
    )
    if rank:
        ranks.follow(learner)
        layer = learner.policy_model.base_model.layers[0].mlp.up_proj
        weight = getattr(layer, "base_layer", layer).weight
        sharded = isinstance(weight, DTensor) and weight.to_local().numel() < weight.numel()
        found = {"rank": rank, "sharded": sharded, "recomputed": len(recomputed)}
        if not learner.weight_sets.sharded:
            found |= {"adapter": learner.adapter(), "all": learner.weight_sets.all_weights()}
        torch.save(found, out / f"rank-{rank}.pt")
        return
    if what == "waits":
        while True:
            learner.step(batch(1))
            (out / "stepped").touch()
    torch.save(lead(learner, out), out / "rank-0.pt")
    ranks.end()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
