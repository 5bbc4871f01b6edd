"""Collects the batch of a step: finds ready groups, drops untrainable rollouts, compares and claims the rest."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from ...core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ...core.config.trainer import TrainerConfig
from ...core.errors import NotFound, UpstreamTimeout, UpstreamUnreachable
from ...core.groups import Group
from ...core.records import ModelCall, Rollout
from ...store.store import Store
from ...store.training import CallCredit
from ...store.waiting import EQUAL_REWARDS
from ..credit.agents import RollCall, TrainedAgents
from ..credit.air import air_rewards
from ..credit.strategies import Credited, group_credit, training_rules
from ..plugins import NO_HOOKS, TrainerHooks
from ..report.batch_metrics import Seen, sample_metrics, staleness_metrics
from ..rows.samples import RolloutSamples, rollout_samples
from ..types import Batch, RolloutRewards, Sample, Sibling, Sifted
from .groups import STANDS_S, Order, WaitingGroups
from .sampled import Sampled

log = logging.getLogger(__name__)
STANDSTILL = "standstill"
ABSURD = 1e12  # no advantage or return is larger; NaN is not smaller
POISONED = f"returns or advantages of the group are not finite, or beyond {ABSURD:g}"
UNVERIFIED = "answered by a policy version that was not verified"
STALE = "stale: sampled by too old a policy version"
# Earlier rollouts that one without siblings is compared with: fewer say too little of what is usual.
MIN_EARLIER, RUNNING_WINDOW = 4, 32


class Collector:
    """Finds groups that are ready and claims them for a step. `next_batch` leads from groups to rows:

    1. `_read` reads a group's rollouts, and `_trainable` drops those that cannot be trained on
    2. `_compare` turns their rewards into advantages (`credit/`)
    3. `_take_rollout` joins the calls of each into rows (`rows/`)
    4. `_claim` assigns the rollouts to the step; `_drop` discards groups that teach nothing
    """

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        order: Order | None = None,
        policy: PolicyConfig | None = None,
        vocabulary: int | None = None,
        sampled: Sampled | None = None,
        hooks: TrainerHooks = NO_HOOKS,
    ) -> None:
        """`policy` says which agents have their own adapters; `vocabulary` is the number of the model's tokens.

        `sampled` says how calls were sampled; by default, it only reads their requests.
        """
        policy = policy or PolicyConfig()
        self._config, self._store, self._guide = config, store, hooks.guide
        self._adapter_of, self._vocabulary = policy.adapter_of, vocabulary
        self._sampled, self._sift = sampled or Sampled(), hooks.sift or Sifted
        self._failed_has_reward = config.failed_reward is not None
        self._rules, self._agents = training_rules(config), TrainedAgents(config.agents)
        own = [agent for agents in policy.adapters.values() for agent in agents]
        credited = [agent for agent in config.credits if agent != "*"]
        self._roll_call = RollCall(self._agents, {"trainer.credit": credited, "policy.adapters": own})
        self.waiting = WaitingGroups(config, store, order)
        self._seen = Seen()
        self._unverified: frozenset[int] = frozenset()  # versions that will not be
        self._logged: set[str] = set()  # why nothing was learned, since the last step
        self._unrewarded: str | None = None  # rollouts without a reward that counts, at the last look
        self._looks_at = 0.0

    async def next_batch(self, base: int, *, fewer: bool = False, since: float | None = None) -> Batch | None:
        """Claim the rollouts of the next step, which starts from version `base`. Returns None while there are too few.

        A step takes `tasks_per_step` groups. It takes fewer with `fewer`, or once the first one has waited for
        `group_timeout_s`. With `since` (Unix time), only groups that have waited since then are taken. Raises
        UpstreamUnreachable or UpstreamTimeout, and claims nothing, if a grammar is needed and vLLM is down.
        """
        while groups := await self.waiting.next(fewer=fewer, since=since):
            self._unverified = await self._store.versions.never_verified()
            takes = [await self._read(group, base) for group in groups]
            if self._config.compare == "step":
                takes = [self._across_tasks(takes)]
            for take in takes:
                for comparison in take.comparisons:
                    await self._compare(take, comparison)
            idle = [take for take in takes if not take.rollouts]
            if len(idle) == len(takes) or (idle and self._config.dynamic_sampling):
                await self._drop(together(idle))  # others may take their place
            else:
                return await self._claim(together(takes))
        return None

    async def _read(self, group: Group, base: int) -> Take:
        """Read a group. Its siblings are one comparison; each rollout without a task is a comparison of its own.

        Siblings that earlier steps took (`before`) count in the baseline, and are not trained on again.
        """
        take, waiting = Take(base, [group]), self._store.waiting
        if group.task_id is None:
            limit = self._config.rollouts_per_step
            lone = await self._trainable(take, await waiting.lone_rollouts(limit, self._failed_has_reward))
            owners = await waiting.owners(member.rollout.rollout_id for member in lone)
            take.comparisons = [ComparedRollouts([one], [], owners.get(one.rollout.rollout_id)) for one in lone]
            return take
        siblings, awaited, before = await waiting.siblings(group)
        take.counts["groups"] += 1
        take.counts["groups_incomplete"] += not group.complete
        ids = [rollout.rollout_id for rollout in (*siblings, *awaited)]
        take.groups += [ids] if siblings else []
        members = await self._trainable(take, siblings)
        known = [s for _, s in await self._rewarded(before) if self._unfit(s.calls, base) in (None, STALE)]
        take.comparisons = [ComparedRollouts(members, known, group.pool and group.pool.owner)]
        return take

    async def _trainable(self, take: Take, rollouts: Sequence[Rollout]) -> list[TrainableRollout]:
        """The ended rollouts that can be trained on. The others are dropped with a reason. `take` counts both."""
        take.drop("failed or discarded", [rollout for rollout in rollouts if not self._counts(rollout)])
        members = await self._rewarded(rollouts)
        self._roll_call.look(member.sibling.calls for member in members)
        await self._sampled.look(call for member in members for call in self._trained(member.sibling.calls))
        found = []
        for rollout, sibling in members:
            if reason := self._unfit(sibling.calls, take.base):
                take.counts["rollouts_stale"] += reason == STALE
                take.drop(reason, [rollout])
            else:
                found.append(TrainableRollout(rollout, sibling))
                take.counts["rollouts_failed"] += rollout.status == "failed"
                take.seen.reward(rollout.task_id, rollout.reward)
                took_part = {self._adapter_of(call.agent) for call in self._trained(sibling.calls)}
                take.compared += 1
                take.compared_by_adapter.update(took_part or {DEFAULT_ADAPTER})
        return found

    async def _rewarded(self, rollouts: Sequence[Rollout]) -> list[TrainableRollout]:
        counted = [rollout for rollout in rollouts if self._counts(rollout) and rollout.reward is not None]
        return [TrainableRollout(rollout, s) for rollout in counted if (s := await self._sibling(rollout))]

    async def _sibling(self, rollout: Rollout) -> Sibling | None:
        """The rollout with its stored and automatic rewards; None if it has been deleted."""
        with suppress(NotFound):
            posted = await self._store.rewards.of(rollout.rollout_id)
            sifted = self._sift(await self._store.calls.of(rollout.rollout_id))
            rewards = RolloutRewards.counted(posted, self._rules, rollout.status)
            return Sibling(sifted.calls, replace(rewards, air=air_rewards(sifted.calls, self._config.air)), sifted)
        return None

    async def _earlier(self, rollout: Rollout, known: dict[str, Sibling | None]) -> list[Sibling]:
        """The running baseline: earlier rewarded rollouts, from the same task if it has enough, else from all tasks.

        There are at most RUNNING_WINDOW, or none if fewer than MIN_EARLIER are found. They come from the store, so a
        restart changes nothing. `known` caches the rollouts that were read.
        """
        for task_id in dict.fromkeys((rollout.task_id, None)):
            found = await self._store.waiting.earlier(
                rollout.rollout_id, task_id, RUNNING_WINDOW, self._failed_has_reward
            )
            for missing in (r for r in found if r.rollout_id not in known):
                known[missing.rollout_id] = await self._sibling(missing)
            if len(siblings := [s for r in found if (s := known[r.rollout_id])]) >= MIN_EARLIER:
                return siblings
        return []

    async def _compare(self, take: Take, comparison: ComparedRollouts) -> None:
        """Compare the members (if so configured, a lone one with earlier rollouts), and take or drop each of them."""
        members, known, _ = comparison
        if len(members) == 1 and not known and self._config.lone_rollouts == "running":
            known = await self._earlier(members[0].rollout, take.earlier)
            take.counts["rollouts_lone"] += 1
        group = [*(member.sibling for member in members), *known]
        credit = group_credit(group, self._config)
        nothing = None  # why nothing can be learned
        if not all(abs(value) <= ABSURD for of_calls in credit for one in of_calls for value in one or ()):
            nothing = POISONED
            ids = ", ".join(member.rollout.rollout_id for member in members)
            log.warning("rollouts %s are not trained on: %s", ids, POISONED)
        elif not any(one and one.advantage for of_calls in credit[: len(members)] for one in of_calls):
            take.counts["groups_equal"] += len(group) > 1
            nothing = None if self._guide else _why_nothing(group, self._agents)
        for member, of_calls in zip(members, credit, strict=False):
            if nothing is None or (nothing != POISONED and self._config.context_loss is not None):
                self._take_rollout(take, member, of_calls, nothing)
            else:
                take.drop(nothing, [member.rollout])

    def _take_rollout(
        self, take: Take, member: TrainableRollout, credit: Sequence[Credited | None], nothing: str | None
    ) -> None:
        """Add a rollout's rows to the step, or drop the rollout. `nothing`: why its rewards teach nothing, or None."""
        rollout, calls = member.rollout, member.sibling.calls
        taught = [(call, one) for call, one in zip(calls, credit, strict=True) if one is not None]
        try:
            made = self._rows([call for call, _ in taught], [one.advantage for _, one in taught], rollout)
        except (ValueError, OverflowError) as error:
            reason = f"its rows cannot be built ({error})"
            log.warning("rollout %s is not trained on: %s", rollout.rollout_id, reason)
            take.drop(reason, [rollout])
            return
        if nothing and not any(sample.results for sample in made.samples):
            take.drop(nothing, [rollout])
            return
        take.counts["calls_of_others"] += len(calls) - len(self._trained(calls))
        take.counts.update(member.sibling.sifted.counts)
        take.counts.update(made.counts)
        not_followed = Counter(why for call, _ in taught if (why := self._sampled.why_not(call)))
        take.seen.not_followed += not_followed
        if not made.samples:
            take.drop(_why_no_rows(made.counts, not_followed), [rollout])
            return
        take.samples += made.samples
        take.rollouts.append(rollout)
        take.credit += [
            CallCredit(rollout.rollout_id, call.seq, *one, *placement)
            for (call, one), placement in zip(taught, made.placements, strict=True)
        ]
        take.staleness.append(max(0, take.base - _oldest_version([call for call, _ in taught], take.base)))

    def _rows(self, calls: Sequence[ModelCall], advantages: Sequence[float], rollout: Rollout) -> RolloutSamples:
        return rollout_samples(
            calls,
            advantages,
            task_id=rollout.task_id or rollout.rollout_id,
            max_tokens=self._config.max_sample_tokens or sys.maxsize,
            vocabulary=self._vocabulary,
            adapter_of=self._adapter_of,
            sampled=self._sampled.of,
        )

    async def _claim(self, take: Take) -> Batch:
        self._seen.add(take.seen)
        seen, self._seen = self._seen, Seen()
        self._logged.clear()
        rollout_ids = tuple(rollout.rollout_id for rollout in take.rollouts)
        step = await self._store.steps.claim(rollout_ids, take.base, take.dropped, take.groups, take.credit)
        self.waiting.forget(take.waiting)
        return Batch(
            step=step,
            samples=tuple(take.samples),
            rollout_ids=rollout_ids,
            metrics={
                **seen.metrics(),
                "groups_trained": float(sum(not {*rollout_ids}.isdisjoint(one) for one in take.groups)),
                "rollouts_trained": float(len(rollout_ids)),
                **staleness_metrics(take.staleness),
                **sample_metrics(take.samples),
            },
            compared=take.compared,
            compared_by_adapter=take.compared_by_adapter,
            tasks=seen.tasks(),
            left_out=seen.left_out(),
        )

    async def _drop(self, take: Take) -> None:
        """Drop groups that nothing can be learned from. The next step's metrics count them."""
        self._seen.add(take.seen)
        await self._store.steps.drop(take.dropped, take.groups)
        self.waiting.forget(take.waiting)
        if new := take.dropped.keys() - self._logged:
            self._logged |= new
            reasons = ", ".join(f"{reason} ({len(ids)})" for reason, ids in take.dropped.items() if ids)
            rewards = [reward for of_task in take.seen.rewards.values() for reward in of_task]
            mean = f" of mean reward {fmean(rewards):.3g}" if rewards else ""
            dropped = take.counts["rollouts_dropped"]
            log.warning("nothing can be learned from %d rollouts%s: %s", dropped, mean, reasons)
        found = await self._store.waiting.standstill(self._config.rollouts_per_step)
        if found is not None and STANDSTILL not in self._logged:
            self._logged.add(STANDSTILL)
            log.warning("%s", found.story)

    async def why_no_step(self) -> str | None:
        """Return what the next step lacks, other rollouts or rewards; None if no rollout has waited for minutes."""
        if (why := self.waiting.why_none()) is not None:
            return why
        if (now := time.time()) >= self._looks_at:
            self._looks_at = now + STANDS_S
            newest, _ = await self._store.rollouts.page({"mode": "train"}, 200)
            ended = [r for r in newest if r.ended_at is not None and r.ended_at <= now - STANDS_S]
            count, names = await self._store.waiting.unrewarded(ended)
            came = (
                f"the rewards that came have other names: {', '.join(names)}"
                if names
                else "none came, or a reward function failed"
            )
            self._unrewarded = f"{count} completed rollouts have no reward that counts ({came})" if count else None
        return self._unrewarded

    async def samples_of(self, rollouts: Sequence[Rollout]) -> list[Sample]:
        """Return the rollouts' rows, with advantages of 0. While vLLM is down, sampling is read from requests alone."""
        found: list[Sample] = []
        for rollout in rollouts:
            with suppress(NotFound):  # deleted meanwhile
                calls = self._trained(await self._store.calls.of(rollout.rollout_id))
                with suppress(UpstreamUnreachable, UpstreamTimeout):
                    await self._sampled.look(calls)
                found += self._rows(calls, [0.0] * len(calls), rollout).samples
        return found

    def _across_tasks(self, takes: Sequence[Take]) -> Take:
        """Join the takes, so that an owner's rollouts are compared across tasks."""
        joined = together(takes)
        parts: dict[tuple[str | None, int], ComparedRollouts] = {}
        for take, group in zip(takes, joined.waiting, strict=True):
            are_compared = group.task_id is not None or self._config.lone_rollouts == "running"
            for one in take.comparisons:
                key = one.owner, 0 if are_compared else id(one)
                part = parts.setdefault(key, ComparedRollouts([], [], one.owner))
                part.members.extend(one.members)
                part.known.extend(one.known)
        joined.comparisons = [*parts.values()]
        return joined

    def _counts(self, rollout: Rollout) -> bool:
        """Whether a rollout with this status may have a reward."""
        return rollout.status == "completed" or (self._failed_has_reward and rollout.status == "failed")

    def _unfit(self, calls: Sequence[ModelCall], base: int) -> str | None:
        """Why a rollout with these calls cannot be trained on; None if it can."""
        trained = self._trained(calls)
        if calls and not trained:
            return "trainer.agents names none of its agents"
        if calls and all(call.policy_version is None for call in calls):
            return "answered by other models than the policy"
        if not self._unverified.isdisjoint(version for call in calls for version in call.policy_versions):
            return UNVERIFIED
        return STALE if base - _oldest_version(trained, base) > self._config.max_staleness else None

    def _trained(self, calls: Sequence[ModelCall]) -> list[ModelCall]:
        """The calls of the agents that are trained."""
        return [call for call in calls if self._agents.role(call.agent) is not None]


