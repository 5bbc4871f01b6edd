"""Keys for one reward of one call, the rollouts that a person has not rated, and rewards that are taken back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Literal

from ..errors import NotFound, RateLimited, Unauthorized
from ..store.database import Database, Row, Transaction
from ..store.keys import KEY_PREFIX, hash_key
from ..store.returns import count_all, read_counting
from ..store.rewards import post_reward
from ..store.rollouts import ROLLOUT
from ..types import Reward, Sender

NAME = "human"  # of people's rewards
EACH_S = 1.0  # from one change of a key's value to the next
Order = Literal["newest", "uncertain", "random"]

EXPIRED = "DELETE FROM reward_keys WHERE expires_at <= :at"
KEY_GIVEN = """
INSERT INTO reward_keys (key_hash, rollout_id, call_id, key_id, evidence, expires_at)
SELECT :hash, rollout_id, call_id, :key_id, CAST(:evidence AS BIGINT), CAST(:expires_at AS DOUBLE PRECISION) FROM calls
WHERE rollout_id = :rollout_id AND call_id = :call_id
"""
KEY_LIVE = """
SELECT * FROM reward_keys WHERE key_hash = :hash AND expires_at > :at AND (key_id IS NULL OR EXISTS (
    SELECT 1 FROM keys WHERE keys.key_id = reward_keys.key_id AND revoked_at IS NULL
))
"""
KEY_USED = "UPDATE reward_keys SET used_at = :at, reward_id = :reward_id WHERE key_hash = :hash"
TAKE_BACK = "DELETE FROM rewards WHERE reward_id = :reward_id AND rollout_id = :rollout_id"
# SQLite may give its number to the next reward.
KEY_REPLACES_NONE = """
UPDATE reward_keys SET reward_id = NULL WHERE rollout_id = :rollout_id AND reward_id = :reward_id
"""
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

    async def make_key(self, rollout_id: str, call_id: str, by: Sender, expires_at: float) -> str:
        """Return a key for one reward of a call. Raise NotFound without that call."""
        key = f"{KEY_PREFIX}reward-{secrets.token_urlsafe(32)}"
        row = {"hash": hash_key(key), "rollout_id": rollout_id, "call_id": call_id, "expires_at": expires_at}
        row |= {"at": time.time()} | by._asdict()

        async def work(db: Transaction) -> None:
            await db.run(EXPIRED, row)
            if not await db.run(KEY_GIVEN, row):
                raise NotFound(f"rollout {rollout_id!r} has no call {call_id!r}", param="call_id")

        await self._db.write(work)
        return key

    async def reward(self, key: str, value: float) -> None:
        """Record the value of a key in the place of its earlier one. Raise Unauthorized or RateLimited."""
        hashed, now = hash_key(key), time.time()
        await _live(self._db, hashed, now)  # before the writer is asked for anything

        async def work(db: Transaction) -> None:
            row = await _live(db, hashed, now)
            given = Reward(row["rollout_id"], value, row["call_id"], NAME, "thumb", final=False)
            by = Sender(row["key_id"], evidence=bool(row["evidence"]))
            posted = await post_reward(db, given, await read_counting(db), by)
            if row["reward_id"] is not None:  # after the new one, which so has another number
                await _take_back(db, row["rollout_id"], row["reward_id"])
            await db.run(KEY_USED, {"hash": hashed, "at": now, "reward_id": posted["reward_id"]})

        await self._db.write(work)

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
            await _take_back(db, rollout_id, reward_id)

        await self._db.write(work)


async def _live(db: Database | Transaction, hashed: str, now: float) -> Row:
    row = await db.one(KEY_LIVE, {"hash": hashed, "at": now})
    if row is None:
        raise Unauthorized("this key for a reward is not known, or has expired", code="invalid_api_key")
    if now < row["used_at"] + EACH_S:
        raise RateLimited("a key changes its reward once a second", retry_after_s=EACH_S)
    return row


async def _take_back(db: Transaction, rollout_id: str, reward_id: int) -> None:
    row = {"rollout_id": rollout_id, "reward_id": reward_id}
    await db.run(TAKE_BACK, row)
    await db.run(KEY_REPLACES_NONE, row)
    rollout = await db.one(ROLLOUT, row)
    if rollout is not None:
        await count_all(db, (await read_counting(db)).rules, [rollout])
