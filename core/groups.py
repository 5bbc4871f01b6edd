"""Which rollouts are siblings: the groups that a training step compares. Pure.

Rollouts that were opened together are a group, however they end. Rollouts of a task that were opened one by one are
groups in the order of their opening: with `size` 2, rollouts 1, 2, 3 and 4 of a task are the groups (1, 2) and (3, 4),
also if 1 and 3 are done first. A group is complete when all of it has ended; the rest is awaited for a limited time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .config.trainer import TrainerConfig

NO_END = 2**62


class Pool(NamedTuple):
    """Rollouts of which groups are made. `owner`: the key that sees only its own rollouts, if they are such a key's.

    `opened_with`: the first of those that were opened together. `group_id`: the group that a step compared before
    these ended, or before they were offered again. Without both, they were opened one by one.
    """

    task_id: str
    owner: str | None = None
    opened_with: int | None = None
    group_id: int | None = None


class Member(NamedTuple):
    """A rollout that no step has taken, the `n`th that was opened. Times are Unix times.

    `own`: the policy answered a call of it. `scored`: no reward function is still to be asked about it. `since`: when
    it had ended and was rewarded.
    """

    n: int
    task_id: str
    owner: str | None
    opened_with: int | None
    group_id: int | None
    status: str
    opened_at: float
    own: bool
    scored: bool
    rewarded: bool
    since: float | None

    @property
    def pool(self) -> Pool:
        return Pool(self.task_id, self.owner, None if self.group_id else self.opened_with, self.group_id)

    @property
    def has_ended(self) -> bool:
        """Return whether it ended, with its reward if it was completed."""
        return self.status != "running" and self.scored and (self.rewarded or self.status != "completed")


@dataclass(frozen=True, slots=True)
class Group:
    """The siblings of a group that no step has taken. `rewarded` of `ended` have a reward.

    `complete`: nobody need wait for others of it. `oldest`: since when the first waits for a step. Its rollouts are in
    `pool`, from after the `after`th to the `last`th that was opened; `awaited` of them have not ended, or await their
    reward. Without a pool: rollouts without a task, which are no siblings; only rewarded ones are counted.
    """

    pool: Pool | None
    rewarded: int
    ended: int
    oldest: float
    complete: bool = False
    first: int = 0
    after: int = 0
    last: int = NO_END
    awaited: tuple[int, ...] = ()

    @property
    def task_id(self) -> str | None:
        return None if self.pool is None else self.pool.task_id

    @property
    def owner(self) -> str | None:
        return None if self.pool is None else self.pool.owner

    @property
    def group_id(self) -> int | None:
        """Return the group that a step compared before; None for a new one."""
        return None if self.pool is None else self.pool.group_id


@dataclass(frozen=True, slots=True)
class Grouping:
    """How groups are made. `size`: of those that were opened one by one. `failed`: a failed rollout has a reward.

    `timeout_s`: how long others are waited for; a rollout that is still running is no sibling of one that was opened
    so much later.
    """

    size: int = NO_END
    failed: bool = False
    timeout_s: float = float("inf")

    @classmethod
    def of(cls, config: TrainerConfig) -> Grouping:
        return cls(config.group_size, config.failed_reward is not None, config.group_timeout_s)


def formed(members: Iterable[Member], grouping: Grouping) -> dict[Pool, list[Group]]:
    """Return the groups of each pool that has one: those with a rollout to train on."""
    pools: dict[Pool, list[Member]] = defaultdict(list)
    for member in members:
        if member.own:
            pools[member.pool].append(member)
    found = {pool: [*_groups(pool, sorted(own), grouping)] for pool, own in pools.items()}
    return {pool: groups for pool, groups in found.items() if groups}


def _groups(pool: Pool, members: Sequence[Member], grouping: Grouping) -> Iterator[Group]:
    one_by_one = pool.opened_with is None and pool.group_id is None
    after = 0
    for part in _parts(members, grouping) if one_by_one else [members]:
        ended = [member for member in part if member.has_ended]
        since = [m.since for m in ended if m.since is not None and _is_rewarded(m, grouping)]
        awaited = tuple(member.n for member in part if not member.has_ended)
        complete = len(ended) >= grouping.size if one_by_one else pool.group_id is not None or not awaited
        last = part[-1].n if one_by_one else NO_END
        if since:
            yield Group(pool, len(since), len(ended), min(since), complete, part[0].n, after, last, awaited)
        after = last


def _is_rewarded(member: Member, grouping: Grouping) -> bool:
    """Whether a rollout that has ended has a reward, or counts for something without one."""
    return member.status == "completed" or (member.status == "failed" and grouping.failed)


def _parts(members: Sequence[Member], grouping: Grouping) -> list[list[Member]]:
    """Rollouts that were opened one by one, as many as make a group in each part. Only the last may have fewer."""
    first = next((member.opened_at for member in members if member.has_ended), float("inf"))
    parts: list[list[Member]] = [[]]
    for member in members:
        if member.has_ended or member.opened_at >= first - grouping.timeout_s:
            if len(parts[-1]) >= grouping.size and not (member.has_ended and not _is_rewarded(member, grouping)):
                parts.append([])
            parts[-1].append(member)
    if grouping.timeout_s <= 0 and len(parts) > 1 and len(parts[-1]) < grouping.size:  # no others will come
        parts[-2:] = [[*parts[-2], *parts[-1]]]
    return [part for part in parts if part]
