"""`policy export`: writes a version as a directory that vLLM and transformers can load, with a model card."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ...core.config.policy import DEFAULT_ADAPTER
from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ...core.json_text import dumps
from ...core.records import PolicyVersion
from ...store.opening import opened
from ...store.store import Store
from ...store.training import Step
from ..files import written
from ..vllm import LORA_RANKS

Form = Literal["adapter", "merged"]
MARKER = "COMPLETE"

TAGS = {"rl": "reinforcement-learning"}  # on model hubs; other methods of training are named there as here


async def export_policy(config: Config, number: int, target: Path, form: Form | None) -> Form:
    """Write version `number` to the directory `target`. Return the form written, by default the published one.

    Only the owner may read the files, since weights can reveal users' conversations.
    """
    target = target.expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists: choose a new directory")
    if not config.store.may_be_there:
        raise LightningError(f"there is no store at {config.store.where} (store.url)")
    async with opened(config.store, to_write=False) as database:
        store = Store(database)
        version = await store.versions.get(number)
        source = _files(version, await store.versions.all(), config)
        published: Form = "adapter" if version.publish == "lora" else "merged"
        wanted = form or published
        steps: list[Step] = []  # from the base model to this version
        while (step := await store.steps.of_version(steps[0].base if steps else number)) and step not in steps:
            steps.insert(0, step)
        card = await _card(store, config, version, wanted, steps)
    with written(target) as directory:
        directory.mkdir(mode=0o700, parents=True)
        if wanted == published:
            shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MARKER, "README.md"))
        else:
            _make(config, wanted, source, steps, directory)
        (directory / "README.md").write_text(card, encoding="utf-8")
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
    return wanted


async def where(config: Config, options: str = "") -> str | None:
    """Return a text that says where the live or newest weights are and how to export them; None if there are none.

    `options`: global options for the printed export command.
    """
    if not config.store.may_be_there:
        return None
    async with opened(config.store, to_write=False) as database:
        versions = Store(database).versions
        live, known = await versions.live(), await versions.all()
    here = [version for version in known if version.version and has_files(version)]
    if not here:
        return None
    newest = next((version for version in here if version.version == live.version), here[-1])
    served = "live" if newest.version == live.version else "not live"
    return (
        f"policy version {newest.version} ({served}): {newest.path}\n"
        f"to export it with a model card: lightning-proxy {options}policy export {newest.version} DIR"
    )


def has_files(version: PolicyVersion) -> bool:
    """Return whether the version's files are complete and still there."""
    unfinished = version.status in ("failed", "publishing")
    return not unfinished and version.path is not None and Path(version.path).is_dir()


def _files(version: PolicyVersion, versions: Sequence[PolicyVersion], config: Config) -> Path:
    if version.version == 0:
        raise ConfigError(f"policy version 0 is the base model itself ({config.policy.model}): nothing to export")
    if has_files(version):
        return Path(str(version.path))
    others = ", ".join(str(other.version) for other in versions if has_files(other))
    how = "incomplete" if version.status in ("failed", "publishing") else "gone (see policy.keep_versions)"
    raise LightningError(f"policy version {version.version}: its files are {how}; versions with files: {others or '-'}")


def _make(config: Config, wanted: Form, source: Path, steps: Sequence[Step], target: Path) -> None:
    """Convert a version to the form, adapter or merged, that it was not published in."""
    try:
        import torch
        from peft import PeftModel, get_peft_model, set_peft_model_state_dict
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from ...trainer.weights import lora_config, merged_state
    except ImportError:
        message = f"--as {wanted} needs torch, peft and transformers: pip install 'lightning-proxy[train]'"
        raise LightningError(message) from None
    if wanted == "adapter" and config.trainer.weights == "full":
        raise ConfigError("--as adapter: with trainer.weights: full, no adapter is trained; leave out --as")
    if (base := config.policy.model) is None:
        raise ConfigError("policy.model is not set: converting a version to the other form needs the base model")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    if wanted == "merged":
        merged = PeftModel.from_pretrained(model, str(source)).get_base_model()
        merged.save_pretrained(str(target), state_dict=merged_state(merged))
        AutoTokenizer.from_pretrained(base).save_pretrained(str(target))
        return
    checkpoint = steps[-1].checkpoint if steps else None
    if checkpoint is None or not Path(checkpoint).is_dir():
        raise LightningError("the version was published merged, and the checkpoint that holds its adapter is gone")
    state = torch.load(Path(checkpoint) / "state.pt", map_location="cpu", weights_only=True)
    tuned = get_peft_model(model, lora_config(config.trainer, model))
    assert isinstance(tuned, PeftModel)
    set_peft_model_state_dict(tuned, state["adapters"][DEFAULT_ADAPTER])
    tuned.save_pretrained(str(target))


async def _card(store: Store, config: Config, version: PolicyVersion, form: Form, steps: Sequence[Step]) -> str:
    """Return the model card, with the header that model hubs read. `steps` lead from the base model to the version."""
    base, n = config.policy.model or "the base model", version.version
    hub_name = None if Path(base).exists() else base  # a directory of this machine is nobody's name of a model
    name = Path(base).name
    means = await store.versions.rewards((0, n))
    methods: dict[str, list[Step]] = {}
    for step in steps:
        methods.setdefault(str(step.metrics.get("method", "rl")), []).append(step)
    full = "all weights of" if config.trainer.weights == "full" else "a LoRA adapter merged into"
    serve, rank = "vllm serve DIR", next((most for most in LORA_RANKS if most >= config.trainer.lora_rank), 512)
    if form == "adapter":
        serve = f"vllm serve {hub_name or 'BASE'} --enable-lora --max-lora-rank {rank} --lora-modules policy=DIR"
    header = "" if hub_name is None else f"base_model: {dumps(hub_name)}\n"

    def mean(mode: str, number: int) -> str:
        seen = means.get((mode, number))
        return "-" if seen is None else f"{seen.mean:.3f} (of rollouts: {seen.rollouts})"

    def data(of_method: list[Step]) -> str:
        rollouts, groups = (
            round(sum(step.metrics.get(key, 0) for step in of_method)) for key in ("rollouts_trained", "groups_trained")
        )
        return f"{len(of_method)} steps on {rollouts} rollouts of {groups} groups"

    return f"""---
{header}library_name: {"peft" if form == "adapter" else "transformers"}
pipeline_tag: text-generation
tags: [lightning-proxy, {", ".join(TAGS.get(method, method) for method in methods)}]
---

# {name}, policy version {n}

{"A LoRA adapter for" if form == "adapter" else f"A full model: {full}"} `{name}`, \
trained with lightning-proxy. The licence of the base model applies.

- made: {time.strftime("%Y-%m-%d", time.gmtime(version.created_at))}
- trained, from the base model to here: {"; ".join(f"`{method}`, {data(of)}" for method, of in methods.items())}
- served weights compared with the trainer's: {"yes" if version.verified else "no"}

## Reward before and after

| rollouts | base model | version {n} |
|---|---|---|
| held out (mode `eval`) | {mean("eval", 0)} | {mean("eval", n)} |
| training (mode `train`) | {mean("train", 0)} | {mean("train", n)} |

Each mean is over tasks, from the rewarded rollouts that began with the version. The versions' tasks may differ.

## Use

```sh
{serve}
```
"""
