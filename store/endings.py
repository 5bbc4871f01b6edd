"""Ends rollouts after their last call, when they are idle, and lists those that wait for a reward function.

Several processes may do this at once: whatever one has done, the others find done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..core.config.rollouts import RolloutsConfig
from ..core.errors import LightningError
from ..core.json_text import dumps
from .database import Database, Transaction, in_passing

log = logging.getLogger(__name__)

ABANDONED_S = 86400.0  # without a call; then a call without an end never has one
LOOK = 200  # rows in one look
LONGEST_PAUSE_S = 30.0
SHORTEST_PAUSE_S = 0.05
ALL = 2**62

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
ROLLOUT_END_IDLE = f"""
UPDATE rollouts SET status = 'completed', reason = :reason, ended_at = :at WHERE n = :n AND {_IS_IDLE}
"""
ROLLOUTS_AWAITING = """
SELECT rollouts.rollout_id FROM awaiting_rewards CROSS JOIN rollouts ON rollouts.n = awaiting_rewards.n
ORDER BY awaiting_rewards.n LIMIT :limit
"""
ROLLOUTS_AWAIT = """
SELECT rollout_id FROM rollouts
WHERE rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids)) AND n IN (SELECT n FROM awaiting_rewards)
"""


class Endings:
    """Ends idle rollouts, and keeps the list of those that still await the reward function."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def end_idle(self, idle_s: float) -> int:
        """Complete every rollout in which nothing has happened for so many seconds; return how many."""
        now, after, ended = time.time(), 0, 0
        times = {"quiet": now - idle_s, "abandoned": now - max(ABANDONED_S, idle_s)}
        end = {"reason": f"no call or reward for {idle_s:g} s", "at": now, **times}
        while rows := await self._db.all(ROLLOUTS_RUNNING, {"after": after, "limit": LOOK, **times}):
            idle = [{"n": row["n"], **end} for row in rows if row["is_idle"]]
            while idle:
                done, looked_at = await in_passing(self._db, partial(_end_some, idle))
                ended, idle = ended + done, idle[looked_at:]
            after = rows[-1]["n"]
        return ended

    async def use_function(self, function: str | None) -> None:
        """Set the reward function that completed rollouts await from now on; None: they await none."""
        used = await self._db.one("SELECT function FROM reward_function")
        if (None if used is None else used["function"]) == function:
            return

        async def work(db: Transaction) -> None:
            await db.run("DELETE FROM reward_function")
            if function is None:
                await db.run("DELETE FROM awaiting_rewards")
            else:
                await db.run("INSERT INTO reward_function VALUES (:function)", {"function": function})

        await self._db.write(work)

    async def awaiting(self, limit: int = ALL) -> list[str]:
        """Return the rollouts that await the reward function, oldest first."""
        return [row["rollout_id"] for row in await self._db.all(ROLLOUTS_AWAITING, {"limit": limit})]

    async def await_still(self, rollout_ids: Sequence[str]) -> set[str]:
        """Return those of these rollouts that still await the reward function."""
        rows = await self._db.all(ROLLOUTS_AWAIT, {"rollout_ids": dumps(rollout_ids)})
        return {row["rollout_id"] for row in rows}


async def _end_some(idle: Sequence[dict[str, Any]], db: Transaction, until: float) -> tuple[int, int]:
    """End the first of these rollouts until about this time (of `perf_counter`); how many, of how many looked at.

    A transaction may be done again: nothing but what it returns changes.
    """
    ended = looked_at = 0
    for row in idle:
        if time.perf_counter() >= until:
            break
        ended, looked_at = ended + await db.run(ROLLOUT_END_IDLE, row), looked_at + 1
    return ended, looked_at


async def end_idle_rollouts(database: Database, config: RolloutsConfig) -> None:
    """End idle rollouts until cancelled, as `rollouts.end_after_idle_s` says. One process of several does it."""
    if (idle_s := config.end_after_idle_s) is None:
        return
    endings = Endings(database)
    while True:
        try:
            async with database.alone("ender") as alone:
                if alone and (ended := await endings.end_idle(idle_s)):
                    log.info("%d idle rollouts were ended", ended)
        except (LightningError, OSError) as error:  # the next round may succeed
            log.warning("idle rollouts could not be ended: %s", error)
        await asyncio.sleep(min(max(idle_s / 10, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
