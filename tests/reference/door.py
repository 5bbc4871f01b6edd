"""The trainer's door for the tests of this folder, and the only file here that imports the product.

In go plain values, such as JSON has: settings of the section `trainer`, and rows. A row is
`{"rollout", "adapter", "answers": [{"prompt", "ids", "logprobs", "advantage", "sampling"?, "result"?, "teacher"?}]}`.
`prompt` is all that the model was shown, as token ids. It begins with the row so far: the last answer's prompt and ids.
`result` is [start, end) of what a tool wrote within the prompt, `teacher` {"logprobs", "weight"} a guide's scores.
Out come gradients as float64 tensors, by adapter and name, and metrics.
A rollout of a group is `{"rewards", "calls": [{"prompt", "agent", "rewards", "answered", "at", "fate"?}]}`, rewards by
name. `fate`: "rejected" (another attempt's answer was used), "negative" (so it was, and is taught against), "left out".
Out come advantages: one for each call, None where a call is not trained on.
A lesson of fine-tuning is a row (sft), {"chosen", "rejected"} (dpo) or {"row", "up"} (kto).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_proxy.core.records import ModelCall, Reward
from lightning_proxy.features.tune.lessons import Example, Lessons
from lightning_proxy.trainer.credit.strategies import group_credit, training_rules
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Guidance, RolloutRewards, Sample, Sampling, Sibling, Sifted
from support.calls import call
from support.sections import with_features

Json = dict[str, Any]
Weights = dict[str, Tensor]
PLAIN: Json = {
    "learning_rate": 1e-6, "lora_rank": 4, "lora_alpha": 8, "report_to": [], "dtype": "float32", "threads": 1,
    "max_sample_tokens": 256, "max_grad_norm": 1e9,
}  # fmt: skip
OUT = ("rejected", "left out")


@dataclass(frozen=True)
class Taken:
    """What a step computed: gradients of the trained weights by adapter and name, and its metrics."""

    gradients: dict[str, Weights]
    metrics: dict[str, float]


class Trainer:
    """A trainer of a model in a directory. Full weights are an adapter named `default`."""

    def __init__(self, model: Path, settings: Json, adapters: Mapping[str, Sequence[str]] | None = None) -> None:
        full = settings.get("weights") == "full"
        policy = {"model": str(model), "directory": str(model.parent / "policy"), "adapters": adapters or {}}
        policy["publish"] = "merged" if full else "lora"
        config = with_features(trainer=PLAIN | settings, policy=policy)
        self._trainer = LightningTrainer(config.trainer, config.policy)
        self._trainer.entropy.load({"coef": config.trainer.entropy.coef, "is_low": True})
        own = config.model_dump(include={"algorithms", "tune"})
        self.settings: Json = config.trainer.model_dump() | own["algorithms"] | own["tune"]

    def move(self, seed: int, scale: float) -> dict[str, Weights]:
        """Add noise to the weights that are trained; return them in float64, by adapter and name in the base model."""
        noise = torch.Generator().manual_seed(seed)
        sets = self._trainer.weight_sets
        sets.set({
            name: {key: w + torch.randn(w.shape, generator=noise) * scale for key, w in sorted(weights.items())}
            for name, weights in sets.all_weights().items()
        })  # fmt: skip
        return {n: {_name(k, n): w.double() for k, w in ws.items()} for n, ws in sets.all_weights().items()}

    def step(self, rows: Sequence[Json], compared: Mapping[str, int]) -> Taken:
        """Compute the gradients of a step. `compared`: the rollouts that were compared, by adapter."""
        samples = tuple(map(_sample, rows))
        rollouts = tuple(dict.fromkeys(sample.rollout_id for sample in samples))
        batch = Batch(1, samples, rollouts, {}, sum(compared.values()), dict(compared))
        self._trainer.forward_backward(batch)
        gradients: dict[str, Weights] = {name: {} for name in self._trainer.weight_sets.names}
        for key, parameter in self._trainer.policy_model.named_parameters():
            if parameter.grad is not None:
                adapter = next((name for name in gradients if f".{name}." in key), "default")
                gradients[adapter][_name(key, adapter)] = parameter.grad.double()
        return Taken(gradients, self._trainer.optim_step())

    def tune(self, method: str, lessons: Sequence[Json]) -> list[tuple[Weights, Weights]]:
        """Fine-tune on lessons; return the weights before each optimizer step, and the gradients that it takes."""
        from lightning_proxy.features.tune.run import tune  # loads trl

        taken: list[tuple[Weights, Weights]] = []
        parts: dict[str, Callable[[Json], Any]] = {
            "sft": lambda row: Example((_sample(row),)),
            "dpo": lambda one: Example((_sample(one["chosen"]), _sample(one["rejected"]))),
            "kto": lambda one: Example((_sample(one["row"]),), one["up"]),
        }

        def note(*_: object) -> None:
            named = self._trainer.policy_model.named_parameters()
            of = {_name(key, "default"): p for key, p in named if p.requires_grad}
            gradients = {key: p.grad.double() for key, p in of.items() if p.grad is not None}
            taken.append(({key: p.detach().double().clone() for key, p in of.items()}, gradients))

        hook = register_optimizer_step_pre_hook(note)
        try:
            with TemporaryDirectory() as directory:
                given = Lessons(tuple(map(parts[method], lessons)), (), {})
                assert tune(method, self._trainer, given, Path(directory), lambda: False) is not None
        finally:
            hook.remove()
        return taken

    def close(self) -> None:
        self._trainer.close()


def advantages(settings: Json, group: Sequence[Json]) -> list[list[float | None]]:
    """Return the advantages of a group's calls, rollout by rollout."""
    config = with_features(trainer=PLAIN | settings).trainer
    rules = training_rules(config)
    siblings = []
    for number, one in enumerate(group):
        rewards = [Reward(str(number), value, name=name) for name, value in one["rewards"].items()]
        calls = [_call(f"{number}-{place}", given) for place, given in enumerate(one["calls"])]
        for made, given in zip(calls, one["calls"], strict=True):
            rewards += [Reward(str(number), v, made.call_id, name=name) for name, v in given["rewards"].items()]
        fates = [given.get("fate") for given in one["calls"]]
        left_out, negative = ({i for i, fate in enumerate(fates) if fate in names} for names in (OUT, ("negative",)))
        sifted = Sifted(calls, left_out, negative)
        siblings.append(Sibling(calls, RolloutRewards.counted(rewards, rules), sifted))
    return [[one and one.advantage for one in credited] for credited in group_credit(siblings, config)]


