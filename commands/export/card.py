"""Writes the model card of an exported policy version. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...core.json_text import dumps
from ...core.records import PolicyVersion
from ...store.reports.versions import MeanReward
from ...store.training import Step, TrainedData

MAX_RANKS = (8, 16, 32, 64, 128, 256, 512)  # what vLLM takes for --max-lora-rank


class Method(NamedTuple):
    """A method of training: its tag on model hubs, and what it is, in words."""

    tag: str
    words: str


METHODS = {
    "rl": Method("reinforcement-learning", "reinforcement learning from rewards (LightningRL)"),
    "sft": Method("sft", "supervised fine-tuning on the best rollouts (TRL's SFTTrainer)"),
    "dpo": Method("dpo", "direct preference optimization on pairs of rollouts (TRL's DPOTrainer)"),
    "kto": Method("kto", "Kahneman-Tversky optimization on single rollouts (TRL's KTOTrainer)"),
}


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card shows. `steps`: from the base model to this version, oldest first; `rewards`: by mode and version.

    `rank`: of the adapter. `full`: all weights were trained, and there is no adapter.
    """

    base: str
    version: PolicyVersion
    form: str
    rank: int
    full: bool
    steps: tuple[Step, ...]
    data: TrainedData
    rewards: Mapping[tuple[str, int], MeanReward]


def card(facts: CardFacts) -> str:
    """Return the README.md of the directory, with the header that model hubs read."""
    parts = (_header(facts), _about(facts), _rewards(facts), _data(facts), _use(facts))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _header(facts: CardFacts) -> Iterator[str]:
    yield "---"
    if (base := _public_name(facts)) is not None:
        yield f"base_model: {dumps(base)}"
    yield f"library_name: {'peft' if facts.form == 'adapter' else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield f"tags: [lightning-proxy, {', '.join(METHODS[method].tag for method in _methods(facts))}]"
    yield "---"


def _public_name(facts: CardFacts) -> str | None:
    """The base model's name on a hub; None for a directory of this machine."""
    return None if Path(facts.base).exists() else facts.base


def _about(facts: CardFacts) -> Iterator[str]:
    version, count = facts.version, len(facts.steps)
    name = Path(facts.base).name
    full = "A full model: all weights of" if facts.full else "A full model: a LoRA adapter merged into"
    what = "A LoRA adapter for" if facts.form == "adapter" else full
    yield f"# {name}, policy version {version.version}"
    yield ""
    yield f"{what} `{name}`, trained with lightning-proxy. The licence of the base model applies."
    yield ""
    made = time.strftime("%Y-%m-%d", time.gmtime(version.created_at))
    yield f"- made: {made}"
    yield f"- training steps from the base model to here: {count} ({', '.join(_methods(facts))})"
    for method in _methods(facts):
        yield f"- method `{method}`: {METHODS[method].words}"
    yield f"- served weights compared with the trainer's: {'yes' if version.verified else 'no'}"


def _method(step: Step) -> str:
    return str(step.metrics.get("method", "rl"))


def _methods(facts: CardFacts) -> list[str]:
    """The methods of its steps, in order, each once."""
    return list(dict.fromkeys(map(_method, facts.steps))) or ["rl"]


def _rewards(facts: CardFacts) -> Iterator[str]:
    n = facts.version.version
    yield "## Reward before and after"
    yield ""
    yield f"| rollouts | base model | version {n} |"
    yield "|---|---|---|"
    for mode, label in (("eval", "held out (mode `eval`)"), ("train", "training (mode `train`)")):
        before, after = (facts.rewards.get((mode, version)) for version in (0, n))
        yield f"| {label} | {_mean(before)} | {_mean(after)} |"
    means = [step.metrics["reward_mean"] for step in facts.steps if "reward_mean" in step.metrics]
    if means:
        yield ""
        yield f"Mean reward of the first training step's rollouts: {means[0]:.3f}; of the last one's: {means[-1]:.3f}."
    yield ""
    yield "Means over the tasks of rewarded rollouts that began with the version. The tasks of the two may differ."


def _mean(found: MeanReward | None) -> str:
    return "-" if found is None else f"{found.mean:.3f} ({found.rollouts} rollout{'s' * (found.rollouts != 1)})"


def _data(facts: CardFacts) -> Iterator[str]:
    data = facts.data
    yield "## Data"
    yield ""
    tuned = [step for step in facts.steps if _method(step) != "rl"]
    for step in tuned:
        yield f"- step {step.step}, `{_method(step)}`: {_learned_from(_method(step), step.metrics)}"
    if data.rollouts:
        days = [time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (data.first, data.last) if at is not None]
        what = f"{data.rollouts} rollouts of {data.tasks} tasks, recorded from {days[0]} to {days[-1]}."
        yield f"- all steps of `rl`: {what}" if tuned else what
    elif len(tuned) < len(facts.steps) or not tuned:
        yield ("- " if tuned else "") + "None of the rollouts that it learned from by RL are in the store any more."


def _learned_from(method: str, metrics: Mapping[str, Any]) -> str:
    """What a step of fine-tuning learned from, by its metrics; it takes no rollouts from the store."""

    def count(name: str, noun: str) -> str:
        n = round(metrics.get(name, 0))
        return f"{n} {noun}{'s' * (n != 1)}"

    seen, learned = count("rollouts", "rewarded rollout"), count("rollouts_trained", "rollout")
    kind = {
        "sft": f"{count('samples', 'row')} of {learned}, the best of {seen}",
        "dpo": f"{count('pairs', 'pair')} of {learned}, out of {seen}",
        "kto": f"{count('samples', 'row')} of {learned}: {count('thumbs_up', 'row')} with thumbs up, "
        f"{count('thumbs_down', 'row')} with thumbs down",
    }[method]
    measured = round(metrics.get("groups_held_out", 0))
    held_out = f"; {measured} more {'was' if measured == 1 else 'were'} held out to measure on" if measured else ""
    return f"{kind}, of {count('groups_trained', 'task')}{held_out}."


def _use(facts: CardFacts) -> Iterator[str]:
    base = _public_name(facts) or "BASE"
    yield "## Use"
    yield ""
    yield "```sh"
    if facts.form == "adapter":
        rank = next((rank for rank in MAX_RANKS if rank >= facts.rank), MAX_RANKS[-1])
        yield f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules policy=DIR"
    else:
        yield "vllm serve DIR"
    yield "```"
    yield ""
    yield "```python"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if facts.form == "adapter":
        yield "from peft import PeftModel"
        yield f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({dumps(base)}), DIR)"
        yield f"tokenizer = AutoTokenizer.from_pretrained({dumps(base)})"
    else:
        yield "model, tokenizer = AutoModelForCausalLM.from_pretrained(DIR), AutoTokenizer.from_pretrained(DIR)"
    yield "```"
