"""Opens, finds, counts, ends and deletes rollouts, and lists those that await the reward function."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.config.rollouts import RolloutsConfig
from ..core.errors import Conflict, LightningError, NotFound
from ..core.json_text import dumps
from ..core.records import OPERATOR, Mode, Rollout, RolloutName, RolloutStatus, Sender
from .conversations import forget_conversations
from .database import Database, Records, Transaction, all_in_passing
from .rewards import count_returns

log = logging.getLogger(__name__)

# Whether a key of `own` scope names a rollout that another key has opened, since its owner was looked up.
IS_ANOTHERS = """
rollouts.key_id IS NOT :key_id AND EXISTS (SELECT 1 FROM keys WHERE keys.key_id = :key_id AND scope = 'own')
"""
OWNER = "(SELECT key_id FROM keys WHERE key_id = :key_id AND scope = 'own')"
# Runs with the start of every call. The first one opens the rollout; later ones fill in what was not named so far.
# Refused (`mode` would be NULL) for a key that may not see it.
ROLLOUT_SEEN = f"""
INSERT INTO rollouts (rollout_id, task_id, agent, mode, policy_version, key_id, owner, evidence, created_at)
VALUES (:rollout_id, :task_id, :agent, :mode, :pin, :key_id, {OWNER}, :evidence, :at)
ON CONFLICT (rollout_id) DO UPDATE SET
    task_id = COALESCE(rollouts.task_id, excluded.task_id),
    agent = COALESCE(rollouts.agent, excluded.agent),
    mode = CASE WHEN {IS_ANOTHERS} THEN NULL WHEN excluded.mode = 'eval' THEN 'eval' ELSE rollouts.mode END,
    policy_version = COALESCE(rollouts.policy_version, excluded.policy_version)
WHERE rollouts.key_id IS NOT excluded.key_id OR rollouts.mode <> excluded.mode
    OR (rollouts.task_id IS NULL AND excluded.task_id IS NOT NULL)
    OR (rollouts.agent IS NULL AND excluded.agent IS NOT NULL)
    OR (rollouts.policy_version IS NULL AND excluded.policy_version IS NOT NULL)
