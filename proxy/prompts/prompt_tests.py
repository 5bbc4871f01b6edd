"""The tests of prompts' versions before they go live: their rollouts, and what was decided by which numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Conflict
from ..gate.tests import FACTS, Chooser, Observed, Outcome, Promotion, opened, with_rewards
from ..json_text import dumps, loads
from ..store.database import Database, Row, Transaction
from ..store.rollouts import ROLLOUT_SEEN
from ..store.rows import read
from ..types import RolloutName
from .table import PROMPT_LIVE, PROMPT_LOG, PROMPT_WAITS_NO_MORE, ROLLOUT_PROMPT, ROLLOUT_PROMPT_KEPT

NOT_GATED = "prompts.promotion was set to immediate"  # why a test ended

PROMPTS_TESTED = "SELECT * FROM prompt_tests WHERE status = 'testing' ORDER BY n"
PROMPT_TESTED = "SELECT * FROM prompt_tests WHERE name = :name AND status = 'testing'"
# The last test of each of a prompt's versions.
PROMPT_TESTS = """
SELECT * FROM prompt_tests WHERE n IN (SELECT MAX(n) FROM prompt_tests WHERE name = :name GROUP BY version)
"""
PROMPTS_WAITING = "SELECT name, version FROM prompt_waiting"
PROMPT_WAITS = """
INSERT INTO prompt_waiting (name, version) VALUES (:name, :version)
ON CONFLICT (name) DO UPDATE SET version = excluded.version
"""
PROMPT_NEXT = "SELECT version FROM prompt_waiting WHERE name = :name"
PROMPT_TEST_BEGIN = """
INSERT INTO prompt_tests (name, version, against, status, began_at) VALUES (:name, :version, :against, 'testing', :at)
"""
PROMPT_TEST_STATUS = "SELECT 1 FROM prompt_tests WHERE n = :n AND status = 'testing'"
# `comes_late`: its side would be drawn when something of its outcome is known.
ROLLOUT_NOW = """
SELECT task_id, key_id, evidence, mode = 'eval' OR status <> 'running' OR EXISTS (
    SELECT 1 FROM rewards WHERE rewards.rollout_id = rollouts.rollout_id
) AS comes_late FROM rollouts WHERE rollout_id = :rollout_id
"""
PROMPT_NEXT_PLACE = """
SELECT COALESCE(MAX(place) + 1, 0) AS place FROM prompt_test_rollouts
WHERE test = :n AND task_id IS :task_id AND opened_by = :opened_by
"""
PROMPT_COMPARED = """
SELECT COUNT(*) AS rollouts FROM prompt_test_rollouts WHERE test = :n AND compared = 1 AND evidence = 1
"""
PROMPT_ASSIGN = """
INSERT INTO prompt_test_rollouts (test, rollout_id, task_id, place, version, compared, opened_by, evidence, at)
VALUES (:n, :rollout_id, :task_id, :place, :version, :compared, :opened_by, :evidence, :at)
"""
# A rollout is in the test since it first used the prompt. `shown`: calls that were shown its version, `mixed`: another.
PROMPT_OBSERVED = f"""
SELECT prompt_test_rollouts.rollout_id, prompt_test_rollouts.task_id, opened_by, place, version, at AS created_at,
    0 AS foreign_calls,
    (SELECT COUNT(*) FROM calls JOIN call_prompts USING (call_id)
        WHERE calls.rollout_id = prompt_test_rollouts.rollout_id AND call_prompts.name = :name
        AND call_prompts.version = prompt_test_rollouts.version) AS shown,
    (SELECT COUNT(*) FROM calls JOIN call_prompts USING (call_id)
        WHERE calls.rollout_id = prompt_test_rollouts.rollout_id AND call_prompts.name = :name
        AND call_prompts.version <> prompt_test_rollouts.version) AS mixed, {FACTS}
