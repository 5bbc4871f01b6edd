"""Has rewarders score completed rollouts before they are trained on. If several proxies run, only one does so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...core.config.root import Config
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError, LightningError, NotFound
from ...core.groups import Grouping, Member, formed
from ...core.json_text import dumps
from ...core.records import Reward
from ...proxy.api.views import rollout_detail
from ...store.database import Database, Transaction, read
from ...store.rewards import post_rewards
from ...store.store import Store
from ...store.waiting import IS_LATE, IS_OWN
from .config import JudgeConfig
from .model import Away, Json
from .rewarders import Function, Given, Judge, ModelRewarder, NextMessage, Rank, Rewarder, Rubric, together

log = logging.getLogger(__name__)
POLL_S = 0.25
GROUPS_POLL_S = 1.0
RETRY_S = 5.0
LOOK = 100  # rollouts in one look
SPOKEN_ABOUT = """
INSERT INTO rewarder_spoken (n, rewarder)
SELECT n, :rewarder FROM awaiting_rewards WHERE n = (SELECT n FROM rollouts WHERE rollout_id = :rollout_id)
ON CONFLICT DO NOTHING RETURNING n
"""
_ALL_SPOKE = """
(SELECT COUNT(*) FROM rewarder_spoken
 WHERE rewarder_spoken.n = awaiting_rewards.n
   AND rewarder IN (SELECT CAST(value AS TEXT) FROM json_each(:rewarders))) >= :count
