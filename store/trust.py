"""Decides whose rewards act on everybody: whether training stops or goes back, and which version is the best.

Every reward trains the rollout that it was given to. On everybody act

- those of evaluators: `rewards.evidence`, which is 1 for an admin's key, one made with `keys create --evaluator`,
  `rewards.function`, and where no key is needed
- those of other keys that see all rollouts, until the first one of an evaluator
- never those of other keys made with `--scope own`

A gate counts those of evaluators alone (`features/promotion/promotions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..core.json_text import dumps
from ..core.records import Reward, Rollout, RolloutStatus
from ..core.returns import earned
from .database import Database, read
from .rewards import Returns

LOOKED_AT = 2**16  # rollouts among which those that count are looked for
_NAMED = "name IN (SELECT CAST(value AS TEXT) FROM json_each(:names))"
# What was posted before there was a first key was posted without one.
WHOSE = f"""
SELECT EXISTS (SELECT 1 FROM keys) OR COALESCE((SELECT MIN(evidence) FROM rewards), 1) = 0 AS apart,
    EXISTS (SELECT 1 FROM rewards WHERE evidence = 1 AND key_id IS NOT NULL AND {_NAMED})
    OR EXISTS (SELECT 1 FROM rewards WHERE evidence = 1 AND key_id IS NULL AND {_NAMED}
        AND created_at >= COALESCE((SELECT MIN(created_at) FROM keys), 0))
    AS evaluated
"""
IS_EVALUATORS = "rewards.evidence = 1"
_SEES_ALL = "({0}.key_id IS NULL OR {0}.key_id IN (SELECT key_id FROM keys WHERE scope = 'all'))"
# `:plain`: there are none of evaluators. `:names`: of rewards that are in `trainer.reward_weights`.
REWARD_COUNTS = f"({_NAMED} AND ({IS_EVALUATORS} OR (:plain AND {_SEES_ALL.format('rewards')})))"
# Whether it failed or was discarded by the word of a key that counts. Nobody knows which key it was.
END_COUNTS = f"(end_counts = 1 OR (:plain AND {_SEES_ALL.format('rollouts')}))"
HAS_REWARD_THAT_COUNTS = f"""
EXISTS (SELECT 1 FROM rewards WHERE rewards.rollout_id = rollouts.rollout_id AND {REWARD_COUNTS})
"""
# Whether its `reward` is made of rewards that count alone.
COUNTS_AS_IT_IS = f"""
CASE WHEN :plain THEN {_SEES_ALL.format("rollouts")} ELSE (end_counts = 1 OR status <> 'failed') AND NOT EXISTS (
    SELECT 1 FROM rewards WHERE rewards.rollout_id = rollouts.rollout_id AND {_NAMED} AND evidence = 0
) END
"""
OPENED_BY_ONE_THAT_COUNTS = f"(rollouts.evidence = 1 OR (:plain AND {_SEES_ALL.format('rollouts')}))"
COUNTED = f"""
SELECT rollouts.rollout_id AS rollout, CASE WHEN {END_COUNTS} THEN status ELSE 'completed' END AS status, rewards.*
FROM rollouts LEFT JOIN rewards ON rewards.rollout_id = rollouts.rollout_id AND {REWARD_COUNTS}
WHERE rollouts.rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids)) ORDER BY reward_id
"""
SINCE_VERSION = f"""
SELECT * FROM rollouts
WHERE n > COALESCE((SELECT n FROM rollouts WHERE n > 0 ORDER BY n DESC LIMIT 1 OFFSET {LOOKED_AT}), 0)
    AND policy_version >= :version AND mode <> 'eval' AND status <> 'running'
    AND (status <> 'discarded' OR NOT {END_COUNTS})
    AND ((status = 'failed' AND {END_COUNTS}) OR {HAS_REWARD_THAT_COUNTS})
ORDER BY n DESC LIMIT :newest
"""
NEWEST_REWARDS = f"""
SELECT COUNT(*) AS rewards, SUM(CASE WHEN {REWARD_COUNTS} THEN 1 ELSE 0 END) AS counted
FROM rewards WHERE reward_id > (SELECT MAX(reward_id) FROM rewards) - 200 AND {_NAMED}
"""


Whose = Literal["everybody's", "plain keys'", "evaluators'"]


@dataclass(frozen=True, slots=True)
class Uncounted:
    """None of the newest `rewards` acts on everybody."""

    rewards: int
    story: str


class Counted(NamedTuple):
    """A rollout, with its status and rewards (oldest first) by the word of those whose rewards act on everybody."""

    rollout: Rollout
    status: RolloutStatus
    rewards: list[Reward]


class Trust:
    """Knows whose rewards act on everybody, by the rewards that there are."""

    def __init__(self, database: Database, returns: Returns) -> None:
        self._db = database
        self._returns = returns

    async def whose(self) -> Whose:
        """Return whose rewards act on everybody: everybody's where none came with another key."""
        row = await self._db.one(WHOSE, {"names": await self._names()})
        assert row is not None
        if not row["apart"]:
            return "everybody's"
        return "evaluators'" if row["evaluated"] else "plain keys'"

    async def params(self) -> dict[str, object]:
        """Return the parameters of this module's conditions."""
        return {"plain": await self.whose() == "plain keys'", "names": await self._names()}

    async def _names(self) -> str:
        return dumps([*(await self._returns.rules()).weights])

    async def counted(self, rollouts: Sequence[Rollout]) -> list[Counted]:
        """Return these rollouts by the word of those whose rewards act on everybody."""
        found = {one.rollout_id: Counted(one, one.status, []) for one in rollouts}
        for row in await self._db.all(COUNTED, {"rollout_ids": dumps([*found])} | await self.params()):
            one = found[row["rollout"]] = found[row["rollout"]]._replace(status=row["status"])
            if row["reward_id"] is not None:
                one.rewards.append(read(Reward, row, retrain=False))
        return [*found.values()]

    async def returns(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the returns that act on everybody, by rollout id; without those that have none."""
        rules, counted = await self._returns.rules(), await self.counted(rollouts)
        found = {one.rollout_id: earned(rewards, rules, status).returned for one, status, rewards in counted}
        return {rollout_id: value for rollout_id, value in found.items() if value is not None}

    async def since(self, version: int, newest: int) -> list[Counted]:
        """Return the newest ended rollouts that act on everybody and began with this version or later, oldest first."""
        params = {"version": version, "newest": newest} | await self.params()
        return await self.counted((await self._db.records(Rollout, SINCE_VERSION, **params))[::-1])

    async def uncounted(self) -> Uncounted | None:
        """Return that none of the newest rewards acts on everybody, and what to do; None if one does."""
        params = await self.params()
        row = await self._db.one(NEWEST_REWARDS, params)
        if row is None or not row["rewards"] or row["counted"]:
            return None
        why = "their keys see their own rollouts alone" if params["plain"] else "an evaluator's came before"
        return Uncounted(
            row["rewards"],
            f"none of the newest {row['rewards']} acts on all, as {why}. They are trained on, but nothing watches for "
            "a falling reward. Reward with an admin's key, or one of `keys create NAME --evaluator` (docs/keys.md)",
        )