def _why_no_rows(counts: Counter[str], not_followed: Counter[str]) -> str:
    """A reason why a rollout with advantages has nothing to train on; others may apply as well."""
    if not_followed:
        return f"no trainable calls; the most common reason is this: {not_followed.most_common(1)[0][0]}"
    reasons = {
        "rows_too_long": "longer than trainer.max_sample_tokens or the model's context",
        "calls_other_tokens": "another model sampled tokens that this model does not have",
        "calls_ambiguous": "a call has several answers, so it is not known which one earned the reward",
    }
    return next((reason for count, reason in reasons.items() if counts[count]), "no trainable calls")


def _why_nothing(group: Sequence[Sibling], agents: TrainedAgents) -> str:
    """Why a group has no advantages, so that there is nothing to learn from it."""
    if len(group) < 2:
        return "no siblings"
    took_part = Counter(role for s in group for role in {agents.role(c.agent) for c in s.calls if c.is_decision})
    if agents.named and max((n for role, n in took_part.items() if role), default=0) == 1:
        return "no siblings with calls of the same agent"
    return EQUAL_REWARDS if any(s.calls for s in group) else "no trainable calls"


def _oldest_version(calls: Sequence[ModelCall], base: int) -> int:
    return min((c.policy_version for c in calls if c.trainable and c.policy_version is not None), default=base)


