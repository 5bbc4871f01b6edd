"""Finds rollouts that wait for training: rewarded, taken by no step, and grouped by their common task."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..types import Reward, Rollout
from .database import Database
from .rewards import read_reward
from .rollouts import read_rollout

# Whether an ended rollout has a reward. `:failed`: failed ones count for something (`trainer.failed_rollouts`).
HAS_REWARD = "CASE status WHEN 'completed' THEN rewarded_at IS NOT NULL WHEN 'failed' THEN :failed ELSE FALSE END"
# At least one call was answered by the policy. Others count nowhere, and are dropped when a step takes their task.
IS_OWN = "(foreign_calls = 0 OR foreign_calls < calls)"
# The reward function, if there is one, was asked (`endings`). The index that is looked at holds `n`, too.
IS_SCORED = "rollouts.n NOT IN (SELECT n FROM awaiting_rewards)"
CLAIMABLE_GROUPS = f"""
SELECT task_id, group_id,
       COUNT(*) FILTER (WHERE {HAS_REWARD}) AS completed,
       COUNT(*) FILTER (WHERE status <> 'completed' OR rewarded_at IS NOT NULL) AS ended,
       MIN(CASE WHEN rewarded_at > ended_at THEN rewarded_at ELSE ended_at END)
           FILTER (WHERE {HAS_REWARD}) AS oldest
FROM rollouts
WHERE mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL AND task_id IS NOT NULL
  AND {IS_OWN} AND {IS_SCORED}
GROUP BY task_id, group_id
HAVING COUNT(*) FILTER (WHERE {HAS_REWARD}) > 0
ORDER BY oldest
"""
CLAIMABLE_OF_GROUP = f"""
SELECT * FROM rollouts
WHERE task_id = :task_id AND group_id IS :group_id
  AND mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL
  AND {IS_SCORED}
ORDER BY ended_at
"""
# Those that a step took or dropped.
COMPARED_BEFORE = """
SELECT * FROM rollouts
WHERE group_id = :group_id AND status <> 'running' AND (step IS NOT NULL OR dropped IS NOT NULL)
ORDER BY n
"""
# Rollouts without a task have no siblings.
CLAIMABLE_LONE = f"""
SELECT COUNT(*) AS completed, MIN(CASE WHEN rewarded_at > ended_at THEN rewarded_at ELSE ended_at END) AS oldest
FROM rollouts
WHERE task_id IS NULL AND mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL
  AND {HAS_REWARD} AND {IS_OWN} AND {IS_SCORED}
"""
LONE = f"""
SELECT * FROM rollouts
WHERE task_id IS NULL AND mode = 'train' AND status <> 'running' AND step IS NULL AND dropped IS NULL
  AND {HAS_REWARD} AND {IS_OWN} AND {IS_SCORED}
ORDER BY ended_at LIMIT :limit
"""
EARLIER = f"""
SELECT * FROM rollouts
WHERE n < (SELECT n FROM rollouts WHERE rollout_id = :rollout_id)
  AND mode = 'train' AND {HAS_REWARD} AND {IS_OWN}
ORDER BY n DESC LIMIT :limit
"""
# With `mode =` SQLite would go through the rollouts of all tasks that have this mode and status.
EARLIER_OF_TASK = f"""
SELECT * FROM rollouts
WHERE task_id = :task_id AND n < (SELECT n FROM rollouts WHERE rollout_id = :rollout_id)
  AND mode <> 'eval' AND {HAS_REWARD} AND {IS_OWN}
