"""The tests of policy versions before they go live: their rollouts, and what was decided by which numbers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...core.errors import Conflict
from ...core.json_text import dumps
from ...core.records import PolicyVersion, Reward, RolloutName, RolloutStatus
from ...store.database import Database, Row, Transaction, read
from ...store.rollouts import ROLLOUT_SEEN
from ...store.versions import GO_LIVE, STEP_PUBLISHED, VERSION_UNTESTED

NOT_GATED = "promotion.mode was set to immediate"  # why a test ended
NO_STORED_KEY = "configured"  # `opened_by` of rollouts opened with one of proxy.api_keys
TESTING = "SELECT n FROM promotions WHERE status = 'testing'"
PROMOTION_UNDER_WAY = "SELECT * FROM promotions WHERE status = 'testing' ORDER BY n"
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
LIVE_NOW = "SELECT version FROM policy_log ORDER BY n DESC LIMIT 1"
PROMOTION_BEGIN = """
INSERT INTO promotions (version, against, status, began_at) VALUES (:version, :against, 'testing', :at)
"""
BEGUN = """
UPDATE policy_versions SET status = 'candidate', verified = 1 WHERE version = :version AND status = 'waiting'
RETURNING version
"""
REJECTED = "UPDATE policy_versions SET status = 'rejected', error = :reason WHERE version = :version"
WITHDRAWN = "UPDATE policy_versions SET status = 'rejected', error = :withdrawn WHERE status = 'waiting'"
KEPT = "SELECT version FROM promotion_rollouts WHERE rollout_id = :rollout_id AND promotion = :n"
KNOWN = """
SELECT task_id, key_id, evidence, policy_version IS NOT NULL OR mode = 'eval' AS comes_late
FROM rollouts WHERE rollout_id = :rollout_id
"""
IS_UNDER_WAY = "SELECT 1 FROM promotions WHERE n = :n AND status = 'testing'"
PLACE = """
SELECT COALESCE(MAX(place) + 1, 0) AS place FROM promotion_rollouts
WHERE promotion = :n AND task_id IS :task_id AND opened_by = :opened_by
"""
ASSIGN = """
INSERT INTO promotion_rollouts (rollout_id, promotion, task_id, place, version, compared, opened_by, evidence)
VALUES (:rollout_id, :n, :task_id, :place, :version, :compared, :opened_by, :evidence)
"""
IS_EVIDENCE = "promotion = :n AND compared = 1 AND promotion_rollouts.evidence = 1"
COMPARED = f"SELECT COUNT(*) AS rollouts FROM promotion_rollouts WHERE {IS_EVIDENCE}"
# `shown`: calls that the policy answered by this version, `mixed`: by another one. That a rollout failed or was
# discarded counts only where a key that gives evidence has said so.
PROMOTION_OBSERVED = f"""
SELECT promotion_rollouts.rollout_id, promotion_rollouts.task_id, opened_by, place, version, created_at, foreign_calls,
    (SELECT COUNT(*) FROM calls WHERE calls.rollout_id = promotion_rollouts.rollout_id
        AND calls.policy_version = promotion_rollouts.version) AS shown,
    (SELECT COUNT(*) FROM calls WHERE calls.rollout_id = promotion_rollouts.rollout_id
        AND calls.policy_version <> promotion_rollouts.version) AS mixed,
    CASE WHEN end_counts = 0 AND status <> 'running' THEN 'completed' ELSE status END AS status,
    ended_at, calls, tokens,
    (SELECT AVG(CASE WHEN finish_reason = 'length' THEN 1.0 ELSE 0.0 END) FROM calls
        WHERE calls.rollout_id = rollouts.rollout_id AND calls.status = 'ok') AS truncated,
    (SELECT AVG(latency_ms) FROM calls
        WHERE calls.rollout_id = rollouts.rollout_id AND calls.status = 'ok') AS latency_ms,
    (SELECT AVG(CASE WHEN is_error = 1 THEN 1.0 ELSE 0.0 END) FROM tool_calls
        WHERE tool_calls.rollout_id = rollouts.rollout_id) AS tool_errors
