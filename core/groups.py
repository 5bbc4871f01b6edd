"""Which rollouts are siblings: the groups that a training step compares. Pure.

Rollouts that were opened together are a group, however they end. Rollouts of a task that were opened one by one form
groups in opening order: with `size` 2, rollouts 1, 2, 3 and 4 of a task are the groups (1, 2) and (3, 4), even if 1 and
3 end first. Rollouts that a step has compared stay a group. A group is complete when all its rollouts (or `size` that
were opened one by one) have ended, and the completed ones have their rewards. It is awaited for a limited time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .config.trainer import TrainerConfig

NO_END = 2**62


class Pool(NamedTuple):
    """Rollouts that may form groups together. `owner`: the key that opened them, if it sees only its own rollouts.

    `group_id`: the first rollout of those opened together, or compared by a step; None if they were opened one by one.
    """

    task_id: str
    owner: str | None = None
    group_id: int | None = None


class Member(NamedTuple):
    """The `n`th rollout that was opened. No step has taken it yet. Times are Unix times.

    `own`: the policy answered one of its calls. `scored`: it awaits no reward function. `since`: when it had both
    ended and got its reward. `late`: a step has taken or dropped others of its group.
    """

    n: int
    task_id: str
    owner: str | None
    group_id: int | None
    status: str
    opened_at: float
    own: bool
    scored: bool
    rewarded: bool
    since: float | None
    late: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether the rollout has ended and none of its rewards is awaited."""
        return self.status != "running" and self.scored and (self.rewarded or self.status != "completed")


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of a group that no step has taken. `ended`: how many have ended. `rewarded`: how many have a reward.

    `complete`: no other siblings are awaited. `oldest`: when the first of them began to wait for a step. The group has
    the rollouts of `pool` with numbers above `after`, up to `last`. `awaited`: the numbers of those that have not ended
    or await their reward. `late`: a step has taken or dropped the others. If `pool` is None, these are rollouts without
    a task, which are not siblings, and only rewarded ones are counted.
    """

    pool: Pool | None
    rewarded: int
    ended: int
    oldest: float
    complete: bool = False
    after: int = 0
    last: int = NO_END
    awaited: tuple[int, ...] = ()
    late: bool = False

    @property
    def task_id(self) -> str | None:
        return None if self.pool is None else self.pool.task_id


@dataclass(frozen=True, slots=True)
class Grouping:
    """How groups form. `size`: how many rollouts that were opened one by one form a group.

    `failed`: failed rollouts count as rewarded. `timeout_s`: how long siblings are awaited. A running rollout is left
    out if it was opened longer than this before one that has ended.
    """

    size: int = NO_END
    failed: bool = False
    timeout_s: float = float("inf")

    @classmethod
    def of(cls, config: TrainerConfig) -> Grouping:
        return cls(config.group_size, config.failed_reward is not None, config.group_timeout_s)

    def is_rewarded(self, member: Member) -> bool:
        return member.status == "completed" or (member.status == "failed" and self.failed)


def formed(members: Iterable[Member], grouping: Grouping) -> list[Group]:
    """Return the groups with a rollout to train on, pool by pool."""
    pools: dict[Pool, list[Member]] = defaultdict(list)
    for member in members:
        if member.own:
            pools[Pool(member.task_id, member.owner, member.group_id)].append(member)
    return [group for pool, own in pools.items() for group in _groups(pool, sorted(own), grouping)]


def _groups(pool: Pool, members: Sequence[Member], grouping: Grouping) -> Iterator[Group]:
    after, late = 0, members[0].late
    for part in [members] if pool.group_id else _parts(members, grouping):
        since = [m.since for m in part if m.has_ended and m.since is not None and grouping.is_rewarded(m)]
        awaited = tuple(member.n for member in part if not member.has_ended)
        ended = len(part) - len(awaited)
        complete = late or not awaited if pool.group_id else ended >= grouping.size
        last = NO_END if pool.group_id else part[-1].n
        if since:
            yield Group(pool, len(since), ended, min(since), complete, after, last, awaited, late)
        after = last


def _parts(members: Sequence[Member], grouping: Grouping) -> list[list[Member]]:
    """Split rollouts that were opened one by one into groups. Leave out those that run too long."""
    first = next((member.opened_at for member in members if member.has_ended), float("inf"))
    parts = list[list[Member]]()
    for member in members:
        if member.has_ended or member.opened_at >= first - grouping.timeout_s:
            counts = not member.has_ended or grouping.is_rewarded(member)
            if not parts or (counts and len(parts[-1]) >= grouping.size):
                parts.append([])
            parts[-1].append(member)
    if grouping.timeout_s <= 0 and len(parts) > 1 and len(parts[-1]) < grouping.size:  # no others will come
        last = parts.pop()
        parts[-1] += last
    return parts
