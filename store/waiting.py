"""Finds rollouts that wait for training: rewarded and not taken by a step, in groups of siblings (`core/groups.py`).

Also counts rollouts without a reward, and notices when nothing is learned.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..core.groups import NO_END, Group, Grouping, Member, formed
from ..core.http import in_thread_if_large
from ..core.json_text import dumps
from ..core.records import Rollout
from .database import Feed, Records, read

# Whether an ended rollout has a reward. `:failed`: failed ones count for something (`trainer.failed_rollouts`).
HAS_REWARD = "CASE status WHEN 'completed' THEN rewarded_at IS NOT NULL WHEN 'failed' THEN :failed ELSE FALSE END"
# At least one call was answered by the policy. Others count nowhere, and are dropped when a step takes their task.
IS_OWN = "(foreign_calls = 0 OR foreign_calls < calls)"
# The reward function, if there is one, was asked (`endings`). The index that is looked at holds `n`, too.
IS_SCORED = "rollouts.n NOT IN (SELECT n FROM awaiting_rewards)"
_UNTAKEN = "mode = 'train' AND step IS NULL AND dropped IS NULL"
_ENDED = f"{_UNTAKEN} AND status <> 'running'"
_REWARDED = "(rewarded_at IS NOT NULL OR status <> 'completed')"
_SINCE = "CASE WHEN rewarded_at > ended_at THEN rewarded_at ELSE ended_at END"
# A step took or dropped siblings of it.
IS_LATE = """(group_id IS NOT NULL AND EXISTS (
    SELECT 1 FROM rollouts AS other WHERE other.group_id = rollouts.group_id
    AND (other.step IS NOT NULL OR other.dropped IS NOT NULL)
))"""
_MEMBER = f"""
rollouts.n, task_id, owner, group_id, status, created_at AS opened_at, {IS_OWN} AS own, {IS_SCORED} AS scored,
       rewarded_at IS NOT NULL AS rewarded, {_SINCE} AS since, {IS_LATE} AS late
"""
_MEMBERS_ENDED = f"""
SELECT {_MEMBER} FROM rollouts INDEXED BY rollouts_claimable
WHERE {_ENDED} AND {{tasks}} AND ({_REWARDED} OR group_id IS NOT NULL OR NOT {IS_SCORED})
"""
_MEMBERS_RUNNING = f"""
SELECT {_MEMBER} FROM rollouts INDEXED BY rollouts_running_of_task
WHERE {_UNTAKEN} AND status = 'running' AND {{tasks}} AND task_id IS NOT NULL
"""
_ALL, _SOME = "task_id IS NOT NULL", "task_id IN (SELECT CAST(value AS TEXT) FROM json_each(:tasks))"
# All of them: at a trainer's start, and when it has missed what changed.
MEMBERS_ENDED, MEMBERS_RUNNING = _MEMBERS_ENDED.format(tasks=_ALL), _MEMBERS_RUNNING.format(tasks=_ALL)
MEMBERS_ENDED_OF, MEMBERS_RUNNING_OF = _MEMBERS_ENDED.format(tasks=_SOME), _MEMBERS_RUNNING.format(tasks=_SOME)
CHANGED = """
SELECT task_id
FROM feed CROSS JOIN rollouts ON rollouts.n = CASE WHEN kind = 'group' THEN CAST(ref AS BIGINT) END
WHERE feed.n > :cursor AND feed.n <= :newest AND task_id IS NOT NULL
"""
# The rollouts of a group. `place`: a step took or dropped it, it ended, with its reward if it was completed, or it is
# awaited.
_SIBLING = f"""
rollouts.*, CASE WHEN step IS NOT NULL OR dropped IS NOT NULL THEN 'before'
    WHEN status <> 'running' AND {IS_SCORED} AND {_REWARDED} THEN 'ended' ELSE 'awaited' END AS place
