"""The tests of policy versions before they go live: their rollouts, and what was decided by which numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import Conflict
from ..gate.tests import FACTS, Chooser, Observed, Outcome, Promotion, opened, with_rewards
from ..json_text import dumps, loads
from ..store.database import Database, Row, Transaction
from ..store.rollouts import ROLLOUT_SEEN
from ..store.rows import read
from ..store.versions import POLICY_LOG, TEST_ENDED, VERSION_LIVE, VERSION_RETIRE, VERSION_UNTESTED, read_version
from ..types import PolicyVersion, RolloutName

NOT_GATED = "policy.promotion was set to immediate"  # why a test ended

TESTING = "SELECT n FROM promotions WHERE status = 'testing'"
CANDIDATE = "SELECT * FROM policy_versions WHERE version = :version"
PROMOTION = "SELECT * FROM promotions WHERE n = :n"
# The last test of each version.
PROMOTIONS = "SELECT * FROM promotions WHERE n IN (SELECT MAX(n) FROM promotions GROUP BY version)"
PROMOTION_OF = "SELECT * FROM promotions WHERE version = :version ORDER BY n DESC LIMIT 1"
PROMOTION_UNDER_WAY = "SELECT * FROM promotions WHERE status = 'testing'"
WAITING = "SELECT * FROM policy_versions WHERE status = 'waiting' ORDER BY version DESC LIMIT 1"
REPLACED = """
UPDATE policy_versions SET status = 'ready', error = :why WHERE status = 'waiting' AND version <> :version
"""
WAITS = "UPDATE policy_versions SET status = 'waiting' WHERE version = :version AND status = 'publishing'"
STEP_PUBLISHED = "UPDATE steps SET version = :version WHERE step = :step"
LIVE_NOW = "SELECT version FROM policy_log ORDER BY n DESC LIMIT 1"
BEGIN = """
INSERT INTO promotions (version, against, status, began_at) VALUES (:version, :against, 'testing', :at)
"""
BEGUN = """
UPDATE policy_versions SET status = 'candidate', verified = 1 WHERE version = :version AND status = 'waiting'
"""
ROLLOUT_OF = "SELECT policy_version, mode, task_id, key_id, evidence FROM rollouts WHERE rollout_id = :rollout_id"
PROMOTED_IN = "SELECT version FROM promotion_rollouts WHERE rollout_id = :rollout_id AND promotion = :n"
NEXT_PLACE = """
SELECT COALESCE(MAX(place) + 1, 0) AS place FROM promotion_rollouts
WHERE promotion = :n AND task_id IS :task_id AND opened_by = :opened_by
"""
COMPARED = """
SELECT COUNT(*) AS rollouts FROM promotion_rollouts WHERE promotion = :n AND compared = 1 AND evidence = 1
"""
ASSIGN = """
INSERT INTO promotion_rollouts (rollout_id, promotion, task_id, place, version, compared, opened_by, evidence)
VALUES (:rollout_id, :n, :task_id, :place, :version, :compared, :opened_by, :evidence)
"""
# Of rollouts that are evidence. `shown`: calls that the policy answered by this version, `mixed`: by another one.
OBSERVED = f"""
SELECT promotion_rollouts.rollout_id, promotion_rollouts.task_id, opened_by, place, version, created_at, foreign_calls,
    (SELECT COUNT(*) FROM calls WHERE calls.rollout_id = promotion_rollouts.rollout_id
        AND calls.policy_version = promotion_rollouts.version) AS shown,
    (SELECT COUNT(*) FROM calls WHERE calls.rollout_id = promotion_rollouts.rollout_id
        AND calls.policy_version <> promotion_rollouts.version) AS mixed, {FACTS}
