"""Says what rewarders have spent, and warns of those that train and that nobody has checked against labels."""

from __future__ import annotations

from ..control.beside import Beside, Fields
from .config import RewarderKeys
from .kinds import made
from .table import ENOUGH, Checked, KeptAnswers, last_check, spent_by_each


class RewardersBeside(Beside):
    """The warnings, in `GET /policy`, and the spending, in `GET /status`."""

    _sources: dict[str, str] | None = None  # of those that train, by what `rewards check` calls them

    async def of_status(self, key_id: str | None) -> Fields:
        return {"spent": [] if key_id is not None else await spent_by_each(self.store.database)}

    async def of_policy(self) -> Fields:
        if self._sources is None:
            keys, weights = RewarderKeys.of(self.config.rewards), self.config.trainer.reward_weights
            trains = [(name, one) for name, one in keys.rewarders if one.judges and weights.get(name)]
            kinds = [one.kind for _, one in keys.rewarders]
            self._sources = {
                one.kind if kinds.count(one.kind) == 1 else name: await made(
                    name, one, self.config, KeptAnswers(name, one, keys.budget)
                ).source()
                for name, one in trains
            }
        found = {kind: await last_check(self.store.database, source) for kind, source in self._sources.items()}
        return {"warnings": [line for kind, check in found.items() if (line := _warning(kind, check))]}


def _warning(kind: str, check: Checked | None) -> str | None:
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