class TrainableRollout(NamedTuple):
    rollout: Rollout
    sibling: Sibling


class ComparedRollouts(NamedTuple):
    """Rollouts that are compared with each other. Those in `known` count in the baseline only.

    `owner`: the key that opened all of them, if that key sees only its own rollouts.
    """

    members: list[TrainableRollout]
    known: list[Sibling]
    owner: str | None


@dataclass(slots=True)
class Take:
    """What a step takes from the groups that are `waiting` for it, and how their rollouts are compared.

    `base`: the policy version that the step starts from. `groups`: the ids of each group's siblings, including awaited
    ones. `seen`: what the step's metrics count. `earlier`: rollouts that were read for a running baseline.
    """

    base: int
    waiting: list[Group] = field(default_factory=list)
    comparisons: list[ComparedRollouts] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    credit: list[CallCredit] = field(default_factory=list)
    compared: int = 0  # rollouts, the loss's divisor
    compared_by_adapter: Counter[str] = field(default_factory=Counter)
    seen: Seen = field(default_factory=Seen)
    earlier: dict[str, Sibling | None] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        return self.seen.counts

    def drop(self, reason: str, rollouts: Sequence[Rollout]) -> None:
        self.dropped.setdefault(reason, []).extend(rollout.rollout_id for rollout in rollouts)
        self.counts["rollouts_dropped"] += len(rollouts)


def together(takes: Sequence[Take]) -> Take:
    """Join takes (at least one) into one, without their comparisons."""
    joined = Take(takes[0].base)
    for take in takes:
        for name in ("waiting", "samples", "rollouts", "staleness", "groups", "credit"):
            getattr(joined, name).extend(getattr(take, name))
        joined.compared += take.compared
        joined.compared_by_adapter += take.compared_by_adapter
        joined.seen.add(take.seen)
        for reason, rollout_ids in take.dropped.items():
            joined.dropped.setdefault(reason, []).extend(rollout_ids)
    return joined