"""
ROLLOUT_OPEN = f"""
INSERT INTO rollouts (
    rollout_id, task_id, mode, policy_version, alias_model, metadata, key_id, owner, evidence, created_at, group_id
) VALUES (
    :rollout_id, :task_id, :mode, :policy_version, :model, :metadata, :key_id, {OWNER}, :evidence, :at,
    COALESCE(
        (SELECT group_id FROM rollouts WHERE rollout_id = :sibling_of),
        (SELECT n FROM rollouts WHERE rollout_id = :first)
    )
)
"""
# The first of those that are opened together had no number when it was written.
ROLLOUT_FIRST = "UPDATE rollouts SET group_id = n WHERE rollout_id = :first"
ROLLOUT_SIZE = 1_000  # bytes, about, of a rollout and its key, the metadata apart
ROLLOUT_KEY = """
INSERT INTO rollout_keys (key_hash, rollout_id, key_id, may_reward)
VALUES (:key_hash, :rollout_id, :key_id, :may_reward)
"""
ROLLOUT_OPENED_FOR = "SELECT policy_version, alias_model FROM rollouts WHERE rollout_id = :rollout_id"
ROLLOUT_OF_KEY = """
SELECT rollout_id, task_id, mode, status <> 'running' AS ended, may_reward, rollout_keys.key_id, evidence
FROM rollout_keys JOIN rollouts USING (rollout_id) WHERE key_hash = :key_hash
"""
ROLLOUT_OF_ANOTHER_KEY = """
SELECT rollout_id FROM rollouts
WHERE rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids)) AND key_id IS NOT :key_id LIMIT 1
"""
ROLLOUTS_PAGE = "SELECT rollouts.* FROM {source} WHERE {n} < :cursor {filters} ORDER BY {n} DESC LIMIT :limit"
# What a page is read off, by the first of these that is filtered by; and the number by which it is in order.
SOURCES = {
    "prefix": ("rollouts INDEXED BY sqlite_autoindex_rollouts_1", "+rollouts.n"),  # the index on ids
    "agent": (
        "rollout_agents CROSS JOIN rollouts ON rollout_agents.agent = :agent AND rollouts.n = rollout_agents.n",
        "rollout_agents.n",
    ),
}
ROLLOUT_FILTERS = {
    "status": "AND status = :status",
    "task_id": "AND task_id = :task_id",
    "mode": "AND mode = :mode",
    "key_id": "AND rollouts.key_id = :key_id",
    "prefix": "AND rollout_id >= :prefix AND rollout_id < :prefix_end",
    "agent": "AND EXISTS (SELECT 1 FROM rollout_agents AS a WHERE a.agent = :agent AND a.n = rollouts.n)",
}
_LOOKED_AT = "SELECT n, {fits} AS fits FROM ({page}) AS found ORDER BY n DESC"
ROLLOUTS_OF_NUMBERS = (
    "SELECT * FROM rollouts WHERE n IN (SELECT CAST(value AS BIGINT) FROM json_each(:numbers)) ORDER BY n DESC"
)
# `version`: that it began with. `step`: that took it. `key`: the name of the key that it was opened with. `model`: of
# one of its calls. `text`: anywhere in requests and answers, in any case of ASCII.
SEARCHED = {
    "min_reward": "reward >= :min_reward",
    "max_reward": "reward <= :max_reward",
    "since": "created_at >= :since",
    "version": "policy_version = :version",
    "step": "step = :step",
    "key": "key_id IN (SELECT key_id FROM keys WHERE name = :key)",
    "model": "EXISTS (SELECT 1 FROM calls WHERE calls.rollout_id = found.rollout_id AND calls.model = :model)",
    "text": """EXISTS (
        SELECT 1 FROM calls WHERE calls.rollout_id = found.rollout_id
        AND (request LIKE :text ESCAPE '!' OR response LIKE :text ESCAPE '!' OR request LIKE :escaped ESCAPE '!')
        UNION ALL
        SELECT 1 FROM calls JOIN large_requests USING (call_id) WHERE calls.rollout_id = found.rollout_id
        AND (large_requests.request LIKE :text ESCAPE '!' OR large_requests.request LIKE :escaped ESCAPE '!')
    )""",
}
AFTER_ALL_IDS = "\x7f"  # after every character of an id
ALL = 2**62
# How many rollouts a search looks at: in one statement, and until it answers with what it has found so far.
CHUNK, MOST = 5_000, 100_000
TEXT_CHUNK, MOST_TEXTS = 50, 1_000
MOST_S = 2.0
ROLLOUTS_OF_VERSION = """
SELECT * FROM rollouts
WHERE policy_version = :version AND COALESCE(reward, trusted_reward) IS NOT NULL AND foreign_calls = 0 LIMIT :limit
"""
ROLLOUT_END = """
UPDATE rollouts SET status = :status, reason = :reason, ended_at = :at, end_counts = :evidence
WHERE rollout_id = :rollout_id AND status = 'running' RETURNING n
"""
ROLLOUT_DELETE = """
DELETE FROM rollouts WHERE rollout_id = :rollout_id AND status <> 'running'
   AND NOT EXISTS (SELECT 1 FROM steps WHERE steps.step = rollouts.step AND steps.status = 'claimed') RETURNING n
"""
ROLLOUTS_ACTIVE = """
SELECT COUNT(*) AS rollouts FROM rollouts WHERE status = 'running' AND (created_at > :since OR EXISTS (
    SELECT 1 FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.started_at > :since
))
"""
ROLLOUT_COUNTS = "SELECT mode, status, rollouts FROM rollout_counts"
NEWEST_OF_KEY = 20_000  # rollouts of a key that are counted for it
# `waiting`: rewarded, and taken by no step.
ROLLOUT_COUNTS_OF_KEY = """
SELECT mode, status, COUNT(*) AS rollouts, SUM(CASE WHEN mode = 'train' AND status <> 'running' AND step IS NULL
    AND dropped IS NULL AND rewarded_at IS NOT NULL THEN 1 ELSE 0 END) AS waiting
