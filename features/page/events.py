"""Reads the events of the feed, each with what it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...core.json_text import dumps, loads_rounded
from ...store.database import Feed, Row

Kind = Literal["call", "reward", "rollout", "step", "version"]

AFTER = "SELECT n, kind, ref FROM feed WHERE n > :cursor ORDER BY n LIMIT :limit"
# By kind: its rows, with `ref`, and the key that opened the rollout.
FEED_CALLS = """
SELECT calls.call_id AS ref, calls.call_id, calls.rollout_id, calls.seq, calls.agent, calls.status, calls.model,
    calls.policy_version, calls.latency_ms, calls.finish_reason, rollouts.task_id, rollouts.key_id
FROM calls JOIN rollouts USING (rollout_id) WHERE calls.call_id IN (SELECT CAST(value AS TEXT) FROM json_each(:refs))
"""
FEED_REWARDS = """
SELECT reward_id AS ref, reward_id, rewards.rollout_id, call_id, name, rewards.value AS reward, source,
    rewards.created_at AS at, rollouts.key_id
FROM rewards JOIN rollouts USING (rollout_id) WHERE reward_id IN (SELECT CAST(value AS BIGINT) FROM json_each(:refs))
"""
FEED_ROLLOUTS = """
SELECT n AS ref, rollout_id, task_id, mode, status, reward, key_id
FROM rollouts WHERE n IN (SELECT CAST(value AS BIGINT) FROM json_each(:refs))
"""
FEED_STEPS = """
SELECT step AS ref, step, status, version, metrics
FROM steps WHERE step IN (SELECT CAST(value AS BIGINT) FROM json_each(:refs))
"""
FEED_VERSIONS = """
SELECT policy_versions.version AS ref, policy_versions.version, status, verified,
    policy_versions.version = (SELECT version FROM policy_log ORDER BY n DESC LIMIT 1) AS live
FROM policy_versions WHERE policy_versions.version IN (SELECT CAST(value AS BIGINT) FROM json_each(:refs))
"""
_ROWS: dict[str, str] = {
    "call": FEED_CALLS,
    "reward": FEED_REWARDS,
    "rollout": FEED_ROLLOUTS,
    "step": FEED_STEPS,
    "version": FEED_VERSIONS,
}


@dataclass(frozen=True, slots=True)
class Happened:
    """One event, the `n`th of all. `data` is as it is now: it may have changed again since.

    `key_id`: the key that opened the rollout it is about.
    """

    n: int
    kind: Kind
    data: dict[str, Any]
    key_id: str | None


class FeedEvents(Feed):
    """The newest 10,000 events, with what they are about."""

    async def after(self, cursor: int, limit: int) -> tuple[list[Happened], int]:
        """Return at most `limit` events after `cursor`, oldest first, and the cursor after them.

        Events of deleted records are left out, and all but the last about one record.
        """
        rows = await self.database.all(AFTER, {"cursor": cursor, "limit": limit})
        last = {(row["kind"], str(row["ref"])): row["n"] for row in rows}
        found: list[Happened] = []
        for kind, statement in _ROWS.items():
            if not (refs := [ref for one, ref in last if one == kind]):
                continue
            happened = await self.database.all(statement, {"refs": dumps(refs)})
            found += [_happened(last[kind, str(row["ref"])], kind, row) for row in happened]
        return sorted(found, key=lambda one: one.n), rows[-1]["n"] if rows else cursor


def _happened(n: int, kind: str, row: Row) -> Happened:
    data = {name: value for name, value in dict(row).items() if name not in ("ref", "key_id")}
    if kind == "step":
        data["reward"] = loads_rounded(data.pop("metrics")).get("reward_mean")
    if kind == "version":
        data |= {"live": bool(data["live"]), "verified": bool(data["verified"])}
    return Happened(n, kind, data, dict(row).get("key_id"))  # type: ignore[arg-type]
