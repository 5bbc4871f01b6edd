"""The rewards that were posted, for rollouts and for single calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..errors import NotFound
from ..returns import Earned, earned
from ..types import OPERATOR, Reward, Sender
from .database import Database, Row, Transaction
from .idempotency import Answer, answer_once
from .returns import Counting, Returns, count_reward, read_counting
from .rollouts import ROLLOUT
from .rows import read

REWARD = """
INSERT INTO rewards (rollout_id, call_id, name, value, source, comment, final, key_id, evidence, created_at)
VALUES (:rollout_id, :call_id, :name, :value, :source, :comment, :final, :key_id, :evidence, :at)
RETURNING reward_id
"""
ROLLOUT_COMPLETE = """
UPDATE rollouts SET status = 'completed', ended_at = :at WHERE rollout_id = :rollout_id AND status = 'running'
"""
# With all of its group, whichever steps took or dropped its siblings; of those, what the sender may decide over.
ROLLOUT_OFFER_AGAIN = """
UPDATE rollouts SET step = NULL, dropped = NULL, dropped_by = NULL
WHERE rollout_id = :rollout_id OR (group_id = :group_id AND status <> 'running' AND (NOT :own OR key_id IS :key_id))
"""
# A range is one post's, up to others' that PostgreSQL counted in between.
CHANGED = """
SELECT DISTINCT rollout_id FROM rewards AS new WHERE reward_id BETWEEN :first AND :last AND EXISTS (
    SELECT 1 FROM rewards AS old WHERE old.rollout_id = new.rollout_id AND old.name = new.name
    AND old.reward_id < new.reward_id AND COALESCE(old.call_id, '') = COALESCE(new.call_id, '')
) ORDER BY rollout_id
"""


class Rewards:
    """The table of rewards. Nothing in it is ever changed: the newest reward counts."""

    def __init__(self, database: Database, returns: Returns) -> None:
        self._db = database
        self._returns = returns

    async def of(self, rollout_id: str) -> list[Reward]:
        """Return all rewards ever posted for a rollout, oldest first."""
        statement = "SELECT * FROM rewards WHERE rollout_id = :rollout_id ORDER BY reward_id"
        return [read_reward(row) for row in await self._db.all(statement, {"rollout_id": rollout_id})]

    async def earned(self, rollout_id: str) -> Earned:
        """Return the rewards of a rollout and its calls, whatever its status."""
        return earned(await self.of(rollout_id), await self._returns.rules())

    async def newest(self) -> int | None:
        """Return the number of the newest reward; it grows with every reward."""
        row = await self._db.one("SELECT MAX(reward_id) AS n FROM rewards")
        return None if row is None else row["n"]

    async def changed(self, reward_ids: Sequence[int]) -> list[str]:
        """Return the rollouts of rewards that came in the place of earlier ones. `reward_ids`: those of one post."""
        span = {"first": min(reward_ids, default=0), "last": max(reward_ids, default=0)}
        return [row["rollout_id"] for row in await self._db.all(CHANGED, span)]

    async def post(
        self, rewards: Sequence[Reward], key: str | None = None, body: bytes = b"", by: Sender = OPERATOR
    ) -> Answer:
        """Record all of `rewards` or none, and return one answer for each. `by`: who posts them.

        A second post with the same `key` (Idempotency-Key) and body gets the first answer again; with another body it
        is a Conflict.
        """

        async def work(db: Transaction) -> Answer:
            counting = await read_counting(db)
            return [await post_reward(db, one, counting, by) for one in rewards]

        return await self._db.write(lambda db: answer_once(db, key, body, lambda: work(db)))


async def post_reward(db: Transaction, reward: Reward, counting: Counting, by: Sender = OPERATOR) -> dict[str, Any]:
    """Record a reward in a transaction that is under way, and return the answer. Raise NotFound."""
    row: dict[str, Any] = {"rollout_id": reward.rollout_id, "call_id": reward.call_id}
    row |= {"at": time.time(), "value": reward.value} | by._asdict()
    rollout = await db.one(ROLLOUT, row)
    if rollout is None:
        raise NotFound(f"no rollout {reward.rollout_id!r}", param="rollout_id")
    call = "SELECT 1 FROM calls WHERE call_id = :call_id AND rollout_id = :rollout_id"
    if reward.call_id is not None and await db.one(call, row) is None:
        raise NotFound(f"rollout {reward.rollout_id!r} has no call {reward.call_id!r}", param="call_id")
    details = {"name": reward.name, "source": reward.source, "comment": reward.comment, "final": reward.final}
    (inserted,) = await db.all(REWARD, row | details)
    await count_reward(db, counting, rollout, reward, inserted["reward_id"], row["at"])
    if reward.final:
        await db.run(ROLLOUT_COMPLETE, row)
    if reward.retrain:
        await db.run(ROLLOUT_OFFER_AGAIN, row | {"group_id": rollout["group_id"]})
    return {"reward_id": inserted["reward_id"], "rollout_id": reward.rollout_id, "status": "recorded"}


def read_reward(row: Row) -> Reward:
    return read(Reward, row, final=bool(row["final"]), retrain=False)