FROM (SELECT * FROM rollouts WHERE key_id = :key_id ORDER BY n DESC LIMIT :newest) AS recent
GROUP BY mode, status
"""

ABANDONED_S = 86400.0  # after which a call that has no end never has one
LOOK = 200  # rows in one look
LONGEST_PAUSE_S = 30.0
SHORTEST_PAUSE_S = 0.05

# Since :quiet no call, reward or event came, and no call is under way. A call that has no end after a day never will:
# its proxy was killed. A rollout without any call has not begun.
_IS_IDLE = """
rollouts.status = 'running' AND rollouts.created_at < :quiet
AND EXISTS (SELECT 1 FROM calls WHERE calls.rollout_id = rollouts.rollout_id)
AND NOT EXISTS (
    SELECT 1 FROM calls WHERE calls.rollout_id = rollouts.rollout_id
    AND (calls.started_at + COALESCE(calls.latency_ms, 0) / 1000 >= :quiet
         OR (calls.status = 'incomplete' AND calls.started_at >= :abandoned))
)
AND NOT EXISTS (SELECT 1 FROM rewards WHERE rewards.rollout_id = rollouts.rollout_id AND rewards.created_at >= :quiet)
AND NOT EXISTS (SELECT 1 FROM events WHERE events.rollout_id = rollouts.rollout_id AND events.created_at >= :quiet)
"""
ROLLOUTS_RUNNING = f"""
SELECT n, {_IS_IDLE} AS is_idle FROM rollouts WHERE status = 'running' AND n > :after ORDER BY n LIMIT :limit
"""
ROLLOUTS_END_IDLE = f"""
UPDATE rollouts SET status = 'completed', reason = :reason, ended_at = :at
WHERE n IN (SELECT CAST(value AS BIGINT) FROM json_each(:numbers)) AND {_IS_IDLE} RETURNING n
"""
AWAITING = "SELECT rollout_id FROM awaiting_rewards CROSS JOIN rollouts ON rollouts.n = awaiting_rewards.n"
AWAITING_OF = """
SELECT rollout_id FROM rollouts
WHERE rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:ids)) AND n IN (SELECT n FROM awaiting_rewards)
"""


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """A key that was made for one rollout, with facts about that rollout.

    `key_id`: the stored key that requested this one; `evidence`: whether that key's rewards are evidence (`Sender`).
    Without `may_reward`, this key may only call the model.
    """

    rollout_id: str
    task_id: str | None = None
    mode: Mode = "train"
    ended: bool = False
    may_reward: bool = True
    key_id: str | None = None
    evidence: bool = False


class Rollouts(Records):
    """The tables of rollouts, of their keys, and of those that await the reward function."""

    async def open(
        self,
        names: Sequence[tuple[RolloutName, str]],
        metadata: dict[str, Any],
        *,
        policy_version: int | None = None,
        model: str | None = None,
        may_reward: bool = True,
        sibling_of: str | None = None,
    ) -> None:
        """Open rollouts with this metadata. `names`: the rollouts, each with the hash of its own key.

        Several rollouts of a task form a group; with `sibling_of`, all join that rollout's group. Without `may_reward`,
        the keys may only call the model. In these rollouts, `policy_version` or `model` answers requests for the alias,
        instead of the live version.
        """
        grouped = len(names) > 1 and sibling_of is None and all(name.task_id is not None for name, _ in names)
        same: dict[str, Any] = {
            "metadata": dumps(metadata), "policy_version": policy_version, "model": model, "may_reward": may_reward,
            "sibling_of": sibling_of, "first": names[0][0].rollout_id if grouped else None, "at": time.time(),
        }  # fmt: skip
        opened = [name._asdict() | same | {"key_hash": key_hash} for name, key_hash in names]
        first = [(ROLLOUT_FIRST, [same])] if grouped else []
        size = len(opened) * (len(same["metadata"]) + ROLLOUT_SIZE)
        await self._db.commit([(ROLLOUT_OPEN, opened), *first, (ROLLOUT_KEY, opened)], size)

    async def get(self, rollout_id: str) -> Rollout:
        statement = "SELECT * FROM rollouts WHERE rollout_id = :rollout_id"
        if (rollout := await self._db.record(Rollout, statement, rollout_id=rollout_id)) is None:
            raise NotFound(f"no rollout {rollout_id!r}", param="rollout_id")
        return rollout

    async def rewarded_of(self, version: int, limit: int) -> list[Rollout]:
        """Return up to `limit` rewarded rollouts that began with this version and that no other model answered."""
        return await self._db.records(Rollout, ROLLOUTS_OF_VERSION, version=version, limit=limit)

    async def opened_for(self, rollout_id: str) -> tuple[str | None, int | None]:
        """Return the rollout's model for the alias and its policy version; each is None if not set."""
        row = await self._db.quick(ROLLOUT_OPENED_FOR, {"rollout_id": rollout_id})
        return (None, None) if row is None else (row["alias_model"], row["policy_version"])

    async def of_key(self, key_hash: str) -> RolloutKey | None:
        return await self._db.record(RolloutKey, ROLLOUT_OF_KEY, key_hash=key_hash)

    async def of_another_key(self, rollout_ids: Iterable[str], key_id: str | None) -> str | None:
        """Return one of these rollouts that was not opened with this key, or None if there is none."""
        ids = dumps([*rollout_ids])
        return await self._db.value(str, ROLLOUT_OF_ANOTHER_KEY, rollout_ids=ids, key_id=key_id)

    async def page(
        self, filters: Mapping[str, Any], limit: int, cursor: int | None = None
    ) -> tuple[list[Rollout], int | None]:
        """Return a page, newest first, and the next page's cursor (None after the last).

        `filters`: from ROLLOUT_FILTERS and SEARCHED. A filter of SEARCHED has no index, so only a limited number of
        rollouts is searched, and a page may be short or empty without being the last.
        """
        chunk, left = (TEXT_CHUNK, MOST_TEXTS) if "text" in filters else (CHUNK, MOST)
        chunk = chunk if filters.keys() & SEARCHED.keys() else limit + 1
        statement, values = page_statement(filters)
        numbers, until, following = list[int](), time.monotonic() + MOST_S, cursor or ALL
        while following and left > 0 and len(numbers) <= limit and time.monotonic() < until:
            rows = await self._db.all(statement, {**values, "cursor": following, "limit": chunk})
            numbers += [n for n, fits in rows if fits]
            left -= len(rows)
            following = rows[-1]["n"] if len(rows) == chunk else 0
        if len(numbers) > limit:
            numbers, following = numbers[:limit], numbers[limit - 1]
        return await self._db.records(Rollout, ROLLOUTS_OF_NUMBERS, numbers=dumps(numbers)), following or None

    async def counts(self) -> dict[tuple[str, str], int]:
        return {(mode, status): rollouts for mode, status, rollouts in await self._db.all(ROLLOUT_COUNTS)}

    async def active(self, since: float) -> int:
        """Count the running rollouts that were opened, or made a call, after `since` (Unix time)."""
        return await self._db.value(int, ROLLOUTS_ACTIVE, since=since) or 0

    async def counts_of_key(self, key_id: str) -> tuple[dict[tuple[str, str], int], int]:
        """Count the newest rollouts of a key by (mode, status), and how many of them wait for the trainer."""
        rows = await self._db.all(ROLLOUT_COUNTS_OF_KEY, {"key_id": key_id, "newest": NEWEST_OF_KEY})
        return {(mode, status): n for mode, status, n, _ in rows}, sum(int(waiting) for *_, waiting in rows)

    async def end(self, rollout_id: str, status: RolloutStatus, reason: str | None, by: Sender = OPERATOR) -> Rollout:
        """End a rollout. Ending it again with the same status changes nothing; another status raises Conflict."""
        row = {"rollout_id": rollout_id, "status": status, "reason": reason, "at": time.time(), "evidence": by.evidence}

        async def work(db: Transaction) -> None:
            if await db.all(ROLLOUT_END, row):
                await count_returns(db, [rollout_id])  # a failed one may count for something

        await self._db.write(work)
        rollout = await self.get(rollout_id)
        if rollout.status != status:
            raise Conflict(f"rollout {rollout_id!r} has already ended as {rollout.status}", param="status")
        return rollout

    async def delete(self, rollout_id: str) -> None:
        """Delete a rollout and all its records. Raises Conflict while it is running or being trained on.

        SQLite overwrites the deleted pages and, if no other process uses the store, truncates the log. Remains may be
        left in the unused part of other pages.
        """
        if (await self.get(rollout_id)).status == "running":
            raise Conflict(f"rollout {rollout_id!r} is running: end it first", param="status")
        if not await self._db.write(lambda db: db.all(ROLLOUT_DELETE, {"rollout_id": rollout_id})):
            raise Conflict(f"rollout {rollout_id!r} is being trained on: try again after the step", param="status")
        await forget_conversations(self._db, rollout_id)
        await self._db.forget_deleted()

    async def end_idle(self, idle_s: float) -> int:
        """Mark every rollout that has been idle for `idle_s` seconds as completed. Return how many there were."""
        now, after, ended = time.time(), 0, 0
        times = {"quiet": now - idle_s, "abandoned": now - max(ABANDONED_S, idle_s)}
        end = {"reason": f"no call or reward for {idle_s:g} s", "at": now, **times}
        while rows := await self._db.all(ROLLOUTS_RUNNING, {"after": after, "limit": LOOK, **times}):
            if idle := [n for n, is_idle in rows if is_idle]:
                ended += len(await all_in_passing(self._db, ROLLOUTS_END_IDLE, {"numbers": dumps(idle), **end}))
            after = rows[-1]["n"]
        return ended

    async def use_function(self, function: str | None) -> None:
        """Set the reward function that completed rollouts await from now on; None for no function."""
        if await self._db.value(str, "SELECT function FROM reward_function") == function:
            return

        async def work(db: Transaction) -> None:
            await db.all("DELETE FROM reward_function")
            if function is None:
                await db.all("DELETE FROM awaiting_rewards")
            else:
                await db.all("INSERT INTO reward_function VALUES (:function)", {"function": function})

        await self._db.write(work)

    async def awaiting(self, rollout_ids: Sequence[str] | None = None) -> set[str]:
        """Return which rollouts (of these, or of all) await the reward function."""
        rows = await self._db.all(AWAITING if rollout_ids is None else AWAITING_OF, {"ids": dumps(rollout_ids)})
        return {rollout_id for (rollout_id,) in rows}


