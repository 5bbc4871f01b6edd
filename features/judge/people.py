"""The rollouts that a person has not rated, and rewards that are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...core.errors import NotFound
from ...store.database import Database, Row, Transaction
from ...store.rewards import count_all, read_counting
from ...store.rollouts import ROLLOUT

NAME = "human"  # of people's rewards
Order = Literal["newest", "uncertain", "random"]

TAKE_BACK = "DELETE FROM rewards WHERE reward_id = :reward_id AND rollout_id = :rollout_id"
GIVEN = """
SELECT 1 FROM rewards
WHERE reward_id = :reward_id AND rollout_id = :rollout_id AND name = :name AND (:any OR key_id IS :key_id)
"""
# Of the newest 5,000 rollouts that were opened with one key, or of all, those that this person has not rated.
_OF_KEY = "SELECT * FROM rollouts WHERE key_id = :key_id ORDER BY n DESC LIMIT 5000"
_OF_ALL = "SELECT * FROM rollouts WHERE n > (SELECT MAX(n) FROM rollouts) - 5000"
QUEUE = """
WITH seen AS ({seen})
SELECT rollout_id, task_id, reward FROM seen
WHERE status IN ('completed', 'failed') AND calls > 0 AND NOT EXISTS (
    SELECT 1 FROM rewards WHERE rewards.rollout_id = seen.rollout_id AND name = :name AND source = :person
)
ORDER BY {order} LIMIT :limit
"""
# A reward in the middle says least.
_UNCERTAIN = "reward IS NULL, ABS(reward - (SELECT (MIN(reward) + MAX(reward)) / 2 FROM seen)), n DESC"
ORDERS: dict[Order, str] = {"newest": "n DESC", "random": "RANDOM()", "uncertain": _UNCERTAIN}


class PeopleTable:
    """What people may rate, and have rated."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def queue(self, person: str, order: Order, limit: int, key_id: str | None) -> Sequence[Row]:
        """Return rollouts that a person has not rated. `key_id`: only those that were opened with this key."""
        statement = QUEUE.format(seen=_OF_ALL if key_id is None else _OF_KEY, order=ORDERS[order])
        return await self._db.all(statement, {"person": person, "name": NAME, "limit": limit, "key_id": key_id})

    async def take_back(self, rollout_id: str, reward_id: int, key_id: str | None, *, of_any: bool) -> None:
        """Delete a person's reward that was posted with this key, or with `any`. Raise NotFound."""
        row = {"rollout_id": rollout_id, "reward_id": reward_id, "name": NAME, "any": of_any, "key_id": key_id}

        async def work(db: Transaction) -> None:
            if await db.one(GIVEN, row) is None:
                raise NotFound(f"rollout {rollout_id!r} has no reward {reward_id} named {NAME} that this key gave")
            await db.run(TAKE_BACK, row)
            rollout = await db.one(ROLLOUT, row)
            if rollout is not None:
                await count_all(db, (await read_counting(db)).rules, [rollout])

        await self._db.write(work)