FROM promotion_rollouts JOIN rollouts USING (rollout_id) WHERE {IS_EVIDENCE} ORDER BY rollouts.n
"""
PROMOTION_REWARDS = f"""
SELECT rewards.*, rewards.value AS reward
FROM promotion_rollouts JOIN rewards ON rewards.rollout_id = promotion_rollouts.rollout_id
WHERE {IS_EVIDENCE} AND rewards.evidence = 1 ORDER BY reward_id
"""
OTHERS = "SELECT 1 FROM promotion_rollouts WHERE promotion = :n AND evidence = 0 AND compared = 1 LIMIT 1"
STAMP = f"""
SELECT (SELECT MAX(reward_id) FROM rewards) AS rewards, COUNT(*) AS begun,
    SUM(CASE WHEN status <> 'running' THEN 1 ELSE 0 END) AS ended
FROM promotion_rollouts JOIN rollouts USING (rollout_id) WHERE {IS_EVIDENCE}
"""
FOUND = "UPDATE promotions SET evidence = :evidence WHERE n = :n AND status = 'testing' AND evidence <> :evidence"
PROMOTION_DECIDED = """
UPDATE promotions SET status = :outcome, reason = :reason, evidence = :evidence, decided_at = :at
WHERE n = :n AND status = 'testing' RETURNING n
"""
END = "UPDATE promotions SET status = 'ended', decided_at = :at, reason = :reason WHERE status = 'testing'"
Outcome = Literal["promoted", "rejected"]
PromotionStatus = Literal["testing", "promoted", "rejected", "ended"]


@dataclass(frozen=True, slots=True)
class Promotion:
    """A test of version `version` against the live version `against`. `evidence`: its numbers (docs/training.md).

    `ended`: not decided, but broken off, because somebody made a version live, for one. `reason` says why.
    """

    n: int
    version: int
    against: int
    status: PromotionStatus
    began_at: float
    decided_at: float | None = None
    reason: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


class Assigned(NamedTuple):
    """Where a rollout stands in a test, and the version that answers it. Not `compared`: left to the live version."""

    place: int
    version: int
    compared: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """A rollout that is evidence in a test, as it is now. `rewards`: those that are evidence.

    `opened_by`: places are counted apart for each. `shown`: so many calls were answered by `version`, `mixed`: so many
    by another one. `truncated`, `tool_errors`: the share of answers that were cut off, and of tool calls that failed.
    """

    rollout_id: str
    task_id: str | None
    place: int
    version: int
    status: RolloutStatus
    created_at: float
    ended_at: float | None
    foreign_calls: int
    calls: int
    tokens: int
    mixed: int
    truncated: float | None
    latency_ms: float | None
    tool_errors: float | None
    rewards: tuple[Reward, ...] = ()
    opened_by: str = ""
    shown: int = 1


Chooser = Callable[[str | None, int], Assigned]  # by a rollout's task, and its place among those of the task


class UnderTest(NamedTuple):
    """The test that is under way."""

    promotion: Promotion
    candidate: PolicyVersion


class Promotions:
    """The tests of the policy's versions, of which one at most is under way. Each write is one transaction."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._now: UnderTest | None = None

    async def now(self) -> UnderTest | None:
        """Return the test that is under way; None without one. Its evidence may be older than that of `last`."""
        row = await self._db.quick(TESTING)
        if row is None:
            self._now = None
        elif self._now is None or self._now.promotion.n != row["n"]:
            self._now = await self._trial(row["n"])
        return self._now

    async def under_way(self) -> Promotion | None:
        """Return the test that is under way, with its evidence so far; None without one."""
        return await self._db.record(Promotion, PROMOTION_UNDER_WAY)

    async def candidate(self) -> PolicyVersion | None:
        """Return the version that is tested; None if none is."""
        test = await self.now()
        return None if test is None else test.candidate

    async def last(self) -> dict[int, Promotion]:
        """Return, by version, the last test of each."""
        return {one.version: one for one in await self._db.records(Promotion, PROMOTIONS)}

    async def last_of(self, version: int) -> Promotion | None:
        """Return the last test of a version; None if it had none."""
        return await self._db.record(Promotion, PROMOTION_OF, version=version)

    async def waiting(self) -> PolicyVersion | None:
        """Return the version that waits for its test; None if none does."""
        return await self._db.record(PolicyVersion, WAITING)

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
            if not await db.all(BEGUN, row):
                raise Conflict(f"policy version {version} does not wait for its test any more")
            await db.all(PROMOTION_BEGIN, row)

        await self._db.write(work)

    async def assign(self, test: Promotion, rollout: RolloutName, most: int, choose: Chooser) -> int:
        """Return the version that a rollout keeps: chosen now, unless it keeps one already.

        At most `most` rollouts are compared. One that comes after that, or comes late, stays with the live version.
        """
        row: dict[str, Any] = {"n": test.n, "rollout_id": rollout.rollout_id, "task_id": rollout.task_id}
        row |= {"agent": rollout.agent, "mode": rollout.mode, "key_id": rollout.key_id, "evidence": rollout.evidence}
        row["at"] = time.time()

        async def work(db: Transaction) -> int:
            if (kept := await db.one(KEPT, row)) is not None:
                return int(kept["version"])
            known = await db.one(KNOWN, row)
            if known is not None and known["comes_late"]:
                return test.against
            of_task = row | _opened(row if known is None else known)
            of_task["task_id"] = rollout.task_id if known is None else known["task_id"] or rollout.task_id
            done, place = await db.one(COMPARED, row), await db.one(PLACE, of_task)
            is_tested = await db.one(IS_UNDER_WAY, row) is not None
            if not is_tested or done is None or place is None or done["rollouts"] >= most:
                return test.against
            chosen = choose(of_task["task_id"], place["place"])
            await db.all(ROLLOUT_SEEN, row | {"pin": chosen.version})
            await db.all(ASSIGN, of_task | chosen._asdict())
            return chosen.version

        return await self._db.write(work)

    async def stamp(self, test: Promotion) -> tuple[Any, ...]:
        """Return a stamp that changes with every reward, and with every compared rollout that begins or ends."""
        row = await self._db.one(STAMP, {"n": test.n})
        return () if row is None else tuple(row)

    async def observed(self, test: Promotion) -> list[Observed]:
        """Return the compared rollouts of a test, in the order in which they began."""
        rollouts = await self._db.all(PROMOTION_OBSERVED, {"n": test.n})
        earned = defaultdict[str, list[Reward]](list)
        for row in await self._db.all(PROMOTION_REWARDS, {"n": test.n}):
            earned[row["rollout_id"]].append(read(Reward, row, reward=row["value"], retrain=False))
        return [read(Observed, row, rewards=tuple(earned[row["rollout_id"]])) for row in rollouts]

    async def has_others(self, test: Promotion) -> bool:
        """Return whether rollouts of the test are no evidence, because of the keys that opened and rewarded them."""
        return await self._db.one(OTHERS, {"n": test.n}) is not None

    async def found(self, test: Promotion, evidence: Mapping[str, Any]) -> None:
        """Keep the numbers of a test that continues."""
        await self._db.commit([(FOUND, [{"n": test.n, "evidence": dumps({**evidence})}])])

    async def decide(self, test: Promotion, outcome: Outcome, reason: str, evidence: Mapping[str, Any]) -> bool:
        """Make the version live, or take it back, together with the numbers. False if the test had ended before."""
        row: dict[str, Any] = {"n": test.n, "version": test.version, "outcome": outcome, "reason": reason}
        row |= {"evidence": dumps({**evidence}), "at": time.time()}
        row["withdrawn"] = f"it was trained on from version {test.version}, which was taken back"
        decided = GO_LIVE if outcome == "promoted" else (REJECTED, WITHDRAWN)

        async def work(db: Transaction) -> bool:
            if not await db.all(PROMOTION_DECIDED, row):
                return False
            for statement in decided:
                await db.all(statement, row)
            return True

        return await self._db.write(work)

    async def end(self, reason: str) -> None:
        """Break off the test that is under way, and let nothing wait for one."""
        row = {"reason": reason, "at": time.time()}
        await self._db.commit([(END, [row]), (VERSION_UNTESTED, [row])])

    async def withdraw(self, reason: str) -> None:
        """Take back the version that waits."""
        await self._db.commit([(WITHDRAWN, [{"withdrawn": reason}])])

    async def _trial(self, n: int) -> UnderTest | None:
        test = await self._db.record(Promotion, PROMOTION, n=n)
        version = None if test is None else await self._db.record(PolicyVersion, CANDIDATE, version=test.version)
        return None if test is None or version is None else UnderTest(test, version)


def _opened(rollout: Row | Mapping[str, Any]) -> dict[str, Any]:
    """In whose name a rollout is counted, and whether it is evidence already."""
    evidence = bool(rollout["evidence"])
    return {"opened_by": "" if evidence else rollout["key_id"] or NO_STORED_KEY, "evidence": evidence}
