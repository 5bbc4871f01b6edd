"""Keeps the store within `store.retention`, in steps so small that no agent notices them.

Rollouts that are over are deleted when too old or when space is short, oldest first, with all their records; policy
versions and the steps' metrics stay. A rollout that has a running call, or is in the newest step or an unfinished one,
is not over. A rollout that nobody ends is over after a day without a call. When space is short, rollouts that wait for
the trainer are deleted last. Old answers to Idempotency-Keys and digests of conversations are deleted too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.config.root import Config
from ..core.config.server import RetentionConfig
from ..core.errors import LightningError
from .conversations import CONVERSATION_COUNTS, POINTS_FORGET, TIPS_FORGET
from .database import Database, Feed, Transaction, all_in_passing
from .rewards import IDEMPOTENT_FORGET
from .rollouts import ABANDONED_S, ALL, LOOK
from .waiting import HAS_REWARD, IS_OWN

log = logging.getLogger(__name__)

DAY = 86400.0
EVERY_S = 60.0
IDEMPOTENCY_S = 7 * DAY
CONVERSATION_S = 30 * DAY
CONVERSATIONS = 1_000_000  # rows; an answered call of an unnamed rollout takes about five
GIVE_BACK = 256  # pages in one transaction
SPARE = 0.05  # of the file may stay free: the next records need it

# Nothing happens in a rollout that ended before :before, has no call under way, and does not belong to a step that is
# being trained or published. One that nobody ended is over when nothing was asked in it since :quiet.
_IS_OVER = """
COALESCE(rollouts.ended_at, rollouts.created_at) < :before
AND (rollouts.status <> 'running' OR rollouts.created_at < :quiet)
AND (step IS NULL OR step NOT IN (SELECT step FROM steps WHERE status = 'claimed' UNION SELECT MAX(step) FROM steps))
AND NOT EXISTS (
    SELECT 1 FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.started_at >= :quiet
    AND (rollouts.status = 'running' OR calls.status = 'incomplete')
)
"""
# `waits`: the trainer may still take it. `:lone`: also without a task (`takes_lone_rollouts`).
ROLLOUTS_OVER = f"""
SELECT n, created_at, {_IS_OVER} AS is_over,
       mode = 'train' AND (task_id IS NOT NULL OR :lone) AND {HAS_REWARD} AND {IS_OWN}
       AND step IS NULL AND dropped IS NULL AS waits
FROM rollouts WHERE n > :after ORDER BY n LIMIT :limit
"""
ROLLOUT_FORGET = f"DELETE FROM rollouts WHERE n = :n AND {_IS_OVER} RETURNING rollout_id"
COUNT_CHANGES_FOLD = """
DELETE FROM rollout_count_changes
WHERE (SELECT COUNT(*) FROM rollout_count_changes) > (SELECT COUNT(*) FROM rollout_counts)
RETURNING mode, status, rollouts
"""
COUNT_CHANGE = "INSERT INTO rollout_count_changes (mode, status, rollouts) VALUES (:mode, :status, :rollouts)"
PAGES = """
SELECT page_size * page_count AS bytes, page_size * freelist_count AS free
FROM pragma_page_size, pragma_page_count, pragma_freelist_count
/* PostgreSQL:
SELECT COALESCE(SUM(pg_total_relation_size(oid)), 0)::BIGINT AS bytes, 0::BIGINT AS free
FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace
*/
"""
STORE_TOTALS = """
SELECT (SELECT COUNT(*) FROM calls) AS calls, (SELECT COUNT(*) FROM rewards) AS rewards,
       (SELECT MIN(created_at) FROM rollouts WHERE n = (SELECT MIN(n) FROM rollouts)) AS oldest