FROM rollouts
"""
_SEEN = "(status <> 'running' OR n IN (SELECT CAST(value AS BIGINT) FROM json_each(:awaited))) ORDER BY n"
SIBLINGS = f"SELECT {_SIBLING} INDEXED BY rollouts_by_group WHERE group_id = :group_id AND owner IS :owner AND {_SEEN}"
SIBLINGS_ONE_BY_ONE = f"""
SELECT {_SIBLING} INDEXED BY rollouts_by_task
WHERE task_id = :task_id AND n > :after AND n <= :last AND {_UNTAKEN} AND group_id IS NULL AND owner IS :owner
    AND {_SEEN}
"""
WAITING_COUNT = f"""
SELECT COUNT(*) AS rollouts FROM rollouts INDEXED BY rollouts_claimable
WHERE {_ENDED} AND task_id IS NOT NULL AND {HAS_REWARD} AND {IS_OWN} AND {IS_SCORED}
"""
# Rollouts without a task have no siblings.
_LONE = f"""
FROM rollouts INDEXED BY rollouts_lone
WHERE task_id IS NULL AND {_ENDED} AND (rewarded_at IS NOT NULL OR status = 'failed')
  AND {HAS_REWARD} AND {IS_OWN} AND {IS_SCORED}
"""
CLAIMABLE_LONE = f"""
SELECT COUNT(*) AS rewarded, MIN(since) AS oldest FROM (SELECT {_SINCE} AS since {_LONE} LIMIT :limit) AS recent
"""
LONE = f"SELECT * {_LONE} ORDER BY ended_at LIMIT :limit"
OWNERS = """
SELECT rollout_id, owner FROM rollouts WHERE rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids))
"""
_EARLIER = f"""
SELECT * FROM rollouts WHERE {{task}} n < (SELECT n FROM rollouts WHERE rollout_id = :rollout_id)
    AND mode <> 'eval' AND {HAS_REWARD} AND {IS_OWN}
    AND COALESCE(owner, '') = COALESCE((SELECT owner FROM rollouts WHERE rollout_id = :rollout_id), '')
ORDER BY n DESC LIMIT :limit
"""
EARLIER, EARLIER_OF_TASK = _EARLIER.format(task=""), _EARLIER.format(task="task_id = :task_id AND")
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
      AND mode <> 'eval' AND dropped = :reason AND trusted_reward IS NOT NULL
    ORDER BY n DESC LIMIT :enough
) AS recent
"""
# All about which the reward function has spoken; a name is null where nothing was posted.
NAMES_OF_REWARDS = f"""
SELECT DISTINCT rollouts.rollout_id, name
FROM rollouts LEFT JOIN rewards ON rewards.rollout_id = rollouts.rollout_id
WHERE rollouts.rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids)) AND {IS_SCORED}
"""
ROW_SIZE = 400  # bytes, about, of what is read of one
BATCHES = 3  # consecutive batches that taught nothing, before a warning


# Nothing was learned from the newest `rollouts`. `story`: for people, what was seen and what to try.
@dataclass(frozen=True, slots=True)
class Standstill:
    rollouts: int
    reward: float | None
    story: str