ORDER BY n DESC LIMIT :limit
"""
# Of the newest rollouts. With `=` SQLite would go through all rollouts of this mode and status.
_ENDED_SINCE_VERSION = """
rollouts.n > (SELECT MAX(n) FROM rollouts) - :newest AND policy_version >= :version
AND mode <> 'eval' AND status NOT IN ('running', 'discarded')
"""
ROLLOUTS_SINCE_VERSION = f"SELECT * FROM rollouts WHERE {_ENDED_SINCE_VERSION} ORDER BY n"
REWARDS_SINCE_VERSION = f"""
SELECT rewards.* FROM rollouts CROSS JOIN rewards ON rewards.rollout_id = rollouts.rollout_id
WHERE {_ENDED_SINCE_VERSION} ORDER BY rollouts.n, rewards.reward_id
"""
EQUAL_REWARDS = "all rewards of the group are equal"
# Since the newest rollout of the last step, or, where that is deleted, since the step began.
UNLEARNED = """
SELECT COUNT(*) AS rollouts, AVG(reward) AS reward FROM (
    SELECT reward FROM rollouts
    WHERE n > COALESCE(
            (SELECT MAX(n) FROM rollouts WHERE step = (SELECT MAX(step) FROM steps)),
            (
                SELECT n FROM rollouts
                WHERE created_at <= (SELECT created_at FROM steps ORDER BY step DESC LIMIT 1) ORDER BY n DESC LIMIT 1
            ),
            0
        )
      AND mode <> 'eval' AND dropped = :reason
    ORDER BY n DESC LIMIT :enough
) AS recent
"""
BATCHES = 3  # batches in a row that taught nothing, until somebody is told


@dataclass(frozen=True, slots=True)
class Standstill:
    """Says that nothing was learned from the newest `rollouts`, whose mean reward is `reward`."""

    rollouts: int
    reward: float | None

    @property
    def story(self) -> str:
        """Tell a person what was seen and what to try."""
        mean = "" if self.reward is None else f" (mean reward {self.reward:.3g})"
        return (
            f"nothing was learned from the newest {self.rollouts} rollouts{mean}: in each group all rewards are equal. "
            "If the tasks are solved, give harder ones. Otherwise go back to an earlier version "
            "(`lightning-proxy policy promote N`) and train with a lower trainer.learning_rate or trainer.entropy, "
            "or let rewards tell more answers apart (docs/training.md)"
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The ended siblings that no step has taken. `completed` of `ended` have a reward.

    `task_id` None: rollouts without a task, which are no siblings; only rewarded ones are counted. `group_id`: the
    group that a step compared before these ended, or before they were offered again; None for a new group. If `failed`
    is true in the methods below, a failed rollout counts as rewarded (`trainer.failed_rollouts`).
    """

    task_id: str | None
    completed: int
    ended: int
    oldest: float
    group_id: int | None = None


class Waiting:
    """Reads what waits; `store.steps` takes it."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def groups(self, failed: bool = False) -> list[Group]:
        """Return the groups with at least one rollout to train on, the longest waiting first."""
        return [
            Group(r["task_id"], r["completed"], r["ended"], r["oldest"], r["group_id"])
            for r in await self._db.all(CLAIMABLE_GROUPS, {"failed": failed})
        ]

    async def of_group(self, group: Group) -> list[Rollout]:
        """Return the waiting rollouts of a group, in the order in which they ended."""
        params = {"task_id": group.task_id, "group_id": group.group_id}
        return [read_rollout(r) for r in await self._db.all(CLAIMABLE_OF_GROUP, params)]

    async def compared_before(self, group: Group) -> list[Rollout]:
        """Return the rollouts of a group that steps took or dropped before, in the order in which they were opened."""
        return [read_rollout(r) for r in await self._db.all(COMPARED_BEFORE, {"group_id": group.group_id})]

    async def lone(self, failed: bool = False) -> Group | None:
        """Return the group of rewarded rollouts without a task, if there are any."""
        row = await self._db.one(CLAIMABLE_LONE, {"failed": failed})
        assert row is not None  # it counts
        return Group(None, row["completed"], row["completed"], row["oldest"]) if row["completed"] else None

    async def lone_rollouts(self, limit: int, failed: bool = False) -> list[Rollout]:
        """Return rewarded rollouts without a task, in the order in which they ended."""
        return [read_rollout(r) for r in await self._db.all(LONE, {"limit": limit, "failed": failed})]

    async def count(self, *, lone: bool, failed: bool = False) -> int:
        """Count the rewarded rollouts that no step has taken; those without a task only if `lone`."""
        of_nothing = await self.lone(failed) if lone else None
        return sum(group.completed for group in [*await self.groups(failed), *([of_nothing] if of_nothing else [])])

    async def standstill(self, batch: int) -> Standstill | None:
        """Return what was dropped in a row because all rewards were equal, once it is BATCHES batches; else None.

        `batch`: the rollouts of a training step.
        """
        row = await self._db.one(UNLEARNED, {"reason": EQUAL_REWARDS, "enough": BATCHES * batch})
        assert row is not None  # it counts
        return Standstill(row["rollouts"], row["reward"]) if row["rollouts"] >= BATCHES * batch else None

    async def earlier(self, rollout_id: str, task_id: str | None, limit: int, failed: bool = False) -> list[Rollout]:
        """Return rewarded rollouts that were opened before this one, newest first: of one task, or (None) of all."""
        statement = EARLIER if task_id is None else EARLIER_OF_TASK
        params = {"rollout_id": rollout_id, "limit": limit, "failed": failed}
        params |= {} if task_id is None else {"task_id": task_id}
        return [read_rollout(r) for r in await self._db.all(statement, params)]

    async def rewarded_since(self, version: int, newest: int) -> list[tuple[Rollout, list[Reward]]]:
        """Return the ended ones of the `newest` rollouts that began with this version or later, oldest first."""
        params: dict[str, object] = {"version": version, "newest": newest}
        rewards = defaultdict[str, list[Reward]](list)
        for row in await self._db.all(REWARDS_SINCE_VERSION, params):
            rewards[row["rollout_id"]].append(read_reward(row))
        rows = await self._db.all(ROLLOUTS_SINCE_VERSION, params)
        return [(read_rollout(row), rewards[row["rollout_id"]]) for row in rows]