"""
AWAITED_NO_MORE = f"""
DELETE FROM awaiting_rewards WHERE n = (SELECT n FROM rollouts WHERE rollout_id = :rollout_id) AND {_ALL_SPOKE}
"""
AWAITED_FOR_NOTHING = f"DELETE FROM awaiting_rewards WHERE {_ALL_SPOKE}"
NOT_SPOKEN = "NOT EXISTS (SELECT 1 FROM rewarder_spoken WHERE n = awaiting_rewards.n AND rewarder = :rewarder)"
STILL_TO_SPEAK = f"""
SELECT rollouts.rollout_id FROM awaiting_rewards CROSS JOIN rollouts ON rollouts.n = awaiting_rewards.n
WHERE {NOT_SPOKEN} ORDER BY awaiting_rewards.n LIMIT :limit
"""
POOLS_TO_SPEAK = f"""
SELECT DISTINCT mode, task_id, owner, group_id, CASE WHEN task_id IS NULL THEN rollout_id END AS lone
FROM awaiting_rewards CROSS JOIN rollouts ON rollouts.n = awaiting_rewards.n WHERE {NOT_SPOKEN}
"""
# As members of groups, whether or not they have rewards so far.
_SIBLING = f"""n, rollout_id, task_id, owner, group_id, status,
    created_at AS opened_at, {IS_OWN} AS own, TRUE AS scored, TRUE AS rewarded, ended_at AS since, {IS_LATE} AS late,
    EXISTS (SELECT 1 FROM awaiting_rewards WHERE n = rollouts.n)
        AND NOT EXISTS (SELECT 1 FROM rewarder_spoken WHERE n = rollouts.n AND rewarder = :rewarder) AS awaits"""
_OF_POOL = "WHERE mode = :mode AND owner IS :owner"
SIBLINGS_OF_GROUP = f"""SELECT {_SIBLING} FROM rollouts INDEXED BY rollouts_by_group {_OF_POOL}
    AND group_id = :group_id ORDER BY n"""
SIBLINGS_IN_ORDER = f"""SELECT {_SIBLING} FROM rollouts INDEXED BY rollouts_by_task {_OF_POOL} AND task_id = :task_id
    AND group_id IS NULL
    AND ((step IS NULL AND dropped IS NULL) OR n IN (SELECT n FROM awaiting_rewards)) ORDER BY n"""


KINDS = {"rank": Rank, "rubric": Rubric, "next_message": NextMessage, "judge": Judge}


def all_rewarders(config: Config, database: Database | None = None) -> list[Rewarder]:
    """Return all rewarders: `rewards.function`, each of `judge.use`, and the judge of calls if credit uses it."""
    functions = [] if config.rewards.function is None else [Function(config)]
    judges = config.section(JudgeConfig).judges(config)
    return [*functions, *(KINDS[entry.kind](name, entry, config, database) for name, entry in judges)]


async def check(config: Config) -> None:
    """Raise ConfigError if a rewarder cannot work, or if rewards with a name of their own have no weight."""
    found = all_rewarders(config)
    for rewarder in found:
        is_named = isinstance(rewarder, ModelRewarder) and (rewarder.config.name or len(found) > 1)
        if is_named and rewarder.name not in config.trainer.training_weights:
            name = rewarder.name
            raise ConfigError(f"judge.use: rewards named {name} have no weight; add one to trainer.reward_weights")
        try:
            await rewarder.check()
        except Away as error:
            raise ConfigError(f"{rewarder.label}: {error}") from None
        finally:
            await rewarder.close()


class Spoken:
    """Tracks which rollouts still await which of `rewarders` (all configured ones)."""

    def __init__(self, database: Database, rewarders: Sequence[str]) -> None:
        self._db = database
        self._all = {"rewarders": dumps([*rewarders]), "count": len(rewarders)}

    async def begin(self) -> None:
        """Release rollouts that await only rewarders that are no longer configured."""
        await self._db.commit([(AWAITED_FOR_NOTHING, [self._all])])

    async def missing(self, rewarder: str, limit: int) -> list[str]:
        rows = await self._db.all(STILL_TO_SPEAK, {"rewarder": rewarder, "limit": limit})
        return [row["rollout_id"] for row in rows]

    async def record(self, rewarder: str, given: Mapping[str, Sequence[Reward]]) -> list[Reward]:
        """Record and return the rewards of rollouts that still await the rewarder, and end their wait for it."""

        async def work(db: Transaction) -> list[Reward]:
            recorded: list[Reward] = []
            for rollout_id, rewards in given.items():
                about = {"rollout_id": rollout_id, "rewarder": rewarder, **self._all}
                if await db.all(SPOKEN_ABOUT, about):
                    recorded += rewards
                    await db.all(AWAITED_NO_MORE, about)
            await post_rewards(db, recorded)
            return recorded

        return await self._db.write(work)


class Scorer:
    """Scores rollouts, in the proxy's process. `on_recorded` is called with the number of rewards recorded."""

    def __init__(
        self, config: Config, store: Store, rewarders: Sequence[Rewarder], on_recorded: Callable[[int], None]
    ) -> None:
        self._trainer, self._store, self._rewarders = config.trainer, store, rewarders
        self._spoken = Spoken(store.database, [one.name for one in rewarders])
        self._on_recorded = on_recorded
        self._logged: set[str] = set()

    async def run(self) -> None:
        try:
            while True:
                await self._score_until_a_fault()
                await asyncio.sleep(RETRY_S)
        finally:
            for rewarder in self._rewarders:
                await rewarder.close()

    async def _score_until_a_fault(self) -> None:
        try:
            async with self._store.database.lock("scorer") as ours:
                if ours:
                    await self._spoken.begin()
                    async with asyncio.TaskGroup() as group:
                        for rewarder in self._rewarders:
                            group.create_task(self._ask(rewarder))
        except* (LightningError, OSError) as errors:
            log.warning("cannot score rollouts or record their rewards: %s", errors.exceptions[0])
        except* Exception as errors:
            log.error("rollouts cannot be scored: internal error", exc_info=errors.exceptions[0])

    async def _ask(self, rewarder: Rewarder) -> None:
        """Ask a rewarder for scores, for ever. While it cannot work, it is asked about only one group at a time."""
        failed, slots = 0, asyncio.Semaphore(rewarder.at_once)
        while True:
            try:
                while groups := await self._waiting(rewarder):
                    if failed:
                        groups = [groups[failed % len(groups)]]
                    await together(self._score(rewarder, group, slots) for group in groups)
                    failed = 0
                await asyncio.sleep(GROUPS_POLL_S if rewarder.in_groups else POLL_S)
            except Away as error:
                self._say_once(f"{rewarder.label}: {error}; rollouts wait for it")
                failed += 1
                await asyncio.sleep(RETRY_S)

    async def _waiting(self, rewarder: Rewarder) -> list[AwaitingGroup]:
        if rewarder.in_groups:
            return (await ready(self._store.database, self._trainer, rewarder.name, LOOK))[:LOOK]
        return [AwaitingGroup([one], {one}) for one in await self._spoken.missing(rewarder.name, LOOK)]

    async def _score(self, rewarder: Rewarder, group: AwaitingGroup, slots: asyncio.Semaphore) -> None:
        async with slots:
            answers: list[Given]
            try:
                answers = await rewarder.reward([await self._seen(rollout_id) for rollout_id in group.siblings])
            except NotFound:  # deleted meanwhile, and awaited no more
                return
            except (Away, LightningError, OSError):
                raise
            except Exception as error:  # what an agent sent holds up nobody else
                log.error("%s: internal error", rewarder.label, exc_info=error)
                answers = [f"internal error: {error!r}" for _ in group.siblings]
        rewards = dict[str, list[Reward]]()
        for rollout_id, given in zip(group.siblings, answers, strict=True):
            if rollout_id in group.awaiting:
                if isinstance(given, str):
                    log.warning("%s: no reward for rollout %s: %s", rewarder.label, rollout_id, given)
                rewards[rollout_id] = [] if isinstance(given, str) else given
        if recorded := await self._spoken.record(rewarder.name, rewards):
            self._on_recorded(len(recorded))
            if line := not_counted({one.name for one in recorded}, self._trainer):
                self._say_once(f"{rewarder.label}: {line}")

    async def _seen(self, rollout_id: str) -> Json:
        """The rollout as `GET /rollouts/{id}?requests=whole` returns it, without the fields that features add."""
        store = self._store
        rollout, calls = await store.rollouts.get(rollout_id), await store.calls.of(rollout_id)
        rewards, events = await store.rewards.of(rollout_id), await store.events.of(rollout_id)
        return await asyncio.to_thread(rollout_detail, rollout, calls, rewards, events)

    def _say_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            log.warning("%s", line)


