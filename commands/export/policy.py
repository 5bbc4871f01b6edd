"""`policy export`: writes a policy version and its model card as a directory that PEFT, transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from ...core.config.policy import DEFAULT_ADAPTER
from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ...core.json_text import dumps
from ...core.records import PolicyVersion
from ...store.opening import opened
from ...store.store import Store
from ...store.training import Step, TrainedData
from ...store.versions import MeanReward

Form = Literal["adapter", "merged"]
MARKER = "COMPLETE"

MAX_RANKS = (8, 16, 32, 64, 128, 256, 512)  # what vLLM takes for --max-lora-rank


async def export_policy(config: Config, number: int, target: Path, form: str | None) -> Form:
    """Write version `number` to `target`, atomically, and return its form: by default as it was published."""
    if form not in (None, *get_args(Form)):
        raise ConfigError(f"--as is adapter or merged, got {form!r}")
    target = target.expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists: choose a new directory")
    if not config.store.may_be_there:
        raise LightningError(f"there is no store at {config.store.where} (store.url)")
    async with opened(config.store, to_write=False) as database:
        store = Store(database)
        version = await store.versions.get(number)
        source = _files(version, await store.versions.all(), config)
        step = await store.steps.of_version(number)
        published: Form = "adapter" if version.publish == "lora" else "merged"
        wanted = published if form is None else cast(Form, form)
        facts = await _facts(store, config, version, wanted, step)
    with _atomic(target) as temporary:
        if wanted == published:
            shutil.copytree(source, temporary, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MARKER, "README.md"))
        else:
            _made(config, wanted, source, step, temporary)
        (temporary / "README.md").write_text(card(facts), encoding="utf-8")
    return wanted


async def where(config: Config, options: str = "") -> str | None:
    """Say where the newest trained weights are, and how to take them out; None if none were published.

    `options`: what the command that takes them out needs before its name.
    """
    if not config.store.may_be_there:
        return None
    async with opened(config.store, to_write=False) as database:
        versions = Store(database).versions
        live, found = await versions.live(), await versions.all()
    here = [version for version in found if version.version and has_files(version)]
    newest = next((version for version in here if version.version == live.version), here[-1] if here else None)
    if newest is None:
        return None
    served = "live" if newest.version == live.version else "not live"
    return (
        f"policy version {newest.version} ({served}): {newest.path}\n"
        f"to take it away, with a model card: lightning-proxy {options}policy export {newest.version} DIR"
    )


def has_files(version: PolicyVersion) -> bool:
    """Return whether the version's files are complete and still there."""
    unfinished = version.status in ("failed", "publishing")
    return not unfinished and version.path is not None and Path(version.path).is_dir()


@contextmanager
def _atomic(target: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `target` if the block ends without an error. Raises LightningError.

    Only its owner may read it: weights hold users' conversations.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.mkdir(mode=0o700, parents=True)
        yield temporary
        for path in (temporary, *temporary.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except OSError as error:
        raise LightningError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _files(version: PolicyVersion, versions: Sequence[PolicyVersion], config: Config) -> Path:
    if version.version == 0:
        raise ConfigError(f"policy version 0 is the base model itself: {config.policy.model}")
    if has_files(version):
        return Path(str(version.path))
    others = ", ".join(str(other.version) for other in versions if has_files(other))
    gone = version.status if version.status in ("failed", "publishing") else "gone (policy.keep_versions)"
    raise LightningError(f"the files of policy version {version.version} are {gone}; these have files: {others or '-'}")


def _made(config: Config, wanted: Form, source: Path, step: Step | None, target: Path) -> None:
    """Make the other form of a version: that which it was not published in."""
    try:
        import torch
        from peft import PeftModel, get_peft_model, set_peft_model_state_dict
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from ...trainer.weights import lora_config, merged_state
    except ImportError:
        message = f"to make it {wanted} needs torch and peft: pip install 'lightning-proxy[train]'"
        raise LightningError(message) from None
    if config.trainer.weights == "full":
        raise ConfigError("--as adapter: with trainer.weights full there is none; leave --as out")
    if (base := config.policy.model) is None:
        raise ConfigError("policy.model: the base model is needed to make the other form of a version")
    disable_progress_bar()
    if wanted == "merged":
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), str(source))
        merged = model.get_base_model()
        merged.save_pretrained(str(target), state_dict=merged_state(merged))
        AutoTokenizer.from_pretrained(base).save_pretrained(str(target))
        return
    if step is None or step.checkpoint is None or not Path(step.checkpoint).is_dir():
        raise LightningError("the version was published merged, and the checkpoint that has its adapter is gone")
    state = torch.load(Path(step.checkpoint) / "state.pt", map_location="cpu", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    tuned = get_peft_model(model, lora_config(config.trainer, model))
    assert isinstance(tuned, PeftModel)
    set_peft_model_state_dict(tuned, state["adapters"][DEFAULT_ADAPTER])
    tuned.save_pretrained(str(target))


async def _facts(store: Store, config: Config, version: PolicyVersion, form: Form, last: Step | None) -> CardFacts:
    """The content of the model card: the steps from the base model to this version, and rewards before and after."""
    steps: list[Step] = []
    step = last
    while step is not None and step not in steps:
        steps.append(step)
        step = await store.steps.of_version(step.base)
    return CardFacts(
        base=config.policy.model or "the base model",
        version=version,
        form=form,
        rank=config.trainer.lora_rank,
        full=config.trainer.weights == "full",
        steps=tuple(reversed(steps)),
        data=await store.steps.data_of([step.step for step in steps]),
        rewards=await store.versions.rewards((0, version.version)),
    )


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
