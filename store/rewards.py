"""The posted rewards, and the returns computed from them, which are stored with each rollout.

A post recomputes the returns of its rollouts. When the rules change, all are recomputed, newest first, a few at a time;
`stale_to` tracks the progress. A repeated post gets the first one's answer.

All rewards count in the training of their rollout (`reward`). `trusted_reward` affects everybody: it decides whether
training stops or rolls back, and which version is best. It counts the rewards

- of evaluators (`evidence` is 1): admin keys, keys made with `keys create --evaluator`, `rewards.function`, and
everybody if no key is needed
- of other keys that see all rollouts, until the first reward of an evaluator (`returns.evaluated`)
- but never of other keys made with `--scope own`

A gate counts only evaluators' rewards (`features/promotion/promotions.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from ..core.errors import Conflict, NotFound, StoreUnavailable
from ..core.json_text import dumps, loads
from ..core.records import OPERATOR, Reward, Sender
from ..core.returns import Rules, earned
from .database import LOOK_S, Records, Row, Transaction, in_passing

REWARD = """
INSERT INTO rewards (rollout_id, call_id, name, value, source, comment, final, key_id, evidence, created_at)
VALUES (:rollout_id, :call_id, :name, :reward, :source, :comment, :final, :key_id, :evidence, :at)
RETURNING reward_id
"""
KNOWN = """
SELECT rollout_id, NULL AS call_id FROM rollouts
WHERE rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids))
UNION ALL
SELECT rollout_id, call_id FROM calls WHERE call_id IN (SELECT CAST(value AS TEXT) FROM json_each(:call_ids))
"""
# From the first reward of an evaluator on, where there are keys, rewards of plain keys act on nobody.
EVALUATED = """
UPDATE returns SET evaluated = 1, stale_to = (SELECT COALESCE(MAX(n), 0) FROM rollouts)
WHERE evaluated = 0 AND (NOT (:key_id IS NULL) OR EXISTS (SELECT 1 FROM keys)
    OR EXISTS (SELECT 1 FROM rewards WHERE evidence = 0))
"""
ROLLOUT_COMPLETE = """
UPDATE rollouts SET status = 'completed', ended_at = :at WHERE rollout_id = :rollout_id AND status = 'running'
"""
# With all of its group, whichever steps took or dropped its siblings; of those, what the sender may decide over.
ROLLOUT_OFFER_AGAIN = """
UPDATE rollouts SET step = NULL, dropped = NULL, dropped_by = NULL
WHERE rollout_id = :rollout_id OR (
    group_id = (SELECT group_id FROM rollouts WHERE rollout_id = :rollout_id)
    AND status <> 'running' AND (NOT :own OR key_id IS :key_id)
)
"""
# A range is one post's, up to others' that PostgreSQL counted in between.
CHANGED = """
SELECT DISTINCT rollout_id FROM rewards AS new WHERE reward_id BETWEEN :first AND :last AND EXISTS (
    SELECT 1 FROM rewards AS old WHERE old.rollout_id = new.rollout_id AND old.name = new.name
    AND old.reward_id < new.reward_id AND COALESCE(old.call_id, '') = COALESCE(new.call_id, '')
) ORDER BY rollout_id
"""

RULES = "SELECT weights, failed, low, high, stale_to, evaluated FROM returns WHERE n = 1"
ADOPT = """
UPDATE returns SET weights = :weights, failed = :failed, low = :low, high = :high,
    stale_to = (SELECT COALESCE(MAX(n), 0) FROM rollouts)
WHERE n = 1
"""
COUNTED_TO = "UPDATE returns SET stale_to = :to WHERE n = 1"
STALE = """
SELECT n, rollout_id FROM rollouts WHERE n <= (SELECT stale_to FROM returns) ORDER BY n DESC LIMIT :limit
"""
_PLAIN = "(SELECT evaluated FROM returns) = 0"
_IS_TRUSTED = f"({{0}} = 1 OR (owner IS NULL AND {_PLAIN}))"
OPENED_BY_TRUSTED = _IS_TRUSTED.format("rollouts.evidence")
ENDED_BY_TRUSTED = _IS_TRUSTED.format("end_counts")  # nobody knows by which key, so that of the rollout counts
# On a held-out task, a program that failed has earned nothing.
FAILED_HELD_OUT = "mode = 'eval' AND status = 'failed' AND task_id IS NOT NULL"
POSTED = f"""
SELECT rollouts.rollout_id, status, call_id, name, value, rewards.created_at,
    {ENDED_BY_TRUSTED} AS end_counts, {FAILED_HELD_OUT} AND {OPENED_BY_TRUSTED} AS failed_held_out,
    rewards.evidence = 1 OR (
        {_PLAIN} AND (owner IS NULL OR rewards.key_id IS NULL OR rewards.key_id <> owner)
    ) AS counts
FROM rollouts LEFT JOIN rewards ON rewards.rollout_id = rollouts.rollout_id
WHERE rollouts.rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids)) ORDER BY reward_id
"""
RETURN = """
UPDATE rollouts SET own_reward = :own, reward = :reward, trusted_reward = :trusted, rewarded_at = :at
WHERE rollout_id = :rollout_id AND (own_reward IS NOT :own OR reward IS NOT :reward
    OR trusted_reward IS NOT :trusted OR rewarded_at IS NOT :at)