def not_counted(names: set[str], config: TrainerConfig) -> str | None:
    """Return a warning, with a fix, if none of these reward names counts in training."""
    if not names or names & config.training_weights.keys():
        return None
    return (
        f"{' or '.join(sorted(names))} does not count in training, only {', '.join(config.reward_weights)} does; "
        "rename the function or rewarder, or add the name to trainer.reward_weights"
    )


class AwaitingGroup(NamedTuple):
    siblings: list[str]
    awaiting: set[str]


async def ready(database: Database, config: TrainerConfig, rewarder: str, most: int) -> list[AwaitingGroup]:
    """Return about `most` groups that await this rewarder and have ended, or have waited `group_timeout_s`."""
    found: list[AwaitingGroup] = []
    for pool in await database.all(POOLS_TO_SPEAK, {"rewarder": rewarder}):
        if len(found) >= most:
            break
        if pool["lone"] is not None:
            found.append(AwaitingGroup([pool["lone"]], {pool["lone"]}))
            continue
        statement = SIBLINGS_IN_ORDER if pool["group_id"] is None else SIBLINGS_OF_GROUP
        wanted = {name: pool[name] for name in ("mode", "task_id", "owner", "group_id")} | {"rewarder": rewarder}
        rows = await database.all(statement, wanted)
        foreign = [row["rollout_id"] for row in rows if row["awaits"] and not row["own"]]
        found += [AwaitingGroup([rollout_id], {rollout_id}) for rollout_id in foreign]
        for group in formed((read(Member, row) for row in rows), Grouping.of(config)):
            if not group.complete and time.time() - group.oldest < config.group_timeout_s:
                continue
            inside = [row for row in rows if row["own"] and group.after < row["n"] <= group.last]
            ended = [row for row in inside if row["status"] == "completed"]
            if awaiting := {row["rollout_id"] for row in ended if row["awaits"]}:
                found.append(AwaitingGroup([row["rollout_id"] for row in ended], awaiting))
    return found
