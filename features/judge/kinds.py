"""Makes the rewarders that the configuration names, and refuses those that cannot work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.redact import Redactor
from .config import APIS, JudgeConfig, RewarderConfig
from .judge import Judge
from .model import JudgeModel
from .next_message import NextMessage
from .process import Function
from .rank import Rank
from .rewarder import Away, Rewarder
from .rubric import Rubric
from .table import KeptAnswers


def made(name: str, one: RewarderConfig, config: Config, answers: KeptAnswers, shuffle: str = "") -> Rewarder:
    """Return one rewarder of a configuration, which gives rewards of this name."""
    clean = without_secrets(config)
    model = JudgeModel(one, answers, clean)
    match one.kind:
        case "function":
            return Function(config.rewards)
        case "judge":
            return Judge(config.section(JudgeConfig).calls, clean, answers)
        case "rank":
            return Rank(name, one, model, shuffle)
        case "rubric":
            return Rubric(name, one, model, config.rewards)
        case _:
            return NextMessage(name, one, model)


def without_secrets(config: Config) -> Callable[[str], str]:
    """Return what takes secrets, and what `recording.redact` names, out of a text that a judge reads."""
    return Redactor(config.recording.redact.model_copy(update={"secrets": True}), config.keys()).text


def named(config: Config, which: str) -> tuple[str, RewarderConfig]:
    """Return the rewarder that has this name, or is the only one of this kind. Raise ConfigError."""
    rewarders = config.section(JudgeConfig).rewarders(config.rewards)
    found = [one for one in rewarders if one[0] == which] or [one for one in rewarders if one[1].kind == which]
    if len(found) != 1:
        known = ", ".join(f"{one.kind} ({name})" for name, one in rewarders) or "none"
        raise ConfigError(f"judge.use has {'several' if found else 'no'} {which}; there is {known}")
    return found[0]


async def check(config: Config) -> None:
    """Raise ConfigError if a rewarder cannot work, or has a name that does not count."""
    keys = config.section(JudgeConfig)
    rewarders = keys.rewarders(config.rewards)
    names = [name for name, one in rewarders if one.kind != "judge"]
    for name, one in rewarders:
        if one.asks:
            _require_judge(one, config)
        if (one.name or len(names) > 1) and name in names and name not in config.trainer.reward_weights:
            raise ConfigError(f"judge.use: rewards named {name} have no weight: add it to trainer.reward_weights")
        rewarder = made(name, one, config, KeptAnswers(name, one, keys.budget))
        try:
            await rewarder.check()
        except Away as error:
            raise ConfigError(f"{rewarder.label}: {error}") from None
        finally:
            await rewarder.close()


def _require_judge(one: RewarderConfig, config: Config) -> None:
    """Raise ConfigError unless the model may be asked: elsewhere with key and budget, and knowingly if it is ours."""
    what, budget = f"judge.use: {one.kind}: {one.model}", config.section(JudgeConfig).budget
    if one.is_elsewhere and one.key is None:
        raise ConfigError(f"{what} needs a key: set {APIS[one.api][1]}, or its api_key")
    if one.is_elsewhere and budget.tokens is None and budget.usd is None:
        raise ConfigError(f"{what} costs money: set judge.budget.tokens or judge.budget.usd")
    if _place(one.address) == _place(f"http://127.0.0.1:{config.proxy.port}"):
        raise ConfigError(f"{what} is asked through this proxy, which would record and judge that, too: name the "
                          "model server's address")  # fmt: skip
    if _is_policy(one, config) and not one.is_policy:
        raise ConfigError(f"{what} is the policy, and would judge itself: name another, or set is_policy: true")


def _is_policy(one: RewarderConfig, config: Config) -> bool:
    policy = config.policy_upstream
    ours = () if policy is None else (*policy.urls, *policy.published_to)
    return _place(one.address) in map(_place, ours)


def _place(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    return host, parts.port


def readers(rewarders: Sequence[tuple[str, RewarderConfig]], judge: str | None) -> list[str]:
    """Return for the log which models read rollouts, and where. `judge`: the judge of calls."""
    found = [f"judge.use: {one.kind}: {one.model} at {urlsplit(one.address).hostname} reads rollouts"
             for _, one in rewarders if one.asks]  # fmt: skip
    of_calls = any(one.kind == "judge" for _, one in rewarders)
    return [*found, *([f"judge.use: judge: {judge} reads rollouts"] if of_calls else [])]
