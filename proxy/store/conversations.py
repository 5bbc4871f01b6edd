"""Digests of conversations, by which a request without a rollout's name finds the rollout that it continues."""

from __future__ import annotations

from .database import Database

CONVERSATION_POINT = """
INSERT INTO conversation_points (digest, rollout_id, at) VALUES (:digest, :rollout_id, :at)
ON CONFLICT (digest) DO UPDATE SET rollout_id = excluded.rollout_id, at = excluded.at
"""
# What was said in several rollouts leads to none of them.
CONVERSATION_ORIGIN = """
INSERT INTO conversation_points (digest, rollout_id, at) VALUES (:digest, :rollout_id, :at)
ON CONFLICT (digest) DO UPDATE SET
    rollout_id = CASE WHEN conversation_points.rollout_id = excluded.rollout_id THEN excluded.rollout_id END,
    at = excluded.at
"""
CONVERSATION_TIP = """
INSERT INTO conversation_tips (digest, at, call_id, rollout_id) VALUES (:digest, :at, :call_id, :rollout_id)
ON CONFLICT (digest, at, call_id) DO NOTHING
"""
CONVERSATION_LEADS_TO = """
SELECT rollouts.rollout_id FROM conversation_points JOIN rollouts USING (rollout_id) WHERE digest = :digest
"""
# Takes the newest. Of requests, one that failed goes before one that is under way, and that before an answered one.
CONVERSATION_TAKE = """
DELETE FROM conversation_tips WHERE digest = :digest AND (at, call_id) = (
    SELECT recent.at, recent.call_id
    FROM (SELECT at, call_id, rollout_id FROM conversation_tips WHERE digest = :digest ORDER BY at DESC LIMIT 64)
        AS recent
    JOIN rollouts ON rollouts.rollout_id = recent.rollout_id
    LEFT JOIN calls ON calls.call_id = recent.call_id
    ORDER BY CASE calls.status WHEN 'error' THEN 0 WHEN 'cancelled' THEN 0 WHEN 'incomplete' THEN 1 ELSE 2 END,
             recent.at DESC
    LIMIT 1
)
RETURNING rollout_id
"""
CONVERSATION_COUNTS = """
SELECT (SELECT COUNT(*) FROM conversation_points) AS points, (SELECT COUNT(*) FROM conversation_tips) AS tips
"""
POINTS_FORGET = """
DELETE FROM conversation_points WHERE digest IN (
    SELECT digest FROM conversation_points WHERE at < :before ORDER BY at LIMIT :limit
)
"""
TIPS_FORGET = """
DELETE FROM conversation_tips WHERE (digest, at, call_id) IN (
    SELECT digest, at, call_id FROM conversation_tips WHERE at < :before ORDER BY at LIMIT :limit
)
"""
TIPS_OF = "SELECT digest, at, call_id FROM conversation_tips WHERE rollout_id = :rollout_id"
TIP_DELETE = "DELETE FROM conversation_tips WHERE digest = :digest AND at = :at AND call_id = :call_id"
POINTS_OF = "SELECT digest, rollout_id FROM conversation_points WHERE rollout_id = :rollout_id"
POINT_DELETE = "DELETE FROM conversation_points WHERE digest = :digest AND rollout_id = :rollout_id"


class ConversationIndex:
    """Finds the rollout of a digest. The recorder writes digests, in the commit of their call."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def leads_to(self, digest: bytes) -> str | None:
        """Return the last rollout that was at this point, if one rollout alone was."""
        row = await self._db.quick(CONVERSATION_LEADS_TO, {"digest": digest})
        return None if row is None else row["rollout_id"]

    async def take(self, digest: bytes) -> str | None:
        """Take one of the calls that wait under this digest and return its rollout. No two requests take the same."""
        row = {"digest": digest}
        if await self._db.quick("SELECT 1 FROM conversation_tips WHERE digest = :digest LIMIT 1", row) is None:
            return None
        taken = await self._db.write(lambda db: db.all(CONVERSATION_TAKE, row))
        return taken[0]["rollout_id"] if taken else None


async def forget_conversations(database: Database, rollout_id: str) -> None:
    """Forget a rollout's digests. They have no index by rollout: every call would have to keep it up."""
    for of_it, delete in ((TIPS_OF, TIP_DELETE), (POINTS_OF, POINT_DELETE)):
        if rows := await database.all(of_it, {"rollout_id": rollout_id}):
            await database.commit([(delete, [dict(row) for row in rows])])
