"""The two tables of one kind of tests, of the policy's versions or of prompts': the tests, and their rollouts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from ..json_text import dumps, loads
from ..store.database import Database, Row, Transaction
from ..store.rewards import read_reward
from ..store.rows import read
from ..store.trust import IS_EVALUATORS
from ..types import Reward, RolloutName
from .tests import Chooser, Observed, Outcome, Promotion

Test = TypeVar("Test", bound=Promotion)

NO_STORED_KEY = "configured"  # `opened_by` of rollouts opened with one of proxy.api_keys
# What is known of a rollout so far, whatever is tested by it. That it failed or was discarded counts only where a key
# that gives evidence has said so.
FACTS = """
CASE WHEN end_counts = 0 AND status <> 'running' THEN 'completed' ELSE status END AS status, ended_at, calls, tokens,
    (SELECT AVG(CASE WHEN finish_reason = 'length' THEN 1.0 ELSE 0.0 END) FROM calls
        WHERE calls.rollout_id = rollouts.rollout_id AND calls.status = 'ok') AS truncated,
    (SELECT AVG(latency_ms) FROM calls
        WHERE calls.rollout_id = rollouts.rollout_id AND calls.status = 'ok') AS latency_ms,
    (SELECT AVG(CASE WHEN is_error = 1 THEN 1.0 ELSE 0.0 END) FROM tool_calls
        WHERE tool_calls.rollout_id = rollouts.rollout_id) AS tool_errors
"""


class Statements(NamedTuple):
    """The statements about one kind of tests. The first five are a room's own; all others differ by its tables alone.

    `kept`: the version that a rollout has already. `known`: a rollout before it is split, and whether it `comes_late`.
    `observed`, `rewards`: of rollouts that are compared, and evidence; `others`: of those that are none.
    """

    kept: str
    known: str
    assign: str
    observed: str
    wait_no_more: str
    under_way: str
    is_under_way: str
    place: str
    compared: str
    rewards: str
    others: str
    stamp: str
    found: str
    decide: str
    end: str


def statements(tests: str, rollouts: str, test: str, **own: str) -> Statements:
    """Return the statements for these two tables. `test`: the column of the second one that names the test."""
    evidence = f"{test} = :n AND compared = 1 AND {rollouts}.evidence = 1"
    return Statements(
        **own,
        under_way=f"SELECT * FROM {tests} WHERE status = 'testing' ORDER BY n",
        is_under_way=f"SELECT 1 FROM {tests} WHERE n = :n AND status = 'testing'",
        place=f"""
SELECT COALESCE(MAX(place) + 1, 0) AS place FROM {rollouts}
WHERE {test} = :n AND task_id IS :task_id AND opened_by = :opened_by
""",
        compared=f"SELECT COUNT(*) AS rollouts FROM {rollouts} WHERE {evidence}",
        rewards=f"""
SELECT rewards.* FROM {rollouts} JOIN rewards ON rewards.rollout_id = {rollouts}.rollout_id
WHERE {evidence} AND {IS_EVALUATORS} ORDER BY reward_id
""",
        others=f"SELECT 1 FROM {rollouts} WHERE {test} = :n AND evidence = 0 AND compared = 1 LIMIT 1",
        # It changes with every reward, and with every compared rollout that begins or ends.
        stamp=f"""
SELECT (SELECT MAX(reward_id) FROM rewards) AS rewards, COUNT(*) AS begun,
    SUM(CASE WHEN status <> 'running' THEN 1 ELSE 0 END) AS ended
FROM {rollouts} JOIN rollouts USING (rollout_id) WHERE {evidence}
""",
        found=f"UPDATE {tests} SET evidence = :evidence WHERE n = :n AND status = 'testing' AND evidence <> :evidence",
        decide=f"""