def page_statement(filters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the statement that reads a page of rollouts, and its parameters except `cursor` and `limit`."""
    text = filters.get("text", "")
    values = {
        **filters,
        "prefix_end": f"{filters.get('prefix')}{AFTER_ALL_IDS}",
        "text": _pattern(dumps(text)),
        # A first request is kept in the agent's own writing; None compares with nothing, at once.
        "escaped": None if text.isascii() else _pattern(json.dumps(text)),
    }
    fits = " AND ".join(condition for name, condition in SEARCHED.items() if name in filters)
    return _LOOKED_AT.format(fits=fits or "TRUE", page=page_of(filters)), values


def page_of(filters: Collection[str]) -> str:
    source, n = next((where for name, where in SOURCES.items() if name in filters), ("rollouts", "rollouts.n"))
    own = " ".join(text for name, text in ROLLOUT_FILTERS.items() if name in filters)
    return ROLLOUTS_PAGE.format(source=source, n=n, filters=own)


def _pattern(string: str) -> str:
    """Return a LIKE pattern that finds a string, given as JSON, anywhere within JSON."""
    return f"%{string[1:-1].replace('!', '!!').replace('%', '!%').replace('_', '!_')}%"


async def end_idle_rollouts(database: Database, config: RolloutsConfig) -> None:
    """Keep ending rollouts that have been idle for `rollouts.end_after_idle_s`. If that is not set, return at once."""
    if (idle_s := config.end_after_idle_s) is None:
        return
    while True:
        try:
            async with database.lock("ender") as ours:
                if ours and (ended := await Rollouts(database).end_idle(idle_s)):
                    log.info("%d idle rollouts were ended", ended)
        except (LightningError, OSError) as error:  # the next round may succeed
            log.warning("idle rollouts could not be ended: %s", error)
        await asyncio.sleep(min(max(idle_s / 10, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