class Waiting(Records):
    """Reads rollouts that wait for training; `store.steps` takes them."""

    async def groups(self, grouping: Grouping = Grouping(), tasks: Collection[str] | None = None) -> list[Group]:
        """Return the groups of all tasks, or of `tasks`, with at least one rollout to train on.

        By default, all rollouts of a task that were opened one by one are one group.
        """
        statements = (MEMBERS_ENDED, MEMBERS_RUNNING) if tasks is None else (MEMBERS_ENDED_OF, MEMBERS_RUNNING_OF)
        some = {"tasks": dumps([*(tasks or ())])}
        rows = [row for statement in statements for row in await self._db.all(statement, some)]
        return await in_thread_if_large(ROW_SIZE * len(rows), lambda: formed((Member(*row) for row in rows), grouping))

    async def changed(self, cursor: int | None) -> tuple[int, set[str] | None]:
        """Return a new cursor, and the tasks with groups that may have changed since `cursor` (None: any task)."""
        feed = Feed(self._db)
        newest = await feed.newest()
        if cursor is None or not await feed.knows(cursor):
            return newest, None
        rows = await self._db.all(CHANGED, {"cursor": cursor, "newest": newest}) if newest > cursor else ()
        return newest, {task_id for (task_id,) in rows}

    async def siblings(self, group: Group) -> tuple[list[Rollout], list[Rollout], list[Rollout]]:
        """Return a group's rollouts in three lists: ended, awaited, and taken or dropped by steps."""
        assert group.pool is not None
        values = group.pool._asdict() | {"after": group.after, "last": group.last, "awaited": dumps([*group.awaited])}
        found = defaultdict[str, list[Rollout]](list)
        for row in await self._db.all(SIBLINGS if group.pool.group_id else SIBLINGS_ONE_BY_ONE, values):
            found[row["place"]].append(read(Rollout, row))
        return found["ended"], found["awaited"], found["before"]

    async def lone(self, failed: bool = False, limit: int = NO_END) -> Group | None:
        """Return the rewarded rollouts without a task as a group, if there are any. At most `limit` are counted."""
        ((rewarded, oldest),) = await self._db.all(CLAIMABLE_LONE, {"failed": failed, "limit": limit})
        return Group(None, rewarded, rewarded, oldest) if rewarded else None

    async def lone_rollouts(self, limit: int, failed: bool = False) -> list[Rollout]:
        return await self._db.records(Rollout, LONE, limit=limit, failed=failed)

    async def count(self, *, lone: bool, failed: bool = False) -> int:
        """Count the rewarded rollouts that wait for training; those without a task only if `lone`."""
        of_nothing = await self.lone(failed) if lone else None
        of_tasks = await self._db.value(int, WAITING_COUNT, failed=failed) or 0
        return of_tasks + (of_nothing.rewarded if of_nothing else 0)

    async def owners(self, rollout_ids: Iterable[str]) -> dict[str, str | None]:
        """Return the owner of each rollout: a key with scope `own`, or None if it was opened in another way."""
        return dict(map(tuple, await self._db.all(OWNERS, {"rollout_ids": dumps([*rollout_ids])})))

    async def unrewarded(self, rollouts: Iterable[Rollout]) -> tuple[int, dict[str, int]]:
        """Return how many completed rollouts have no reward that counts, and by name how many have another reward.

        Rollouts that were dropped, or await a reward function, are not counted.
        """
        missing = [r.rollout_id for r in rollouts if r.status == "completed" and r.reward is None and not r.dropped]
        rows = [tuple(row) for row in await self._db.all(NAMES_OF_REWARDS, {"rollout_ids": dumps(missing)})]
        names = Counter(name for _, name in rows if name is not None)
        return len({rollout_id for rollout_id, _ in rows}), dict(names.most_common())

    async def standstill(self, batch: int) -> Standstill | None:
        """Return a Standstill if BATCHES batches of rollouts since the last step were dropped for equal rewards.

        Only rollouts with trusted rewards count. `batch`: the number of rollouts in a training step.
        """
        enough = BATCHES * batch
        ((rollouts, reward),) = await self._db.all(UNLEARNED, {"reason": EQUAL_REWARDS, "enough": enough})
        if rollouts < enough:
            return None
        mean = "" if reward is None else f" (mean reward {reward:.3g})"
        return Standstill(rollouts, reward, (
            f"nothing was learned from the newest {rollouts} rollouts{mean}: in each group all rewards are equal. "
            "If the tasks are solved, give harder ones. Otherwise go back to an earlier version "
            "(`lightning-proxy policy promote N`) and train with a lower trainer.learning_rate or trainer.entropy, "
            "or use rewards that distinguish more answers (docs/training.md)"
        ))  # fmt: skip

    async def earlier(self, rollout_id: str, task_id: str | None, limit: int, failed: bool = False) -> list[Rollout]:
        """Return rewarded rollouts opened before this one, newest first; if `task_id` is set, only those of this task.

        All of them have the same owner as this one.
        """
        statement = EARLIER if task_id is None else EARLIER_OF_TASK
        params = {"rollout_id": rollout_id, "limit": limit, "failed": failed, "task_id": task_id}
        return await self._db.records(Rollout, statement, **params)
