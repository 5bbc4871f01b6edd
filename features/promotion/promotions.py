"""Stores the tests that new versions take before they go live. A `candidate` becomes live or `rejected`.

A candidate whose test is stopped undecided becomes `ready`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from ...core.config.root import Config
from ...core.json_text import dumps
from ...core.records import PolicyVersion, Reward, RolloutName, RolloutStatus
from ...serving.swap import Placed, Superseded
from ...store.database import Database, Transaction, read
from ...store.rollouts import ROLLOUT_SEEN
from ...store.versions import GO_LIVE, STEP_PUBLISHED, VERSION_UNTESTED
from .config import PromotionConfig

NOT_GATED = "promotion.mode was set to immediate"  # why a test ended
NO_STORED_KEY = "configured"  # `opened_by` of rollouts opened with one of proxy.api_keys
LONE = 2  # rollouts without a task are compared in pairs
TESTING = "SELECT n FROM promotions WHERE status = 'testing'"
CANDIDATE = "SELECT * FROM policy_versions WHERE version = :version"
# The last test of each version.
PROMOTIONS = "SELECT * FROM promotions WHERE n IN (SELECT MAX(n) FROM promotions GROUP BY version)"
PROMOTION_UNDER_WAY = "SELECT * FROM promotions WHERE status = 'testing' ORDER BY n"
LIVE_NOW = "SELECT version FROM policy_log ORDER BY n DESC LIMIT 1"
PROMOTION_BEGIN = """
INSERT INTO promotions (version, against, status, began_at) VALUES (:version, :against, 'testing', :at)
"""
BEGUN = "UPDATE policy_versions SET status = 'candidate', verified = 1 WHERE version = :version"
REJECTED = "UPDATE policy_versions SET status = 'rejected', error = :reason WHERE version = :version"
KEPT = "SELECT version FROM promotion_rollouts WHERE rollout_id = :rollout_id AND promotion = :n"
# One that has a version already, or is held out, stays with the live one.
KNOWN = f"""
SELECT COALESCE(task_id, :task_id) AS task_id, key_id, evidence,
    COALESCE(({KEPT}), CASE WHEN policy_version IS NOT NULL OR mode = 'eval' THEN :against END) AS kept
FROM rollouts WHERE rollout_id = :rollout_id
"""
IS_EVIDENCE = "promotion = :n AND compared = 1 AND promotion_rollouts.evidence = 1"
PLACE = f"""
SELECT COALESCE(MAX(place) + 1, 0) AS place,
    (SELECT COUNT(*) FROM promotion_rollouts WHERE {IS_EVIDENCE}) AS compared,
    (SELECT COUNT(*) FROM promotions WHERE n = :n AND status = 'testing') AS tested
FROM promotion_rollouts WHERE promotion = :n AND task_id IS :task_id AND opened_by = :opened_by
"""
ASSIGN = """
INSERT INTO promotion_rollouts (rollout_id, promotion, task_id, place, version, compared, opened_by, evidence)
VALUES (:rollout_id, :n, :task_id, :place, :version, :compared, :opened_by, :evidence)
"""
# That a rollout failed or was discarded counts only where a key that gives evidence has said so.
STATUS = "CASE WHEN end_counts = 0 AND status <> 'running' THEN 'completed' ELSE status END"
OF_CALLS = "FROM calls WHERE calls.rollout_id = rollouts.rollout_id"
PROMOTION_OBSERVED = f"""
SELECT promotion_rollouts.rollout_id, promotion_rollouts.task_id, opened_by, place, version, created_at, ended_at,
    {STATUS} AS status,
    foreign_calls = 0 AND EXISTS (SELECT 1 {OF_CALLS} AND calls.policy_version = promotion_rollouts.version)
        AND NOT EXISTS (SELECT 1 {OF_CALLS} AND calls.policy_version <> promotion_rollouts.version) AS alone,
    COALESCE((SELECT AVG(CASE WHEN is_error = 1 THEN 1.0 ELSE 0.0 END) FROM tool_calls
        WHERE tool_calls.rollout_id = rollouts.rollout_id), 0.0) AS tool_errors,
    (SELECT AVG(CASE WHEN finish_reason = 'length' THEN 1.0 ELSE 0.0 END) {OF_CALLS} AND calls.status = 'ok')
        AS truncated,
    CASE WHEN {STATUS} = 'completed' AND NOT EXISTS (SELECT 1 FROM rewards
        WHERE rewards.rollout_id = rollouts.rollout_id AND rewards.evidence = 1) THEN 1.0 ELSE 0.0 END AS unrewarded,
    1.0 * tokens / NULLIF(calls, 0) AS answer_tokens,
    (SELECT AVG(latency_ms) {OF_CALLS} AND calls.status = 'ok') AS latency
