"""Splits the rollouts that begin during a test between the candidate and the live version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

from ...core.config.root import Config
from ...core.records import PolicyVersion, RolloutName
from ...serving.swap import Placed
from .config import PromotionConfig
from .promotions import Promotions
from .sides import choose

KEPT = 20_000  # rollouts whose version is in memory


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
