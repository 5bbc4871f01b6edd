"""The tests of prompts' versions before they go live: their rollouts, and what was decided by which numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Conflict
from ..gate.table import FACTS, GateTests, statements
from ..gate.tests import Promotion
from ..store.database import Row, Transaction
from ..store.rollouts import ROLLOUT_SEEN
from .table import PROMPT_LIVE, PROMPT_LOG, PROMPT_WAITS_NO_MORE, ROLLOUT_PROMPT, ROLLOUT_PROMPT_KEPT

NOT_GATED = "prompts.promotion was set to immediate"  # why a test ended

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
PROMPTS = statements(
    "prompt_tests",
    "prompt_test_rollouts",
    "test",
    kept=ROLLOUT_PROMPT,
    # `comes_late`: its side would be drawn when something of its outcome is known.
    known="""
SELECT task_id, key_id, evidence, mode = 'eval' OR status <> 'running' OR EXISTS (
    SELECT 1 FROM rewards WHERE rewards.rollout_id = rollouts.rollout_id
) AS comes_late FROM rollouts WHERE rollout_id = :rollout_id
""",
    assign="""
INSERT INTO prompt_test_rollouts (test, rollout_id, task_id, place, version, compared, opened_by, evidence, at)
VALUES (:n, :rollout_id, :task_id, :place, :version, :compared, :opened_by, :evidence, :at)
""",
    # A rollout is in the test since it first used the prompt. `shown`: calls that were shown its version, `mixed`:
    # another.
    observed=f"""
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
""",
    wait_no_more="DELETE FROM prompt_waiting",
)


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


class PromptTests(GateTests[PromptTest]):
    """The tests of prompts' versions, of which one a prompt at most is under way."""

    kind = PromptTest
    sql = PROMPTS

    async def of(self, name: str) -> PromptTest | None:
        """Return the test of a prompt that is under way; None without one."""
        row = await self._db.quick(PROMPT_TESTED, {"name": name})
        return None if row is None else self._read(row)

    async def last(self, name: str) -> list[PromptTest]:
        """Return the last test of each of a prompt's versions."""
        return [*map(self._read, await self._db.all(PROMPT_TESTS, {"name": name}))]

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

    async def _keep(self, db: Transaction, row: Mapping[str, Any], known: Row | None) -> Row | None:
        if known is None:
            await db.run(ROLLOUT_SEEN, {**row, "pin": None})
        return None if await db.run(ROLLOUT_PROMPT_KEPT, row) else await db.one(ROLLOUT_PROMPT, row)

    async def _decided(self, db: Transaction, row: Mapping[str, Any]) -> None:
        if row["outcome"] == "promoted":
            await db.run(PROMPT_LOG, row)
        if (waiting := await db.one(PROMPT_NEXT, row)) is not None:
            await db.run(PROMPT_WAITS_NO_MORE, row)
            await _begin(db, {**row, "version": waiting["version"]})

    def _row(self, test: PromptTest) -> dict[str, Any]:
        return super()._row(test) | {"name": test.name}


async def _begin(db: Transaction, row: Mapping[str, Any]) -> None:
    live = await db.one(PROMPT_LIVE, row)
    assert live is not None  # the first version of a prompt is live
    await db.run(PROMPT_TEST_BEGIN, {**row, "against": live["version"]})
