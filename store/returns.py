"""Keeps the return of each rollout beside it, so that lists, filters and comparisons read one column.

A reward changes it at once, at the same cost whatever came before. When the rules change, all are counted anew, the
newest first, a few at a time; `stale_to` says how far that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

from ..core.errors import StoreUnavailable
from ..core.json_text import dumps, loads
from ..core.records import Reward
from ..core.returns import Rules, earned, return_of, weighted
from .database import LOOK_S, Database, Row, Transaction, in_passing

COUNTING = "SELECT weights, failed, low, high, stale_to FROM returns WHERE n = 1"
ADOPT = """
UPDATE returns SET weights = :weights, failed = :failed, low = :low, high = :high,
    stale_to = (SELECT COALESCE(MAX(n), 0) FROM rollouts)
WHERE n = 1
"""
COUNTED_TO = "UPDATE returns SET stale_to = :to WHERE n = 1"
# The reward that counted before these were posted.
BEFORE = """
SELECT rollout_id, call_id, name, value FROM rewards
WHERE rollout_id = :rollout_id AND call_id {same} AND name = :name AND reward_id < :reward_id
ORDER BY reward_id DESC LIMIT 1
"""
OWN_BEFORE, OF_CALL_BEFORE = BEFORE.format(same="IS NULL"), BEFORE.format(same="= :call_id")
RETURN = """
UPDATE rollouts SET own_reward = :own, calls_reward = :calls, reward = :reward, rewarded_at = :rewarded_at
WHERE rollout_id = :rollout_id
"""
STALE = """
SELECT n, rollout_id, status, own_reward, calls_reward, reward, rewarded_at FROM rollouts
WHERE n <= :n ORDER BY n DESC LIMIT :limit
"""
STALE_REWARDS = """
SELECT rewards.rollout_id, call_id, name, value, rewards.created_at
FROM rollouts CROSS JOIN rewards ON rewards.rollout_id = rollouts.rollout_id
WHERE rollouts.n BETWEEN :first AND :last ORDER BY reward_id
"""
AT_ONCE = 50  # rollouts that one transaction counts anew


class Counting(NamedTuple):
    """The rules, and the rollout up to which returns are not counted by them yet."""

    rules: Rules
    stale_to: int


class Returns:
    """The rules by which the store counts returns."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def rules(self) -> Rules:
        """Return the rules that hold now."""
        return _read(await self._db.quick(COUNTING)).rules

    async def adopt(self, rules: Rules) -> None:
        """Count by these rules from now on. `settle` counts existing returns anew."""

        async def work(db: Transaction) -> None:
            if _read(await db.one(COUNTING)).rules != rules:
                low, high = rules.within
                adopted = {"weights": dumps({**rules.weights}), "failed": rules.failed, "low": low, "high": high}
                await db.run(ADOPT, adopted)

        if await self.rules() != rules:
            await self._db.write(work)

    async def settle(self) -> None:
        """Count returns anew that are not counted by the rules yet, in small steps. Several processes may do so."""
        while _read(await self._db.quick(COUNTING)).stale_to:
            await in_passing(self._db, lambda db, _: _count_some(db))

    async def keep(self) -> None:
        """Settle again and again, until cancelled: whoever changes the rules may end before all is counted."""
        while True:
            with suppress(StoreUnavailable):  # the next look may succeed
                await self.settle()
            await asyncio.sleep(LOOK_S)

    async def use(self, rules: Rules) -> None:
        """Adopt these rules, and return once all is counted by them."""
        await self.adopt(rules)
        await self.settle()


async def read_counting(db: Transaction) -> Counting:
    """Return the rules within a transaction."""
    return _read(await db.one(COUNTING))


