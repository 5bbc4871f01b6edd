"""What the store keeps of rewarders: who has spoken about a rollout, answers and use of models, checks, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import NotFound
from ...core.json_text import dumps
from ...core.records import Reward
from ...store.database import Database, Row, Transaction
from ...store.rewards import count_returns, post_rewards

SPOKEN_ABOUT = """
INSERT INTO rewarder_spoken (n, rewarder)
SELECT n, :rewarder FROM awaiting_rewards WHERE n = (SELECT n FROM rollouts WHERE rollout_id = :rollout_id)
ON CONFLICT DO NOTHING RETURNING n
"""
_ALL_SPOKE = """
(SELECT COUNT(*) FROM rewarder_spoken
 WHERE rewarder_spoken.n = awaiting_rewards.n
   AND rewarder IN (SELECT CAST(value AS TEXT) FROM json_each(:rewarders))) >= :count
"""
AWAITED_NO_MORE = f"""
DELETE FROM awaiting_rewards WHERE n = (SELECT n FROM rollouts WHERE rollout_id = :rollout_id) AND {_ALL_SPOKE}
"""
AWAITED_FOR_NOTHING = f"DELETE FROM awaiting_rewards WHERE {_ALL_SPOKE}"
NOT_SPOKEN = "NOT EXISTS (SELECT 1 FROM rewarder_spoken WHERE n = awaiting_rewards.n AND rewarder = :rewarder)"
STILL_TO_SPEAK = f"""
SELECT rollouts.rollout_id FROM awaiting_rewards CROSS JOIN rollouts ON rollouts.n = awaiting_rewards.n
WHERE {NOT_SPOKEN} ORDER BY awaiting_rewards.n LIMIT :limit
"""
WAIT_FOR = f"SELECT COUNT(*) FROM awaiting_rewards WHERE {NOT_SPOKEN}"
# Of the newest 5,000 rollouts.
LABELS = """
SELECT COUNT(DISTINCT rewards.rollout_id) AS rollouts, COUNT(DISTINCT source) AS people
FROM (SELECT rollout_id FROM rollouts ORDER BY n DESC LIMIT 5000) AS recent
CROSS JOIN rewards ON rewards.rollout_id = recent.rollout_id
WHERE name = 'human'
"""
ANSWER = "SELECT answer FROM rewarder_answers WHERE digest = :digest LIMIT 1"
ANSWER_KEEP = """
INSERT INTO rewarder_answers (digest, n, answer)
SELECT :digest, n, :answer FROM rollouts WHERE rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:about))
ON CONFLICT DO NOTHING
"""
SPENT_MORE = """
INSERT INTO rewarder_spent (rewarder, tokens, usd) VALUES (:rewarder, :tokens, :usd)
ON CONFLICT (rewarder) DO UPDATE
SET tokens = rewarder_spent.tokens + excluded.tokens, usd = rewarder_spent.usd + excluded.usd
"""
SPENT = "SELECT rewarder AS name, tokens, usd FROM rewarder_spent ORDER BY rewarder"
CHECK_KEEP = """
INSERT INTO rewarder_checks (source, at, labels, alike, low, high) VALUES (:source, :at, :labels, :alike, :low, :high)
ON CONFLICT (source) DO UPDATE
SET at = excluded.at, labels = excluded.labels, alike = excluded.alike, low = excluded.low, high = excluded.high
"""
CHECK = "SELECT * FROM rewarder_checks WHERE source = :source"
ENOUGH = 20  # labels, to begin with
HUMAN = "human"  # the name of people's rewards
Order = Literal["newest", "uncertain", "random"]
TAKE_BACK = """
DELETE FROM rewards WHERE reward_id = :reward_id AND rollout_id = :rollout_id
    AND name = 'human' AND (:any OR key_id IS :key_id) RETURNING reward_id