UPDATE {tests} SET status = :outcome, reason = :reason, evidence = :evidence, decided_at = :at
WHERE n = :n AND status = 'testing'
""",
        end=f"UPDATE {tests} SET status = 'ended', decided_at = :at, reason = :reason WHERE status = 'testing'",
    )


class GateTests(ABC, Generic[Test]):
    """The tests of one kind of versions. Each method that writes is one transaction."""

    kind: type[Test]
    sql: Statements

    def __init__(self, database: Database) -> None:
        self._db = database

    async def under_way(self) -> list[Test]:
        """Return the tests that are under way."""
        return [*map(self._read, await self._db.all(self.sql.under_way))]

    async def assign(self, test: Test, rollout: RolloutName, most: int, choose: Chooser, *, opens: bool = True) -> int:
        """Return the version that a rollout keeps: chosen now, unless it keeps one already.

        At most `most` rollouts are compared. One that comes after that, comes late or, unless this `opens` it, is
        unknown, stays with the live version.
        """
        row = self._row(test) | {"rollout_id": rollout.rollout_id, "task_id": rollout.task_id, "agent": rollout.agent}
        row |= {"mode": rollout.mode, "key_id": rollout.key_id, "evidence": rollout.evidence, "at": time.time()}

        async def work(db: Transaction) -> int:
            if (kept := await db.one(self.sql.kept, row)) is not None:
                return int(kept["version"])
            known = await db.one(self.sql.known, row)
            if not opens if known is None else known["comes_late"]:
                return test.against
            of_task = row | _opened(row if known is None else known)
            of_task["task_id"] = rollout.task_id if known is None else known["task_id"] or rollout.task_id
            done, place = await db.one(self.sql.compared, row), await db.one(self.sql.place, of_task)
            is_tested = await db.one(self.sql.is_under_way, row) is not None
            if not is_tested or done is None or place is None or done["rollouts"] >= most:
                return test.against
            chosen = choose(of_task["task_id"], place["place"])
            if (kept := await self._keep(db, row | {"version": chosen.version}, known)) is not None:
                return int(kept["version"])
            await db.run(self.sql.assign, of_task | chosen._asdict())
            return chosen.version

        return await self._db.write(work)

    @abstractmethod
    async def _keep(self, db: Transaction, row: Mapping[str, Any], known: Row | None) -> Row | None:
        """Let a rollout keep a version. Return what it keeps if another process was faster."""

    async def stamp(self, test: Test) -> tuple[Any, ...]:
        """Return a stamp that changes with every reward, and with every compared rollout that begins or ends."""
        row = await self._db.one(self.sql.stamp, {"n": test.n})
        return () if row is None else tuple(row)

    async def observed(self, test: Test) -> list[Observed]:
        """Return the compared rollouts of a test, in the order in which they began."""
        rollouts = await self._db.all(self.sql.observed, self._row(test))
        earned = defaultdict[str, list[Reward]](list)
        for row in await self._db.all(self.sql.rewards, {"n": test.n}):
            earned[row["rollout_id"]].append(read_reward(row))
        return [read(Observed, row, rewards=tuple(earned[row["rollout_id"]])) for row in rollouts]

    async def has_others(self, test: Test) -> bool:
        """Return whether rollouts of the test are no evidence, because of the keys that opened and rewarded them."""
        return await self._db.one(self.sql.others, {"n": test.n}) is not None

    async def found(self, test: Test, evidence: Mapping[str, Any]) -> None:
        """Keep the numbers of a test that continues."""
        await self._db.commit([(self.sql.found, [{"n": test.n, "evidence": dumps({**evidence})}])])

    async def decide(self, test: Test, outcome: Outcome, reason: str, evidence: Mapping[str, Any]) -> bool:
        """Make the version live, or take it back, together with the numbers. False if the test had ended before."""
        row = self._row(test) | {"outcome": outcome, "reason": reason, "at": time.time()}
        row |= {"evidence": dumps({**evidence})}

        async def work(db: Transaction) -> bool:
            if is_decided := await db.run(self.sql.decide, row) > 0:
                await self._decided(db, row)
            return is_decided

        return await self._db.write(work)

    @abstractmethod
    async def _decided(self, db: Transaction, row: Mapping[str, Any]) -> None:
        """Do to the tested version, and to the one that waits, what was decided."""

    async def end(self, reason: str) -> None:
        """Break off the tests that are under way, and let nothing wait for one."""
        row = {"reason": reason, "at": time.time()}
        await self._db.commit([(self.sql.end, [row]), (self.sql.wait_no_more, [row])])

    def _row(self, test: Test) -> dict[str, Any]:
        return {"n": test.n, "version": test.version}

    def _read(self, row: Row) -> Test:
        return read(self.kind, row, evidence=loads(row["evidence"]))


def _opened(rollout: Row | Mapping[str, Any]) -> dict[str, Any]:
    """In whose name a rollout is counted, and whether it is evidence already."""
    evidence = bool(rollout["evidence"])
    return {"opened_by": "" if evidence else rollout["key_id"] or NO_STORED_KEY, "evidence": evidence}