FROM promotion_rollouts JOIN rollouts USING (rollout_id) WHERE {IS_EVIDENCE} ORDER BY rollouts.n
"""
PROMOTION_REWARDS = f"""
SELECT rewards.*, rewards.value AS reward
FROM promotion_rollouts JOIN rewards ON rewards.rollout_id = promotion_rollouts.rollout_id
WHERE {IS_EVIDENCE} AND rewards.evidence = 1 ORDER BY reward_id
"""
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
    """A test of `version` against the live version `against`. `evidence`: its numbers (docs/training.md).

    The status is `ended` if the test was stopped undecided, for example because somebody made a version live.
    """

    n: int
    version: int
    against: int
    status: PromotionStatus
    began_at: float
    decided_at: float | None = None
    reason: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observed:
    """A rollout that counts in a test, as known so far. `rewards` has only rewards that are evidence.

    `opened_by` is a key, or empty for all keys that give evidence; siblings have the same one. `alone`: its version,
    and nothing else, answered its calls. The last five fields are metrics, which are None if the rollout has no value.
    """

    rollout_id: str
    task_id: str | None
    opened_by: str
    place: int
    version: int
    created_at: float
    ended_at: float | None
    status: RolloutStatus
    alone: bool
    rewards: tuple[Reward, ...]
    tool_errors: float
    truncated: float | None
    unrewarded: float
    answer_tokens: float | None
    latency: float | None


class UnderTest(NamedTuple):
    promotion: Promotion
    candidate: PolicyVersion


class Promotions:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._now: UnderTest | None = None

    async def now(self) -> UnderTest | None:
        """Return the running test and its candidate, or None. The evidence in it may be out of date."""
        row = await self._db.quick(TESTING)
        if row is None:
            self._now = None
        elif self._now is None or self._now.promotion.n != row["n"]:
            test = await self.under_way()
            candidate = await self._db.record(PolicyVersion, CANDIDATE, version=test.version if test else None)
            self._now = UnderTest(test, candidate) if test and candidate else None
        return self._now

    async def under_way(self) -> Promotion | None:
        """Return the running test with its evidence so far; None if none runs."""
        return await self._db.record(Promotion, PROMOTION_UNDER_WAY)

    async def last(self) -> dict[int, Promotion]:
        return {one.version: one for one in await self._db.records(Promotion, PROMOTIONS)}

    async def begin(self, version: int, step: int, against: int) -> None:
        """Begin the test of a step's version. Raise Superseded if another test runs or another version went live."""
        row: dict[str, Any] = {"version": version, "step": step, "against": against, "at": time.time()}

        async def work(db: Transaction) -> None:
            live = await db.one(LIVE_NOW)
            if await db.one(TESTING) is not None or live is None or live["version"] != against:
                raise Superseded(f"policy version {version} cannot be tested: another went live or is being tested")
            for statement in (BEGUN, STEP_PUBLISHED, PROMOTION_BEGIN):
                await db.all(statement, row)

        await self._db.write(work)

    async def assign(self, test: Promotion, rollout: RolloutName, config: Config) -> int:
        """Return the version that a rollout keeps. New rollouts get the live one if the test is full or over."""
        row: dict[str, Any] = {"n": test.n, "against": test.against, "rollout_id": rollout.rollout_id}
        row |= {"task_id": rollout.task_id, "agent": rollout.agent, "mode": rollout.mode, "key_id": rollout.key_id}
        known = await self._db.one(KNOWN, row)
        if known is not None and known["kept"] is not None:
            return int(known["kept"])
        own = row | {"evidence": rollout.evidence} | dict(known or {})  # it may have been opened before its first call
        own["opened_by"] = "" if own["evidence"] else own["key_id"] or NO_STORED_KEY

        async def work(db: Transaction) -> int:
            if (kept := await db.one(KEPT, row)) is not None:
                return int(kept["version"])
            ((place, compared, is_tested),) = await db.all(PLACE, own)
            gate = config.section(PromotionConfig)
            if not is_tested or compared >= gate.max_rollouts:
                return test.against
            chosen = choose(test, own["task_id"], place, config.trainer.group_size, gate.share)
            version = test.against if chosen is None else chosen
            await db.all(ROLLOUT_SEEN, row | {"evidence": own["evidence"], "pin": version, "at": time.time()})
            await db.all(ASSIGN, own | {"place": place, "version": version, "compared": chosen is not None})
            return version

        return await self._db.write(work)

    async def stamp(self, test: Promotion) -> tuple[Any, ...]:
        """Return a value that changes with every reward, and with every compared rollout that begins or ends."""
        row = await self._db.one(STAMP, {"n": test.n})
        return () if row is None else tuple(row)

    async def observed(self, test: Promotion) -> list[Observed]:
        rollouts = await self._db.all(PROMOTION_OBSERVED, {"n": test.n})
        posted = defaultdict[str, list[Reward]](list)
        for row in await self._db.all(PROMOTION_REWARDS, {"n": test.n}):
            posted[row["rollout_id"]].append(read(Reward, row, reward=row["value"], retrain=False))
        return [read(Observed, row, rewards=tuple(posted[row["rollout_id"]])) for row in rollouts]

    async def found(self, test: Promotion, evidence: Mapping[str, Any]) -> None:
        await self._db.commit([(FOUND, [{"n": test.n, "evidence": dumps({**evidence})}])])

    async def decide(self, test: Promotion, outcome: Outcome, reason: str, evidence: Mapping[str, Any]) -> bool:
        """Make the version live or reject it, and store the numbers. Return False if the test had already ended."""
        row: dict[str, Any] = {"n": test.n, "version": test.version, "outcome": outcome, "reason": reason}
        row |= {"evidence": dumps({**evidence}), "at": time.time()}
        statements = GO_LIVE if outcome == "promoted" else (REJECTED,)

        async def work(db: Transaction) -> bool:
            is_ours = bool(await db.all(PROMOTION_DECIDED, row))
            for statement in statements if is_ours else ():
                await db.all(statement, row)
            return is_ours

        return await self._db.write(work)

    async def end(self, reason: str) -> None:
        """Stop the running test, if any."""
        row = {"reason": reason, "at": time.time()}
        await self._db.commit([(END, [row]), (VERSION_UNTESTED, [row])])


