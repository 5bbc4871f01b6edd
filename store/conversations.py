"""Digests of conversations, which lead from a request that names no rollout to the rollout that it continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .database import Database, Records

CONVERSATION_POINT = """
INSERT INTO conversation_points (digest, rollout_id, at) VALUES (:digest, :rollout_id, :at)
ON CONFLICT (digest) DO UPDATE SET rollout_id = excluded.rollout_id, at = excluded.at
"""
# A text that occurs in several rollouts leads to none of them.
CONVERSATION_ORIGIN = CONVERSATION_POINT.replace(
    "rollout_id = excluded.rollout_id",
    "rollout_id = CASE WHEN conversation_points.rollout_id = excluded.rollout_id THEN excluded.rollout_id END",
)
CONVERSATION_TIP = """
INSERT INTO conversation_tips (digest, at, call_id, rollout_id, exact)
VALUES (:digest, :at, :call_id, :rollout_id, :exact)
ON CONFLICT (digest, at, call_id) DO NOTHING
"""
CONVERSATION_LEADS_TO = """
SELECT rollouts.rollout_id FROM conversation_points JOIN rollouts USING (rollout_id) WHERE digest = :digest
"""
# A point in a conversation: whether an entry waits there, and which rollouts it leads to.
CONVERSATION_AT = """
SELECT EXISTS (SELECT 1 FROM conversation_tips WHERE digest = :loose) AS waits,
    (SELECT rollouts.rollout_id FROM conversation_points JOIN rollouts USING (rollout_id) WHERE digest = :exact)
        AS exact,
    (SELECT rollouts.rollout_id FROM conversation_points JOIN rollouts USING (rollout_id) WHERE digest = :loose)
        AS loose