def _call(call_id: str, given: Json) -> ModelCall:
    return call(
        call_id, given["agent"], tuple(given["prompt"]), status="ok" if given["answered"] else "error",
        started_at=given["at"], superseded_by="another" if given.get("fate") == "rejected" else None,
    )  # fmt: skip


def _name(key: str, adapter: str) -> str:
    return key.removeprefix("base_model.model.").replace(f".{adapter}.", ".").replace(".base_layer.", ".")


def _sample(row: Json) -> Sample:
    last = row["answers"][-1]
    ids = [*last["prompt"], *last["ids"]]
    n = len(ids)
    mask, logprobs, advantages, temperatures, scores = [0] * n, [0.0] * n, [0.0] * n, [1.0] * n, [math.nan] * n
    shaped, results, weight = [], [], 0.0
    for answer in row["answers"]:
        start, tokens, sampling = len(answer["prompt"]), len(answer["ids"]), _sampling(answer.get("sampling", {}))
        own = slice(start, start + tokens)
        assert ids[: own.stop] == [*answer["prompt"], *answer["ids"]], "an answer's prompt is the row before it"
        mask[own], logprobs[own] = [1] * tokens, answer["logprobs"]
        advantages[own], temperatures[own] = [answer["advantage"]] * tokens, [sampling.temperature] * tokens
        if not sampling.is_plain:
            shaped.append((start, own.stop, sampling))
        if answer.get("result"):
            results.append(tuple(answer["result"]))
        if answer.get("teacher"):
            scores[own], weight = answer["teacher"]["logprobs"], answer["teacher"]["weight"]
    return Sample(
        row["rollout"], "task", *map(tuple, (ids, mask, logprobs, advantages, temperatures)), adapter=row["adapter"],
        shaped=tuple(shaped), results=tuple(results), guidance=Guidance(tuple(scores), weight) if weight else None,
    )  # fmt: skip


def _sampling(given: Json) -> Sampling:
    tuples = {"allowed": tuple(given["allowed"])} if "allowed" in given else {}
    if "bias" in given:
        tuples["bias"] = tuple((token, value) for token, value in given["bias"])
    return Sampling(**(given | tuples))
