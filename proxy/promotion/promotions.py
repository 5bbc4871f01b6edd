"""The tests of policy versions before they go live: their rollouts, and what was decided by which numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import Conflict
from ..gate.table import FACTS, GateTests, statements
from ..gate.tests import Promotion
from ..store.database import Database, Row, Transaction
from ..store.rollouts import ROLLOUT_SEEN
from ..store.versions import POLICY_LOG, VERSION_LIVE, VERSION_RETIRE, VERSION_UNTESTED, read_version
from ..types import PolicyVersion

NOT_GATED = "policy.promotion was set to immediate"  # why a test ended

TESTING = "SELECT n FROM promotions WHERE status = 'testing'"
CANDIDATE = "SELECT * FROM policy_versions WHERE version = :version"
PROMOTION = "SELECT * FROM promotions WHERE n = :n"
# The last test of each version.
PROMOTIONS = "SELECT * FROM promotions WHERE n IN (SELECT MAX(n) FROM promotions GROUP BY version)"
PROMOTION_OF = "SELECT * FROM promotions WHERE version = :version ORDER BY n DESC LIMIT 1"
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
REJECTED = "UPDATE policy_versions SET status = 'rejected', error = :reason WHERE version = :version"
WITHDRAWN = "UPDATE policy_versions SET status = 'rejected', error = :withdrawn WHERE status = 'waiting'"
POLICY = statements(
    "promotions",
    "promotion_rollouts",
    "promotion",
    kept="SELECT version FROM promotion_rollouts WHERE rollout_id = :rollout_id AND promotion = :n",
    known="""
SELECT task_id, key_id, evidence, policy_version IS NOT NULL OR mode = 'eval' AS comes_late
FROM rollouts WHERE rollout_id = :rollout_id
""",
    assign="""
INSERT INTO promotion_rollouts (rollout_id, promotion, task_id, place, version, compared, opened_by, evidence)
VALUES (:rollout_id, :n, :task_id, :place, :version, :compared, :opened_by, :evidence)
""",
    # `shown`: calls that the policy answered by this version, `mixed`: by another one.
    observed=f"""
SELECT promotion_rollouts.rollout_id, promotion_rollouts.task_id, opened_by, place, version, created_at, foreign_calls,
    (SELECT COUNT(*) FROM calls WHERE calls.rollout_id = promotion_rollouts.rollout_id
        AND calls.policy_version = promotion_rollouts.version) AS shown,
    (SELECT COUNT(*) FROM calls WHERE calls.rollout_id = promotion_rollouts.rollout_id
        AND calls.policy_version <> promotion_rollouts.version) AS mixed, {FACTS}
FROM promotion_rollouts JOIN rollouts USING (rollout_id)
WHERE promotion = :n AND compared = 1 AND promotion_rollouts.evidence = 1 ORDER BY rollouts.n
""",
    wait_no_more=VERSION_UNTESTED,
)


class Trial(NamedTuple):
    """The test that is under way."""

    promotion: Promotion
    candidate: PolicyVersion


class Promotions(GateTests[Promotion]):
    """The tests of the policy's versions, of which one at most is under way."""

    kind = Promotion
    sql = POLICY

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._now: Trial | None = None

    async def now(self) -> Trial | None:
        """Return the test that is under way; None without one. Its evidence may be older than that of `last`."""
        row = await self._db.quick(TESTING)
        if row is None:
            self._now = None
        elif self._now is None or self._now.promotion.n != row["n"]:
            self._now = await self._trial(row["n"])
        return self._now

    async def candidate(self) -> PolicyVersion | None:
        """Return the version that is tested; None if none is."""
        test = await self.now()
        return None if test is None else test.candidate

    async def last(self) -> dict[int, Promotion]:
        """Return, by version, the last test of each."""
        return {row["version"]: self._read(row) for row in await self._db.all(PROMOTIONS)}

    async def last_of(self, version: int) -> Promotion | None:
        """Return the last test of a version; None if it had none."""
        row = await self._db.one(PROMOTION_OF, {"version": version})
        return None if row is None else self._read(row)

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

    async def _keep(self, db: Transaction, row: Mapping[str, Any], known: Row | None) -> None:
        await db.run(ROLLOUT_SEEN, {**row, "pin": row["version"]})

    async def _decided(self, db: Transaction, row: Mapping[str, Any]) -> None:
        withdrawn = f"it was trained on from version {row['version']}, which was taken back"
        promoted = (POLICY_LOG, VERSION_LIVE, VERSION_RETIRE)
        for statement in promoted if row["outcome"] == "promoted" else (REJECTED, WITHDRAWN):
            await db.run(statement, {**row, "withdrawn": withdrawn})

    async def withdraw(self, reason: str) -> None:
        """Take back the version that waits."""
        await self._db.commit([(WITHDRAWN, [{"withdrawn": reason}])])

    async def _trial(self, n: int) -> Trial | None:
        row = await self._db.one(PROMOTION, {"n": n})
        version = None if row is None else await self._db.one(CANDIDATE, {"version": row["version"]})
        return None if row is None or version is None else Trial(self._read(row), read_version(version))