"""
# Answers of parallel conversations are continued in their order if they are at most this far apart. Older entries were
# abandoned.
TOGETHER_S = 60.0
# How long after a failure a request counts as a retry, if its client does not say so.
TRIED_S = 3600.0
# An entry that waits under a digest: with these results of tools, of this rollout, or that failed since then. Of
# requests, one that failed goes before one that is under way, and that before an answered one.
_WAITS = f"""
WHERE digest = :digest AND (at, call_id) = (
    SELECT recent.at, recent.call_id
    FROM (SELECT at, call_id, rollout_id, exact FROM conversation_tips WHERE digest = :digest ORDER BY at DESC LIMIT 64)
        AS recent
    JOIN rollouts ON rollouts.rollout_id = recent.rollout_id
    LEFT JOIN calls ON calls.call_id = recent.call_id
    WHERE (recent.exact = :exact OR :exact IS NULL) AND (recent.rollout_id = :rollout_id OR :rollout_id IS NULL)
        AND ((calls.status IN ('error', 'cancelled') AND rollouts.status = 'running' AND recent.at > :since)
             OR :since IS NULL)
    ORDER BY CASE calls.status WHEN 'error' THEN 0 WHEN 'cancelled' THEN 0 WHEN 'incomplete' THEN 1 ELSE 2 END,
             CASE WHEN recent.at >= (SELECT MAX(at) FROM conversation_tips WHERE digest = :digest) - {TOGETHER_S}
                  THEN 0 ELSE 1 END,
             recent.at
    LIMIT 1
)
RETURNING rollout_id
"""
CONVERSATION_TAKE = f"DELETE FROM conversation_tips {_WAITS}"
# Puts it behind the others instead: it waits until the call that takes it is recorded.
CONVERSATION_QUEUE = f"""
UPDATE conversation_tips SET at = (SELECT MAX(at) + 0.001 FROM conversation_tips WHERE digest = :digest) {_WAITS}
"""
CONVERSATION_TAKEN = """
DELETE FROM conversation_tips WHERE digest = :digest AND rollout_id = :rollout_id AND call_id <> :call_id
"""
CONVERSATION_COUNTS = """
SELECT (SELECT COUNT(*) FROM conversation_points) AS points, (SELECT COUNT(*) FROM conversation_tips) AS tips
"""
POINTS_FORGET = """
DELETE FROM conversation_points WHERE digest IN (
    SELECT digest FROM conversation_points WHERE at < :before ORDER BY at LIMIT :limit
) RETURNING 1
"""
TIPS_FORGET = """
DELETE FROM conversation_tips WHERE (digest, at, call_id) IN (
    SELECT digest, at, call_id FROM conversation_tips WHERE at < :before ORDER BY at LIMIT :limit
) RETURNING 1
"""
TIPS_OF = "SELECT digest, at, call_id FROM conversation_tips WHERE rollout_id = :rollout_id"
TIP_DELETE = "DELETE FROM conversation_tips WHERE digest = :digest AND at = :at AND call_id = :call_id"
POINTS_OF = "SELECT digest, rollout_id FROM conversation_points WHERE rollout_id = :rollout_id"
POINT_DELETE = "DELETE FROM conversation_points WHERE digest = :digest AND rollout_id = :rollout_id"


class ConversationIndex(Records):
    """Finds the rollout that a digest leads to. The recorder writes digests in the same commit as their call."""

    async def leads_to(self, digest: bytes) -> str | None:
        """Return the rollout that this digest leads to; None if it leads to none, or to several."""
        row = await self._db.quick(CONVERSATION_LEADS_TO, {"digest": digest})
        return None if row is None else row["rollout_id"]

    async def longest(self, rollout_ids: Sequence[str]) -> str | None:
        """Return the rollout with the most calls (the first, if several have equally many); None without rollouts."""
        statement = "SELECT calls FROM rollouts WHERE rollout_id = :rollout_id"
        calls = {one: await self._db.quick(statement, {"rollout_id": one}) for one in rollout_ids}
        return max(calls, key=lambda one: (calls[one] or {"calls": 0})["calls"], default=None)

    async def rollout_at(self, exact: bytes, loose: bytes) -> str | None:
        """Take an entry waiting at a point of a conversation, and return its rollout; else return the last one there.

        `exact`, `loose`: the point's digests with and without tool results. Matches of `exact` are preferred.
        """
        there = await self._db.quick(CONVERSATION_AT, {"exact": exact, "loose": loose})
        assert there is not None
        taken = None
        if there["waits"]:
            taken = await self.take(loose, exact=exact)
            if taken is None and there["exact"] is None:
                taken = await self.take(loose)
        return taken or there["exact"] or there["loose"]

    async def add(self, origins: Sequence[dict[str, Any]]) -> None:
        await self._db.commit([(CONVERSATION_ORIGIN, origins)])

    async def take(
        self,
        digest: bytes,
        *,
        exact: bytes | None = None,
        rollout_id: str | None = None,
        since: float | None = None,
        keep: bool = False,
    ) -> str | None:
        """Take one of the calls that wait under this digest and return its rollout; None if none waits.

        The arguments narrow the choice: to calls that also have the digest `exact`, of `rollout_id`, or that failed
        after `since` in a running rollout. A taken call no longer waits; with `keep`, it moves behind the others, and
        is removed once the call that takes it is recorded.
        """
        row = {"digest": digest, "exact": exact, "rollout_id": rollout_id, "since": since}
        if await self._db.quick("SELECT 1 FROM conversation_tips WHERE digest = :digest LIMIT 1", row) is None:
            return None
        taken = await self._db.write(lambda db: db.all(CONVERSATION_QUEUE if keep else CONVERSATION_TAKE, row))
        return taken[0]["rollout_id"] if taken else None


async def forget_conversations(database: Database, rollout_id: str) -> None:
    """Forget a rollout's digests. This reads whole tables, because an index by rollout would slow down every call."""
    for of_it, delete in ((TIPS_OF, TIP_DELETE), (POINTS_OF, POINT_DELETE)):
        if rows := await database.all(of_it, {"rollout_id": rollout_id}):
            await database.commit([(delete, [dict(row) for row in rows])])