"""
# Of the newest 5,000 rollouts that were opened with one key, or of all, those that this person has not rated.
_OF_KEY = "SELECT * FROM rollouts WHERE key_id = :key_id ORDER BY n DESC LIMIT 5000"
_OF_ALL = """
SELECT * FROM rollouts WHERE n > COALESCE((SELECT n FROM rollouts WHERE n > 0 ORDER BY n DESC LIMIT 1 OFFSET 5000), 0)
"""
QUEUE = """
WITH seen AS ({seen})
SELECT rollout_id, task_id, reward FROM seen
WHERE status IN ('completed', 'failed') AND calls > 0 AND NOT EXISTS (
    SELECT 1 FROM rewards WHERE rewards.rollout_id = seen.rollout_id AND name = 'human' AND source = :person
)
ORDER BY {order} LIMIT :limit
"""
# A reward in the middle says least.
_UNCERTAIN = "reward IS NULL, ABS(reward - (SELECT (MIN(reward) + MAX(reward)) / 2 FROM seen)), n DESC"
ORDERS: dict[Order, str] = {"newest": "n DESC", "random": "RANDOM()", "uncertain": _UNCERTAIN}


@dataclass(frozen=True, slots=True)
class Checked:
    """How a rewarder, by its `source`, agreed with labels: the share of pairs ordered `alike`, and its interval."""

    source: str
    at: float
    labels: int
    alike: float
    low: float
    high: float


async def spent_by_each(database: Database) -> list[dict[str, Any]]:
    """Return the tokens and USD that each rewarder has spent."""
    return [{name: row[name] for name in ("name", "tokens", "usd")} for row in await database.all(SPENT)]


class Spoken:
    """The rollouts that await some of `rewarders`, which are all that are asked."""

    def __init__(self, database: Database, rewarders: Sequence[str]) -> None:
        self._db = database
        self._all = {"rewarders": dumps([*rewarders]), "count": len(rewarders)}

    async def begin(self) -> None:
        """Await those no longer about which all have spoken: one that was awaited may be gone."""
        await self._db.commit([(AWAITED_FOR_NOTHING, [self._all])])

    async def missing(self, rewarder: str, limit: int) -> list[str]:
        """Return rollouts that await this rewarder, oldest first."""
        rows = await self._db.all(STILL_TO_SPEAK, {"rewarder": rewarder, "limit": limit})
        return [row["rollout_id"] for row in rows]

    async def record(self, rewarder: str, given: Mapping[str, Sequence[Reward]]) -> list[Reward]:
        """Record what a rewarder gave to rollouts, and that it has spoken: all of it or nothing.

        Return the rewards that were recorded: none for a rollout that did not await it any more.
        """

        async def work(db: Transaction) -> list[Reward]:
            recorded: list[Reward] = []
            for rollout_id, rewards in given.items():
                about = {"rollout_id": rollout_id, "rewarder": rewarder, **self._all}
                if await db.all(SPOKEN_ABOUT, about):
                    recorded += rewards
                    await db.all(AWAITED_NO_MORE, about)
            await post_rewards(db, recorded)
            return recorded

        return await self._db.write(work)


async def unrated(database: Database, person: str, order: Order, limit: int, key_id: str | None) -> Sequence[Row]:
    """Return rollouts that a person has not rated. `key_id`: only those that were opened with this key."""
    statement = QUEUE.format(seen=_OF_ALL if key_id is None else _OF_KEY, order=ORDERS[order])
    return await database.all(statement, {"person": person, "limit": limit, "key_id": key_id})


async def take_back(database: Database, rollout_id: str, reward_id: int, key_id: str | None, *, of_any: bool) -> None:
    """Delete a person's reward that was posted with this key, or with `any`. Raise NotFound."""
    row = {"rollout_id": rollout_id, "reward_id": reward_id, "any": of_any, "key_id": key_id}

    async def work(db: Transaction) -> None:
        if not await db.all(TAKE_BACK, row):
            raise NotFound(f"rollout {rollout_id!r} has no reward {reward_id} named {HUMAN} that this key gave")
        await count_returns(db, [rollout_id])

    await database.write(work)