"""
LOOKED_AT = 2**16  # rollouts among which trusted rewards are looked for
SINCE_VERSION = f"""
SELECT policy_version AS version, task_id, trusted_reward AS reward, created_at AS began,
    CASE WHEN rewarded_at > ended_at THEN rewarded_at ELSE ended_at END AS done
FROM rollouts
WHERE n > COALESCE((SELECT n FROM rollouts WHERE n > 0 ORDER BY n DESC LIMIT 1 OFFSET {LOOKED_AT}), 0)
    AND policy_version >= :version AND mode <> 'eval' AND status <> 'running' AND trusted_reward IS NOT NULL
    AND (status = 'completed' OR (status = 'failed' AND own_reward IS NOT NULL) OR NOT {ENDED_BY_TRUSTED})
ORDER BY n DESC LIMIT :newest
"""
NEWEST_REWARDS = """
SELECT COUNT(rewarded_at), COUNT(trusted_reward), (SELECT evaluated FROM returns)
FROM (
    SELECT rollout_id FROM rewards WHERE reward_id > (SELECT MAX(reward_id) FROM rewards) - 200 LIMIT 200
) AS recent JOIN rollouts ON rollouts.rollout_id = recent.rollout_id
"""
COUNTED_AT_ONCE = 50  # rollouts that one transaction recounts

IDEMPOTENT_FORGET = """
DELETE FROM idempotency WHERE key IN (SELECT key FROM idempotency WHERE created_at < :before LIMIT :limit)
RETURNING 1
"""

Answer = list[dict[str, Any]]


class Scored(NamedTuple):
    """A rollout with its `trusted_reward`. `version`: the policy version that it began with.

    `done`: when it had both ended and been rewarded. Times are Unix times.
    """

    version: int
    task_id: str | None
    reward: float
    began: float
    done: float


@dataclass(frozen=True, slots=True)
class Uncounted:
    """A warning that none of the newest rewards is trusted. `rewards`: their number; `story`: a text for people."""

    rewards: int
    story: str


class Rewards(Records):
    """The table of rewards, which are never changed, and the rules by which the store computes returns."""

    async def of(self, rollout_id: str) -> list[Reward]:
        """Return all rewards ever posted for a rollout, oldest first."""
        every = "SELECT *, value AS reward, 0 AS retrain FROM rewards WHERE rollout_id = :rollout_id ORDER BY reward_id"
        return await self._db.records(Reward, every, rollout_id=rollout_id)

    async def newest(self) -> int | None:
        """Return the number of the newest reward, which grows with every reward."""
        return await self._db.value(int, "SELECT MAX(reward_id) FROM rewards")

    async def changed(self, reward_ids: Sequence[int]) -> list[str]:
        """Return the rollouts where a reward replaced an earlier one. `reward_ids`: the rewards of one post."""
        span = {"first": min(reward_ids, default=0), "last": max(reward_ids, default=0)}
        return [rollout_id for (rollout_id,) in await self._db.all(CHANGED, span)]

    async def post(
        self, rewards: Sequence[Reward], key: str | None = None, body: bytes = b"", by: Sender = OPERATOR
    ) -> Answer:
        """Record all of `rewards` or none, and return one answer for each. `by`: who posts them.

        A second post with the same `key` (Idempotency-Key) and body gets the first answer again. Another body
        raises Conflict.
        """
        work = partial(post_rewards, rewards=rewards, by=by)
        return await self._db.write(lambda db: answer_once(db, key, body, work))

    async def since(self, version: int, newest: int) -> list[Scored]:
        """Return the newest ended training rollouts of `version` or later that have a trusted reward, oldest first."""
        return (await self._db.records(Scored, SINCE_VERSION, version=version, newest=newest))[::-1]

    async def uncounted(self) -> Uncounted | None:
        """Return a warning if none of the newest rewards is trusted; None if one is, or if there are none."""
        ((rewards, counted, evaluated),) = await self._db.all(NEWEST_REWARDS)
        if not rewards or counted:
            return None
        why = "an evaluator's reward came before them" if evaluated else "their keys see only their own rollouts"
        return Uncounted(rewards, (
            f"none of the newest {rewards} rewards is trusted, because {why}. They are trained on, but a falling "
            "reward goes unnoticed. Post rewards with an admin key, or one from `keys create NAME --evaluator` "
            "(docs/security.md)"
        ))  # fmt: skip

    async def rules(self) -> Rules:
        return _read_rules(await self._db.quick(RULES))

    async def adopt(self, rules: Rules) -> None:
        """Use these rules from now on. `recount` brings existing returns up to date."""

        async def work(db: Transaction) -> None:
            low, high = rules.within
            adopted = {"weights": dumps({**rules.weights}), "failed": rules.failed, "low": low, "high": high}
            if _read_rules(await db.one(RULES)) != rules:
                await db.all(ADOPT, adopted)

        if await self.rules() != rules:
            await self._db.write(work)

    async def recount(self) -> None:
        """Recompute outdated returns in small steps. Several processes may do so at once."""
        while (row := await self._db.quick(RULES)) is not None and row["stale_to"]:
            await in_passing(self._db, _count_some)

    async def keep(self) -> None:
        """Keep recomputing outdated returns, because the process that changed the rules may have ended."""
        while True:
            with suppress(StoreUnavailable):  # the next look may succeed
                await self.recount()
            await asyncio.sleep(LOOK_S)

    async def use(self, rules: Rules) -> None:
        """Adopt these rules, and return once all returns are up to date."""
        await self.adopt(rules)
        await self.recount()


async def post_rewards(db: Transaction, rewards: Sequence[Reward], by: Sender = OPERATOR) -> Answer:
    """Record rewards in the current transaction, and return an answer for each. Raises NotFound for an unknown id."""
    rows = [asdict(one) | by._asdict() | {"at": time.time()} for one in rewards]
    ids = sorted({one.rollout_id for one in rewards})
    named = {"rollout_ids": dumps(ids), "call_ids": dumps([one.call_id for one in rewards if one.call_id])}
    known = {tuple(row) for row in await db.all(KNOWN, named)}
    for one in rewards:
        if (one.rollout_id, None) not in known:
            raise NotFound(f"no rollout {one.rollout_id!r}", param="rollout_id")
        if (one.rollout_id, one.call_id) not in known:
            raise NotFound(f"rollout {one.rollout_id!r} has no call {one.call_id!r}", param="call_id")
    recorded = [reward_id for (reward_id,) in await db.many(REWARD, rows)]
    if by.evidence and {one.name for one in rewards} & _read_rules(await db.one(RULES)).weights.keys():
        await db.all(EVALUATED, by._asdict())
    await count_returns(db, ids)
    for statement, wanted in ((ROLLOUT_COMPLETE, "final"), (ROLLOUT_OFFER_AGAIN, "retrain")):
        # In the order in which recorders lock rollouts.
        await db.many(statement, sorted((row for row in rows if row[wanted]), key=itemgetter("rollout_id")))
    status = {"status": "recorded"}
    return [{"reward_id": n, "rollout_id": one.rollout_id} | status for n, one in zip(recorded, rewards, strict=True)]


async def count_returns(db: Transaction, rollout_ids: Iterable[str]) -> None:
    """Compute and store the returns of rollouts from all posted rewards, under the current rules."""
    rules = _read_rules(await db.one(RULES))
    posted = defaultdict[str, list[Row]](list)
    for row in await db.all(POSTED, {"rollout_ids": dumps([*rollout_ids])}):
        posted[row["rollout_id"]].append(row)
    counted = []
    for rollout_id, rows in posted.items():
        given = [(Reward(rollout_id, row["value"], row["call_id"], row["name"]), row["counts"]) for row in rows]
        ended, end_counts, failed_held_out = (rows[0][name] for name in ("status", "end_counts", "failed_held_out"))
        found = earned((reward for reward, _ in given), rules, ended)
        trusted = earned((one for one, counts in given if counts), rules, ended if end_counts else "completed").returned
        if trusted is None and found.returned is None and failed_held_out:
            trusted = 0.0
        at = min((row["created_at"] for row in rows if row["name"] in rules.weights), default=None)
        counted.append({
            "rollout_id": rollout_id, "own": found.own, "reward": found.returned, "trusted": trusted, "at": at
        })  # fmt: skip
    await db.many(RETURN, counted)


async def _count_some(db: Transaction) -> None:
    rollouts = await db.all(STALE, {"limit": COUNTED_AT_ONCE})
    await count_returns(db, (rollout_id for _, rollout_id in rollouts))
    await db.all(COUNTED_TO, {"to": rollouts[-1]["n"] - 1 if len(rollouts) == COUNTED_AT_ONCE else 0})


def _read_rules(row: Row | None) -> Rules:
    assert row is not None  # the schema has one
    return Rules(loads(row["weights"]), row["failed"], (row["low"], row["high"]))


async def answer_once(
    db: Transaction, key: str | None, body: bytes, work: Callable[[Transaction], Awaitable[Answer]]
) -> Answer:
    """Do `work` and store its answer, or return the answer stored under `key`. Raises Conflict if the body differs."""
    if key is None:
        return await work(db)
    body_hash = hashlib.sha256(body).hexdigest()
    row = await db.one("SELECT body_hash, answer FROM idempotency WHERE key = :key", {"key": key})
    if row is None:
        answer = await work(db)
        await db.all(
            "INSERT INTO idempotency (key, body_hash, answer, created_at) VALUES (:key, :body_hash, :answer, :at)",
            {"key": key, "body_hash": body_hash, "answer": dumps(answer), "at": time.time()},
        )
        return answer
    if row["body_hash"] != body_hash:
        raise Conflict("this Idempotency-Key was used for another request; use a new key", param="Idempotency-Key")
    earlier: Answer = loads(row["answer"])
    return earlier