FROM promotion_rollouts JOIN rollouts USING (rollout_id)
WHERE promotion = :n AND compared = 1 AND promotion_rollouts.evidence = 1 ORDER BY rollouts.n
"""
OBSERVED_REWARDS = """
SELECT rewards.* FROM promotion_rollouts JOIN rewards ON rewards.rollout_id = promotion_rollouts.rollout_id
WHERE promotion = :n AND compared = 1 AND promotion_rollouts.evidence = 1 AND rewards.evidence = 1 ORDER BY reward_id
"""
NO_EVIDENCE = "SELECT 1 FROM promotion_rollouts WHERE promotion = :n AND evidence = 0 AND compared = 1 LIMIT 1"
# What changes with every reward and every end of a rollout.
STAMP = """
SELECT (SELECT MAX(reward_id) FROM rewards) AS rewards, (SELECT MAX(n) FROM rollouts) AS opened,
    (SELECT COUNT(*) FROM promotion_rollouts JOIN rollouts USING (rollout_id)
        WHERE promotion = :n AND compared = 1 AND promotion_rollouts.evidence = 1 AND status <> 'running') AS ended
"""
EVIDENCE = "UPDATE promotions SET evidence = :evidence WHERE n = :n AND status = 'testing' AND evidence <> :evidence"
DECIDE = """
UPDATE promotions SET status = :outcome, reason = :reason, evidence = :evidence, decided_at = :at
WHERE n = :n AND status = 'testing'
"""
REJECTED = "UPDATE policy_versions SET status = 'rejected', error = :reason WHERE version = :version"
WITHDRAWN = "UPDATE policy_versions SET status = 'rejected', error = :withdrawn WHERE status = 'waiting'"


class Trial(NamedTuple):
    """The test that is under way."""

    promotion: Promotion
    candidate: PolicyVersion


class Promotions:
    """The tables of tests. Each method that writes is one transaction, so a killed process leaves no half of it."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._now: Trial | None = None

    async def now(self) -> Trial | None:
        """Return the test that is under way; None without one. Its evidence may be older than that of `last`."""
        row = await self._db.quick(TESTING)
        if row is None:
            self._now = None
        elif self._now is None or self._now.promotion.n != row["n"]:
            self._now = await self._read(row["n"])
        return self._now

    async def under_way(self) -> list[Promotion]:
        """Return the test that is under way, if there is one."""
        test = await self.now()
        return [] if test is None else [test.promotion]

    async def test(self) -> Promotion | None:
        """Return the test that is under way, with its evidence so far; None without one."""
        row = await self._db.one(PROMOTION_UNDER_WAY)
        return None if row is None else _read(row)

    async def candidate(self) -> PolicyVersion | None:
        """Return the version that is tested; None if none is."""
        test = await self.now()
        return None if test is None else test.candidate

    async def last(self) -> dict[int, Promotion]:
        """Return, by version, the last test of each."""
        return {row["version"]: _read(row) for row in await self._db.all(PROMOTIONS)}

    async def last_of(self, version: int) -> Promotion | None:
        """Return the last test of a version; None if it had none."""
        row = await self._db.one(PROMOTION_OF, {"version": version})
        return None if row is None else _read(row)

    async def waiting(self) -> PolicyVersion | None:
        """Return the version that waits for its test; None if none does."""
        row = await self._db.one(WAITING)
        return None if row is None else read_version(row)

    async def wait(self, version: int, step: int) -> None:
        """Let a version whose files are complete wait for its test, in the place of the one that waits already."""
        row = {"version": version, "step": step, "why": f"version {version} took its place before it was tested"}
        await self._db.commit([(REPLACED, [row]), (WAITS, [row]), (STEP_PUBLISHED, [row])])

    async def begin(self, version: int, against: int) -> None:
        """Begin the test of a version that waits, and is served. Conflict if another is tested, or other is live."""
        row: dict[str, Any] = {"version": version, "against": against, "at": time.time()}

        async def work(db: Transaction) -> None:
            live = await db.one(LIVE_NOW)
            if await db.one(TESTING) is not None or live is None or live["version"] != against:
                raise Conflict(f"policy version {version} cannot be tested now: another version was made live")
            if not await db.run(BEGUN, row):
                raise Conflict(f"policy version {version} does not wait for its test any more")
            await db.run(BEGIN, row)

        await self._db.write(work)

    async def assign(self, test: Promotion, rollout: RolloutName, most: int, choose: Chooser) -> int:
        """Return the version that answers a rollout, and keep it: chosen now, if the rollout begins now.

        At most `most` rollouts are compared. Those that began before the test, are of mode `eval` or come after that
        stay with the live version.
        """
        row: dict[str, Any] = {"rollout_id": rollout.rollout_id, "task_id": rollout.task_id, "n": test.n}
        row |= {"agent": rollout.agent, "mode": rollout.mode, "at": time.time()}
        row |= {"key_id": rollout.key_id, "evidence": rollout.evidence}

        async def work(db: Transaction) -> int:
            if (kept := await db.one(PROMOTED_IN, row)) is not None:
                return int(kept["version"])
            known = await db.one(ROLLOUT_OF, row)
            if known is not None and (known["policy_version"] is not None or known["mode"] == "eval"):
                return test.against
            task_id = rollout.task_id if known is None else known["task_id"] or rollout.task_id
            of_task = row | {"task_id": task_id, **opened(row if known is None else known)}
            done, place = await db.one(COMPARED, row), await db.one(NEXT_PLACE, of_task)
            testing = await db.one(TESTING)
            if testing is None or testing["n"] != test.n or done is None or place is None or done["rollouts"] >= most:
                return test.against
            chosen = choose(task_id, place["place"])
            await db.run(ROLLOUT_SEEN, row | {"pin": chosen.version})
            await db.run(ASSIGN, of_task | chosen._asdict())
            return chosen.version

        return await self._db.write(work)

    async def stamp(self, test: Promotion) -> tuple[Any, ...]:
        """Return a stamp that changes with every reward, and with every rollout that begins or ends."""
        row = await self._db.one(STAMP, {"n": test.n})
        return () if row is None else tuple(row)

    async def observed(self, test: Promotion) -> list[Observed]:
        """Return the compared rollouts of a test, in the order in which they were opened."""
        return with_rewards(*[await self._db.all(sql, {"n": test.n}) for sql in (OBSERVED, OBSERVED_REWARDS)])

    async def has_others(self, test: Promotion) -> bool:
        """Return whether rollouts of the test are no evidence, because of the keys that opened and rewarded them."""
        return await self._db.one(NO_EVIDENCE, {"n": test.n}) is not None

    async def found(self, test: Promotion, evidence: Mapping[str, Any]) -> None:
        """Keep the numbers of a test that continues."""
        await self._db.commit([(EVIDENCE, [{"n": test.n, "evidence": dumps({**evidence})}])])

    async def decide(self, test: Promotion, outcome: Outcome, reason: str, evidence: Mapping[str, Any]) -> bool:
        """Make the candidate live, or take it back, together with the numbers. False if the test had ended before.

        What waits was trained on from the candidate: it is taken back with it.
        """
        row = {"n": test.n, "version": test.version, "outcome": outcome, "reason": reason, "at": time.time()}
        row |= {"evidence": dumps({**evidence})}
        row["withdrawn"] = f"it was trained on from version {test.version}, which was taken back"

        async def work(db: Transaction) -> bool:
            if not await db.run(DECIDE, row):
                return False
            promoted = (POLICY_LOG, VERSION_LIVE, VERSION_RETIRE)
            for statement in promoted if outcome == "promoted" else (REJECTED, WITHDRAWN):
                await db.run(statement, row)
            return True

        return await self._db.write(work)

    async def withdraw(self, reason: str) -> None:
        """Take back the version that waits."""
        await self._db.commit([(WITHDRAWN, [{"withdrawn": reason}])])

    async def end(self, reason: str) -> None:
        """Break off the test that is under way, if one is, and let nothing wait for one."""
        row = {"reason": reason, "at": time.time()}
        await self._db.commit([(TEST_ENDED, [row]), (VERSION_UNTESTED, [row])])

    async def _read(self, n: int) -> Trial | None:
        row = await self._db.one(PROMOTION, {"n": n})
        version = None if row is None else await self._db.one(CANDIDATE, {"version": row["version"]})
        return None if row is None or version is None else Trial(_read(row), read_version(version))


def _read(row: Row) -> Promotion:
    return read(Promotion, row, evidence=loads(row["evidence"]))
