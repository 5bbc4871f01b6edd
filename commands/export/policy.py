"""`policy export`: writes a policy version as a directory that PEFT, transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, get_args

from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ...core.records import PolicyVersion
from ...store.opening import opened
from ...store.store import Store
from ...store.training import Step
from .card import CardFacts, card

Form = Literal["adapter", "merged"]
MARKER = "COMPLETE"


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
        from . import weights
    except ImportError:
        message = f"to make it {wanted} needs torch and peft: pip install 'lightning-proxy[train]'"
        raise LightningError(message) from None
    if config.trainer.weights == "full":
        raise ConfigError("--as adapter: with trainer.weights full there is none; leave --as out")
    if config.policy.model is None:
        raise ConfigError("policy.model: the base model is needed to make the other form of a version")
    if wanted == "merged":
        weights.merge(config.policy.model, source, target)
        return
    if step is None or step.checkpoint is None or not Path(step.checkpoint).is_dir():
        raise LightningError("the version was published merged, and the checkpoint that has its adapter is gone")
    weights.adapter_of(config, Path(step.checkpoint), target)


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
        rewards=await store.version_report.rewards((0, version.version)),
    )