def choose(test: Promotion, task_id: str | None, place: int, group_size: int, share: float) -> int | None:
    """Return the version for a rollout, by its place, from 0, among its task's rollouts; None if it is not compared.

    A group is compared as a whole or not at all. Its first two rollouts get one version each, and so do the next two;
    a hash decides which (permuted blocks of two). Every process makes the same choice.
    """
    size = LONE if task_id is None else group_size
    group, within = divmod(place, size)
    if _drawn(test.n, task_id, "group", group) >= 2 * share:
        return None
    candidate_first = _drawn(test.n, task_id, "pair", group, within // 2) < 0.5
    return test.version if (within % 2 == 0) == candidate_first else test.against


def _drawn(*what: object) -> float:
    """A number in [0, 1), always the same for the same input."""
    digest = blake2b("\n".join(map(repr, what)).encode(), digest_size=7).digest()
    return int.from_bytes(digest) / 256**7


def candidates_server(config: Config, tests: Promotions) -> Placed:
    """Return the `Placed` hook: during a test, the policy's last server has the candidate's merged weights."""
    upstream = config.policy_upstream

    async def placed() -> Mapping[str, PolicyVersion]:
        test = await tests.now()
        return {} if test is None or upstream is None else {upstream.published_to[-1]: test.candidate}

    return placed