FROM prompt_test_rollouts JOIN rollouts USING (rollout_id)
WHERE test = :n AND compared = 1 AND prompt_test_rollouts.evidence = 1 ORDER BY prompt_test_rollouts.n
"""
PROMPT_OBSERVED_REWARDS = """
SELECT rewards.* FROM prompt_test_rollouts JOIN rewards ON rewards.rollout_id = prompt_test_rollouts.rollout_id
WHERE test = :n AND compared = 1 AND prompt_test_rollouts.evidence = 1 AND rewards.evidence = 1 ORDER BY reward_id
"""
PROMPT_NO_EVIDENCE = "SELECT 1 FROM prompt_test_rollouts WHERE test = :n AND evidence = 0 AND compared = 1 LIMIT 1"
# What changes with every reward and every end of a rollout.
PROMPT_TEST_STAMP = """
SELECT (SELECT MAX(reward_id) FROM rewards) AS rewards,
    (SELECT MAX(n) FROM prompt_test_rollouts WHERE test = :n) AS begun,
    (SELECT COUNT(*) FROM prompt_test_rollouts JOIN rollouts USING (rollout_id)
        WHERE test = :n AND compared = 1 AND prompt_test_rollouts.evidence = 1 AND status <> 'running') AS ended
"""
PROMPT_EVIDENCE = """
UPDATE prompt_tests SET evidence = :evidence WHERE n = :n AND status = 'testing' AND evidence <> :evidence
"""
PROMPT_DECIDE = """
UPDATE prompt_tests SET status = :outcome, reason = :reason, evidence = :evidence, decided_at = :at
WHERE n = :n AND status = 'testing'
"""
PROMPT_TESTS_ENDED = """
UPDATE prompt_tests SET status = 'ended', decided_at = :at, reason = :reason WHERE status = 'testing'
"""
PROMPTS_WAIT_NO_MORE = "DELETE FROM prompt_waiting"


@dataclass(frozen=True, slots=True)
class PromptTest(Promotion):
    """A test of version `version` of the prompt `name` against its live version."""

    name: str = ""

    @property
    def key(self) -> str:
        """Return the identity of this test."""
        return f"prompt {self.name} {self.n}"

    @property
    def candidate(self) -> str:
        """Return what is tested, in words."""
        return f"prompt {self.name!r} version {self.version}"


class PromptTests:
    """The tables of prompts' tests. Each method that writes is one transaction."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def under_way(self) -> list[PromptTest]:
        """Return the tests that are under way, one a prompt at most."""
        return [*map(_read, await self._db.all(PROMPTS_TESTED))]

    async def of(self, name: str) -> PromptTest | None:
        """Return the test of a prompt that is under way; None without one."""
        row = await self._db.quick(PROMPT_TESTED, {"name": name})
        return None if row is None else _read(row)

    async def last(self, name: str) -> list[PromptTest]:
        """Return the last test of each of a prompt's versions."""
        return [*map(_read, await self._db.all(PROMPT_TESTS, {"name": name}))]

    async def waiting(self) -> dict[str, int]:
        """Return the versions that wait for their test, by prompt."""
        return {row["name"]: row["version"] for row in await self._db.all(PROMPTS_WAITING)}

    async def begin(self, name: str, version: int) -> None:
        """Begin the test of a version, or let it wait while another one of the prompt is tested.

        It takes the place of the one that waits. Nothing changes if it is tested already; Conflict if it is live.
        """
        row: dict[str, Any] = {"name": name, "version": version, "at": time.time()}

        async def work(db: Transaction) -> None:
            live, test = await db.one(PROMPT_LIVE, row), await db.one(PROMPT_TESTED, row)
            if live is not None and live["version"] == version:
                raise Conflict(f"prompt {name!r} version {version} is live: there is nothing to test", param="version")
            if test is None:
                await _begin(db, row)
            elif test["version"] != version:
                await db.run(PROMPT_WAITS, row)

        await self._db.write(work)

    async def assign(
        self, test: PromptTest, rollout: RolloutName, most: int, choose: Chooser, *, opens: bool = True
    ) -> int:
        """Return the version that a rollout keeps: chosen now, if it uses the prompt for the first time.

        At most `most` rollouts are compared. One that has ended, has a reward, is of mode `eval`, comes after that or,
        unless this `opens` it, is unknown, keeps the live version.
        """
        row: dict[str, Any] = {"rollout_id": rollout.rollout_id, "task_id": rollout.task_id, "n": test.n}
        row |= {"name": test.name, "agent": rollout.agent, "mode": rollout.mode, "pin": None, "at": time.time()}
        row |= {"key_id": rollout.key_id, "evidence": rollout.evidence}

        async def work(db: Transaction) -> int:
            if (kept := await db.one(ROLLOUT_PROMPT, row)) is not None:
                return int(kept["version"])
            known = await db.one(ROLLOUT_NOW, row)
            if not opens if known is None else known["comes_late"]:
                return test.against
            of_task = row | opened(row if known is None else known)
            of_task["task_id"] = rollout.task_id if known is None else known["task_id"] or rollout.task_id
            done, place = await db.one(PROMPT_COMPARED, row), await db.one(PROMPT_NEXT_PLACE, of_task)
            is_tested = await db.one(PROMPT_TEST_STATUS, row) is not None
            if not is_tested or done is None or place is None or done["rollouts"] >= most:
                return test.against
            chosen = choose(of_task["task_id"], place["place"])
            if known is None:
                await db.run(ROLLOUT_SEEN, row)
            if not await db.run(ROLLOUT_PROMPT_KEPT, row | {"version": chosen.version}):
                kept = await db.one(ROLLOUT_PROMPT, row)  # by another process, a moment ago
                return test.against if kept is None else int(kept["version"])
            await db.run(PROMPT_ASSIGN, of_task | chosen._asdict())
            return chosen.version

        return await self._db.write(work)

    async def stamp(self, test: PromptTest) -> tuple[Any, ...]:
        """Return a stamp that changes with every reward, and with every rollout that begins or ends."""
        row = await self._db.one(PROMPT_TEST_STAMP, {"n": test.n})
        return () if row is None else tuple(row)

    async def observed(self, test: PromptTest) -> list[Observed]:
        """Return the compared rollouts of a test, in the order in which they began to use the prompt."""
        row = {"n": test.n, "name": test.name}
        return with_rewards(*[await self._db.all(sql, row) for sql in (PROMPT_OBSERVED, PROMPT_OBSERVED_REWARDS)])

    async def has_others(self, test: PromptTest) -> bool:
        """Return whether rollouts of the test are no evidence, because of the keys that opened and rewarded them."""
        return await self._db.one(PROMPT_NO_EVIDENCE, {"n": test.n}) is not None

    async def found(self, test: PromptTest, evidence: Mapping[str, Any]) -> None:
        """Keep the numbers of a test that continues."""
        await self._db.commit([(PROMPT_EVIDENCE, [{"n": test.n, "evidence": dumps({**evidence})}])])

    async def decide(self, test: PromptTest, outcome: Outcome, reason: str, evidence: Mapping[str, Any]) -> bool:
        """Make the version live, or take it back, together with the numbers. False if the test had ended before.

        The version that waits is tested next, against what is live then.
        """
        row = {"n": test.n, "name": test.name, "version": test.version, "outcome": outcome, "reason": reason}
        row |= {"at": time.time(), "evidence": dumps({**evidence})}

        async def work(db: Transaction) -> bool:
            if not await db.run(PROMPT_DECIDE, row):
                return False
            if outcome == "promoted":
                await db.run(PROMPT_LOG, row)
            if (waiting := await db.one(PROMPT_NEXT, row)) is not None:
                await db.run(PROMPT_WAITS_NO_MORE, row)
                await _begin(db, row | {"version": waiting["version"]})
            return True

        return await self._db.write(work)

    async def end(self, reason: str) -> None:
        """Break off the tests that are under way, and let nothing wait for one."""
        row = {"reason": reason, "at": time.time()}
        await self._db.commit([(PROMPT_TESTS_ENDED, [row]), (PROMPTS_WAIT_NO_MORE, [row])])


async def _begin(db: Transaction, row: dict[str, Any]) -> None:
    live = await db.one(PROMPT_LIVE, row)
    assert live is not None  # the first version of a prompt is live
    await db.run(PROMPT_TEST_BEGIN, row | {"against": live["version"]})


def _read(row: Row) -> PromptTest:
    return read(PromptTest, row, evidence=loads(row["evidence"]))
