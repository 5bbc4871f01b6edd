"""The rewards that were posted, for rollouts and for single calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from ..core.errors import NotFound
from ..core.records import OPERATOR, Reward, Sender
from ..core.returns import Earned, earned
from .database import Database, Row, Transaction, read
from .idempotency import Answer, answer_once
from .returns import Returns, count_rewards
from .rollouts import ROLLOUT

REWARD = """
INSERT INTO rewards (rollout_id, call_id, name, value, source, comment, final, key_id, evidence, created_at)
VALUES (:rollout_id, :call_id, :name, :value, :source, :comment, :final, :key_id, :evidence, :at)
RETURNING reward_id
"""
CALL_OF_ROLLOUT = "SELECT rollout_id, call_id FROM calls WHERE call_id = :call_id AND rollout_id = :rollout_id"
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

        return await self._db.write(lambda db: answer_once(db, key, body, lambda: post_rewards(db, rewards, by)))


async def post_rewards(db: Transaction, rewards: Sequence[Reward], by: Sender = OPERATOR) -> Answer:
    """Record rewards in a transaction that is under way, and return an answer for each. Raise NotFound."""
    at, sent = time.time(), by._asdict()
    of_calls = {(one.rollout_id, one.call_id) for one in rewards if one.call_id is not None}
    asked = [{"rollout_id": rollout_id} for rollout_id in sorted({one.rollout_id for one in rewards})]
    rollouts = {row["rollout_id"]: row for row in await db.many(ROLLOUT, asked)}
    asked = [{"rollout_id": rollout_id, "call_id": call_id} for rollout_id, call_id in of_calls]
    calls = {tuple(row) for row in await db.many(CALL_OF_ROLLOUT, asked)}
    for one in rewards:
        if one.rollout_id not in rollouts:
            raise NotFound(f"no rollout {one.rollout_id!r}", param="rollout_id")
        if one.call_id is not None and (one.rollout_id, one.call_id) not in calls:
            raise NotFound(f"rollout {one.rollout_id!r} has no call {one.call_id!r}", param="call_id")
    recorded = await db.many(REWARD, [asdict(one) | sent | {"at": at} for one in rewards])
    await count_rewards(db, rollouts, rewards, min((row["reward_id"] for row in recorded), default=0), at)
    ended = sorted({one.rollout_id for one in rewards if one.final})
    await db.many(ROLLOUT_COMPLETE, [{"rollout_id": rollout_id, "at": at} for rollout_id in ended])
    offered = [rollouts[rollout_id] for rollout_id in sorted({one.rollout_id for one in rewards if one.retrain})]
    await db.many(ROLLOUT_OFFER_AGAIN, [dict(row) | sent for row in offered])
    return [
        {"reward_id": row["reward_id"], "rollout_id": one.rollout_id, "status": "recorded"}
        for row, one in zip(recorded, rewards, strict=True)
    ]


def read_reward(row: Row) -> Reward:
    return read(Reward, row, final=bool(row["final"]), retrain=False)
