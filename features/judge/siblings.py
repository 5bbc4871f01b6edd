"""Finds the groups of siblings that a rewarder is to see: those that a training step will compare (`groups.py`)."""

from __future__ import annotations

import time
from typing import NamedTuple

from ...core.config.trainer import TrainerConfig
from ...core.groups import Grouping, Member, formed
from ...store.database import Database, Row
from ...store.waiting import IS_OWN, OWNER

POOLS_TO_SPEAK = f"""
SELECT DISTINCT mode, task_id, {OWNER} AS owner,
    CASE WHEN group_id IS NULL THEN opened_with END AS opened_with, group_id,
    CASE WHEN task_id IS NULL THEN rollout_id END AS lone
FROM awaiting_rewards CROSS JOIN rollouts ON rollouts.n = awaiting_rewards.n
LEFT JOIN keys ON keys.key_id = rollouts.key_id
WHERE NOT EXISTS (SELECT 1 FROM rewarder_spoken WHERE n = awaiting_rewards.n AND rewarder = :rewarder)
"""
# As members of groups: no matter who has answered them, or rewarded them so far.
_SIBLING = f"""rollouts.n, rollout_id, task_id, {OWNER} AS owner, opened_with, group_id, status,
    rollouts.created_at AS opened_at, {IS_OWN} AS own, TRUE AS scored, TRUE AS rewarded, ended_at AS since,
    EXISTS (SELECT 1 FROM awaiting_rewards WHERE n = rollouts.n)
        AND NOT EXISTS (SELECT 1 FROM rewarder_spoken WHERE n = rollouts.n AND rewarder = :rewarder) AS awaits"""
_OF_POOL = f"LEFT JOIN keys ON keys.key_id = rollouts.key_id WHERE mode = :mode AND {OWNER} IS :owner"
SIBLINGS_TOGETHER = f"""SELECT {_SIBLING} FROM rollouts INDEXED BY rollouts_opened_together {_OF_POOL}
    AND opened_with = :opened_with AND group_id IS NULL ORDER BY rollouts.n"""
SIBLINGS_COMPARED = f"""SELECT {_SIBLING} FROM rollouts INDEXED BY rollouts_by_group {_OF_POOL}
    AND group_id = :group_id ORDER BY rollouts.n"""
SIBLINGS_IN_ORDER = f"""SELECT {_SIBLING} FROM rollouts INDEXED BY rollouts_by_task {_OF_POOL} AND task_id = :task_id
    AND opened_with IS NULL AND group_id IS NULL
    AND ((step IS NULL AND dropped IS NULL) OR rollouts.n IN (SELECT n FROM awaiting_rewards)) ORDER BY rollouts.n"""


class AwaitingGroup(NamedTuple):
    """Siblings that a rewarder sees, and those of them that it is to reward."""

    siblings: list[str]
    awaiting: set[str]


async def ready(database: Database, config: TrainerConfig, rewarder: str, most: int) -> list[AwaitingGroup]:
    """Return about `most` groups of rollouts that await this rewarder, which all ended or waited for `group_timeout_s`.

    A rollout without a task has no siblings.
    """
    found: list[AwaitingGroup] = []
    for row in await database.all(POOLS_TO_SPEAK, {"rewarder": rewarder}):
        if len(found) >= most:
            break
        if row["lone"] is not None:
            found.append(AwaitingGroup([row["lone"]], {row["lone"]}))
        else:
            found += await _groups(database, config, row, rewarder)
    return found


async def _groups(database: Database, config: TrainerConfig, pool: Row, rewarder: str) -> list[AwaitingGroup]:
    statement = SIBLINGS_IN_ORDER if pool["opened_with"] is None else SIBLINGS_TOGETHER
    statement = statement if pool["group_id"] is None else SIBLINGS_COMPARED
    rows = await database.all(statement, {name: pool[name] for name in pool.keys()} | {"rewarder": rewarder})  # noqa: SIM118
    groups = [group for of in formed(map(_member, rows), Grouping.of(config)).values() for group in of]
    # No step compares what other models answered.
    others = [row["rollout_id"] for row in rows if row["awaits"] and not row["own"]]
    found = [AwaitingGroup([one], {one}) for one in others]
    rows, now = [row for row in rows if row["own"]], time.time()
    for group in groups:
        if not group.complete and now - group.oldest < config.group_timeout_s:
            continue
        ended = [row for row in rows if group.after < row["n"] <= group.last and row["status"] == "completed"]
        if awaiting := {row["rollout_id"] for row in ended if row["awaits"]}:
            found.append(AwaitingGroup([row["rollout_id"] for row in ended], awaiting))
    return found


def _member(row: Row) -> Member:
    return Member(**{name: row[name] for name in Member._fields})
