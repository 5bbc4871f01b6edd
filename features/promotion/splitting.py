"""Splits the rollouts that begin during a test between the candidate and the live version.

Which one a rollout gets follows from its place alone, so every process decides the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b

from ...core.config.root import Config
from ...core.records import PolicyVersion, RolloutName
from ...serving.swap import Placed
from .config import PromotionConfig
from .promotions import Assigned, Promotion, Promotions

KEPT = 20_000  # rollouts whose version is in memory
LONE = 2  # rollouts without a task are compared in pairs


class PolicySplit:
    """Chooses the version of the policy that answers a rollout."""

    def __init__(self, config: Config, tests: Promotions) -> None:
        self._gate, self._group_size = config.section(PromotionConfig), config.trainer.group_size
        self._tests = tests
        self._versions: OrderedDict[str, tuple[int, int]] = OrderedDict()  # test and version, by rollout

    async def __call__(self, rollout: RolloutName, live: PolicyVersion) -> PolicyVersion:
        """Return the version that answers a rollout: the live one, or, from its first call on, the candidate."""
        trial = await self._tests.now()
        if trial is None or trial.promotion.against != live.version or rollout.mode == "eval":
            return live
        test = trial.promotion
        n, version = self._versions.get(rollout.rollout_id, (None, live.version))
        if n != test.n:
            sides = partial(choose, test, group_size=self._group_size, share=self._gate.share)
            version = await self._tests.assign(test, rollout, self._gate.max_rollouts, sides)
            self._versions[rollout.rollout_id] = test.n, version
            if len(self._versions) > KEPT:
                self._versions.popitem(last=False)
        return trial.candidate if version == test.version else live

    def forget(self, rollout_id: str) -> None:
        """Drop the version of a deleted rollout. A new one of the same name is split anew."""
        self._versions.pop(rollout_id, None)


def candidates_server(config: Config, tests: Promotions) -> Placed:
    """Return a hook that knows whether the policy's last server has the candidate's merged weights."""
    upstream = config.policy_upstream

    async def placed() -> Mapping[str, PolicyVersion]:
        candidate = await tests.candidate()
        return {} if candidate is None or upstream is None else {upstream.published_to[-1]: candidate}

    return placed


def group_of(place: int, task_id: str | None, group_size: int) -> int:
    """Return the number of a rollout's group among those of its task: each so many in order of opening are siblings."""
    return place // (LONE if task_id is None else group_size)


def choose(promotion: Promotion, task_id: str | None, place: int, group_size: int, share: float) -> Assigned:
    """Return the version for the rollout at a place, from 0, among those of its task (None: of no task).

    A group is compared entirely or not at all. In it, one of each two rollouts in a row goes to each version; which
    one comes first is drawn by a hash (permuted blocks of two), so order says nothing.
    """
    group = group_of(place, task_id, group_size)
    if _drawn(promotion.n, task_id, "group", group) >= 2 * share:
        return Assigned(place, promotion.against, compared=False)
    within = place - group * (LONE if task_id is None else group_size)
    candidate_first = _drawn(promotion.n, task_id, "pair", group, within // 2) < 0.5
    is_candidate = (within % 2 == 0) == candidate_first
    return Assigned(place, promotion.version if is_candidate else promotion.against, compared=True)


def _drawn(*what: object) -> float:
    """A number in [0, 1) that is always the same for the same."""
    digest = blake2b("\n".join(map(repr, what)).encode(), digest_size=7).digest()
    return int.from_bytes(digest) / 256**7
