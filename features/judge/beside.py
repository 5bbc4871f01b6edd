"""Says what rewarders have spent, and warns of those that train and that nobody has checked against labels."""

from __future__ import annotations

from ...core.config.root import Config
from ...proxy.api.beside import Beside, Fields
from .config import JudgeConfig, RewarderConfig
from .kinds import made
from .table import ENOUGH, Checked, KeptAnswers, last_check, spent_by_each


class RewardersBeside(Beside):
    """The warnings, in `GET /policy`, and the spending, in `GET /status`."""

    _sources: dict[str, str] | None = None  # of those that train, by what `rewards check` calls them

    async def of_status(self, key_id: str | None) -> Fields:
        return {"spent": [] if key_id is not None else await spent_by_each(self.store.database)}

    async def of_policy(self) -> Fields:
        if self._sources is None:
            weights = self.config.trainer.reward_weights
            trains = [
                one for one in self.config.section(JudgeConfig).rewarders(self.config.rewards) if weights.get(one[0])
            ]
            self._sources = {
                called(self.config, *one): await source(self.config, *one) for one in trains if one[1].judges
            }
        found = {kind: await last_check(self.store.database, by) for kind, by in self._sources.items()}
        return {"warnings": [line for kind, check in found.items() if (line := warning(kind, check))]}


def called(config: Config, name: str, one: RewarderConfig) -> str:
    """Return what commands call a rewarder: its kind, or its name where there are several of the kind."""
    kinds = [other.kind for _, other in config.section(JudgeConfig).rewarders(config.rewards)]
    return one.kind if kinds.count(one.kind) == 1 else name


async def source(config: Config, name: str, one: RewarderConfig) -> str:
    """Return the `source` that a rewarder's checks are kept by."""
    return await made(name, one, config, KeptAnswers(name, one, config.section(JudgeConfig).budget)).source()


def warning(kind: str, check: Checked | None) -> str | None:
    """Return what to know of a rewarder that trains; None if it was found to agree with people."""
    if check is None or check.labels < ENOUGH:
        why = "nobody checked it" if check is None else f"was checked with {check.labels} labels"
        return (
            f"{kind} trains, and {why}: label {ENOUGH} rollouts (`lightning-proxy rollouts rate`),"
            f" then run `lightning-proxy rewards check {kind}`"
        )
    if check.low <= 0.5:
        return (
            f"{kind} trains, and its order may be chance: {check.alike:.2f} of pairs are as labels say"
            f" (`lightning-proxy rewards try {kind} ID` shows what it gives)"
        )
    return None