"""

OnDelete = Callable[[str, str], None]  # rollout id, and why: age or size


class Pages(NamedTuple):
    bytes: int
    free: int

    @property
    def used(self) -> int:
        return self.bytes - self.free


class Keeper:
    """Enforces retention. If several proxies use a store, one of them at a time does the work."""

    def __init__(self, database: Database, config: Config, on_delete: OnDelete) -> None:
        self._db = database
        self._retention = config.store.retention
        trainer = config.trainer
        self._waiting = {"failed": trainer.failed_reward is not None, "lone": trainer.takes_lone_rollouts}
        self._on_delete = on_delete
        self._problem: str | None = None

    async def run(self, every_s: float = EVERY_S) -> None:
        while True:
            try:
                async with self._db.lock("keeper") as ours:
                    if ours:
                        await self.tidy()
            except (LightningError, OSError) as error:  # the next round may succeed
                self._log_change(f"the store could not be tidied up: {error}")
            await asyncio.sleep(every_s)

    async def tidy(self) -> None:
        """Delete old answers and digests, and rollouts that exceed `store.retention`; then free the disk space."""
        now = time.time()
        await self._forget_old(IDEMPOTENT_FORGET, now - IDEMPOTENCY_S)
        ((points, tips),) = await self._db.all(CONVERSATION_COUNTS)
        for statement, count in ((POINTS_FORGET, points), (TIPS_FORGET, tips)):
            await self._forget_old(statement, now, count - CONVERSATIONS)
            await self._forget_old(statement, now - CONVERSATION_S)
        if (days := self._retention.max_age_days) is not None:
            await self._delete(now - days * DAY, "age")
        if (gib := self._retention.max_gib) is not None:
            for waiting in (False, True):
                await self._delete(now, "size", waiting, gib * 2**30 * (1 - SPARE))
        await give_back(self._db, SPARE)
        await Feed(self._db).newest()  # where that is what forgets events
        await self._db.write(fold_counts)
        self._log_change(await over_bound(self._db, self._retention))

    def _log_change(self, problem: str | None) -> None:
        """Log a problem once, not every minute, and log when it is over."""
        if (problem is None) != (self._problem is None):
            log.warning("%s", problem or "the store was tidied up, and is within store.retention")
        self._problem = problem

    async def _delete(self, before: float, reason: str, waiting: bool | None = None, limit: float = 0.0) -> None:
        """Delete rollouts that were over at `before` (Unix time), oldest first, until at most `limit` bytes are used.

        `waiting`: True to delete only rollouts that wait for the trainer, False only others, None all.
        """
        over = {"before": before, "quiet": min(before, time.time() - ABANDONED_S)}
        params = {"after": 0, "limit": LOOK, **over, **self._waiting}
        while (await read_pages(self._db)).used > limit:
            rows = await self._db.all(ROLLOUTS_OVER, params)
            for n, _, is_over, waits in rows:
                if is_over and waiting in (None, bool(waits)):
                    if limit and (await read_pages(self._db)).used <= limit:
                        return
                    for (rollout_id,) in await all_in_passing(self._db, ROLLOUT_FORGET, {"n": n, **over}):
                        self._on_delete(rollout_id, reason)
            # A rollout may be of a clock that was ahead.
            if not rows or before <= rows[-1]["created_at"] <= time.time():
                return
            params["after"] = rows[-1]["n"]

    async def _forget_old(self, statement: str, before: float, most: int = ALL) -> None:
        """Delete old rows, `LOOK` at a time, until none are left or `most` are deleted."""
        while most > 0:
            limit = min(LOOK, most)
            count = len(await all_in_passing(self._db, statement, {"before": before, "limit": limit}))
            most = most - count if count == limit else 0


async def give_back(database: Database, spare: float = 0.0, on_step: Callable[[Pages], None] = lambda _: None) -> None:
    """Shrink the file in small steps until at most the share `spare` of it is free."""
    pages = await read_pages(database)
    while pages.free > spare * pages.bytes:
        await all_in_passing(database, f"PRAGMA incremental_vacuum({GIVE_BACK})", {})
        before, pages = pages, await read_pages(database)
        on_step(pages)
        if pages.free >= before.free:
            return


async def over_bound(database: Database, retention: RetentionConfig) -> str | None:
    """Return a warning if the store is larger than `store.retention.max_gib`."""
    used = (await read_pages(database)).used / 2**30
    if retention.max_gib is None or used <= retention.max_gib:
        return None
    return (
        f"the store holds {used:.3g} GiB, more than store.retention.max_gib ({retention.max_gib:g}): "
        "what cannot be deleted belongs to running rollouts or the newest training step"
    )


async def fold_counts(db: Transaction) -> None:
    counts = Counter[tuple[str, str]]()
    for mode, status, rollouts in await db.all(COUNT_CHANGES_FOLD):
        counts[mode, status] += rollouts
    await db.many(COUNT_CHANGE, [{"mode": m, "status": s, "rollouts": n} for (m, s), n in counts.items()])


async def read_pages(database: Database) -> Pages:
    (pages,) = await database.records(Pages, PAGES)
    return pages


async def read_totals(database: Database) -> dict[str, Any]:
    """Count all calls and rewards, and return when the oldest rollout was opened."""
    (row,) = await database.all(STORE_TOTALS)
    return dict(row)