async def count_rewards(
    db: Transaction, rollouts: Mapping[str, Row], rewards: Sequence[Reward], first: int, at: float
) -> None:
    """Count rewards that were just recorded, from the id `first` on, for rollouts whose rows are as they were before.

    PostgreSQL would keep each of a row's states until the transaction ends, so each rollout is written once.
    """
    rules, stale_to = await read_counting(db)
    posted: dict[str, dict[str | None, dict[str, float]]] = {}
    for one in rewards:
        if one.name in rules.weights:
            posted.setdefault(one.rollout_id, {}).setdefault(one.call_id, {})[one.name] = one.value
    asked = [
        {"rollout_id": rollout_id, "call_id": call_id, "name": name, "reward_id": first}
        for rollout_id, targets in posted.items()
        for call_id, values in targets.items()
        for name in (rules.weights if call_id is not None else rules.weights.keys() - values.keys())
    ]
    before: dict[tuple[str, str | None], dict[str, float]] = {}
    for row in (
        *await db.many(OWN_BEFORE, [one for one in asked if one["call_id"] is None]),
        *await db.many(OF_CALL_BEFORE, [one for one in asked if one["call_id"] is not None]),
    ):
        before.setdefault((row["rollout_id"], row["call_id"]), {})[row["name"]] = row["value"]
    counted = []
    for rollout_id in sorted(posted):
        rollout = rollouts[rollout_id]
        if rollout["n"] <= stale_to:
            await count_all(db, rules, [rollout])
            continue
        own, calls = rollout["own_reward"], rollout["calls_reward"]
        for call_id, values in posted[rollout_id].items():
            earlier = before.get((rollout_id, call_id), {})
            after = weighted(earlier | values, rules)
            if call_id is None:
                own = after
            else:
                calls = str(Fraction(calls or 0) + Fraction(after or 0) - Fraction(weighted(earlier, rules) or 0))
        rewarded_at = at if rollout["rewarded_at"] is None else rollout["rewarded_at"]
        counted.append(_row(rollout_id, own, calls, rewarded_at))
    await db.many(RETURN, counted)


def _row(rollout_id: str, own: float | None, calls: str | None, rewarded_at: float | None) -> dict[str, Any]:
    """Parameters of RETURN. A fraction becomes the nearest float, as `math.fsum` makes it."""
    reward = return_of(own, [] if calls is None else [float(Fraction(calls))])
    return {"rollout_id": rollout_id, "own": own, "calls": calls, "reward": reward, "rewarded_at": rewarded_at}


async def _count_some(db: Transaction) -> None:
    counting = await read_counting(db)
    rollouts = await db.all(STALE, {"n": counting.stale_to, "limit": AT_ONCE})
    await count_all(db, counting.rules, rollouts)
    await db.run(COUNTED_TO, {"to": rollouts[-1]["n"] - 1 if len(rollouts) == AT_ONCE else 0})


async def count_all(db: Transaction, rules: Rules, rollouts: Sequence[Row]) -> None:
    """Count all rewards of rollouts, which follow each other, newest first."""
    if not rollouts:
        return
    posted: dict[str, list[Row]] = {row["rollout_id"]: [] for row in rollouts}
    for row in await db.all(STALE_REWARDS, {"first": rollouts[-1]["n"], "last": rollouts[0]["n"]}):
        posted[row["rollout_id"]].append(row)
    rows = [_counted(row, posted[row["rollout_id"]], rules) for row in rollouts]
    changed = [new for old, new in zip(rollouts, rows, strict=True) if _differs(old, new)]
    await db.many(RETURN, sorted(changed, key=lambda row: str(row["rollout_id"])))  # the order of recorders


def _counted(rollout: Row, posted: Sequence[Row], rules: Rules) -> dict[str, Any]:
    rewards = [Reward(row["rollout_id"], row["value"], row["call_id"], row["name"]) for row in posted]
    found = earned(rewards, rules, rollout["status"])
    calls = str(sum(map(Fraction, found.calls.values()))) if found.calls else None
    first = min((row["created_at"] for row in posted if row["name"] in rules.weights), default=None)
    return _row(rollout["rollout_id"], found.own, calls, first)


def _differs(old: Row, new: dict[str, Any]) -> bool:
    names = {"own": "own_reward", "calls": "calls_reward"}
    return any(old[names.get(name, name)] != value for name, value in new.items())


def _read(row: Row | None) -> Counting:
    assert row is not None  # the schema has one
    return Counting(Rules(loads(row["weights"]), row["failed"], (row["low"], row["high"])), row["stale_to"])
