"""The gate before new policy versions: splits new rollouts between candidate and live version, and decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from functools import partial
from time import monotonic
from typing import Any

from ..aside import aside
from ..config.root import Config
from ..errors import LightningError
from ..store.resources.promotions import Promotion
from ..store.store import Store
from ..types import PolicyVersion, RolloutName
from .metrics import metrics
from .sides import choose
from .weigh import Rules, Weighed, weigh

log = logging.getLogger(__name__)

LOOK_S = 1.0
REST = 10  # times as long as a look took: a test of thousands of rollouts takes a tenth of the store's reader at most
LOOK_ANYWAY_S = 10.0  # time alone settles rollouts without a reward
KEPT = 20_000  # rollouts whose version is in memory
LARGE = 1_000  # bytes; a rollout is weighed like so many of JSON


class Gate:
    """Decides about the candidate by the rewards in the store. All its state is there: a restart changes nothing."""

    def __init__(self, config: Config, store: Store) -> None:
        gate, trainer = config.policy.gate, config.trainer
        self._gate = gate
        self._store = store
        self._rules = Rules(
            metrics=metrics(gate.metrics, gate.reward_range, trainer.reward_weights),
            level=gate.level,
            max_rollouts=gate.max_rollouts,
            reward_timeout_s=gate.reward_timeout_s,
            group_size=trainer.group_size,
            group_timeout_s=trainer.group_timeout_s,
        )
        self._versions: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._seen: tuple[Any, ...] = ()
        self._look_again = 0.0

    async def choose(self, rollout: RolloutName, live: PolicyVersion) -> PolicyVersion:
        """Return the version that answers a rollout: the live one, or, from its first call on, the candidate."""
        trial = await self._store.promotions.now()
        if trial is None or trial.promotion.against != live.version or rollout.mode == "eval":
            return live
        test, key = trial.promotion, (trial.promotion.n, rollout.rollout_id)
        version = self._versions.get(key)
        if version is None:
            sides = partial(choose, test, group_size=self._rules.group_size, share=self._gate.share)
            version = await self._store.promotions.assign(test, rollout, self._gate.max_rollouts, sides)
            self._versions[key] = version
            if len(self._versions) > KEPT:
                self._versions.popitem(last=False)
        return trial.candidate if version == test.version else live

    async def run(self) -> None:
        """Weigh what comes until cancelled, and decide. One process of several does it."""
        while True:
            began = monotonic()
            try:
                if await self._store.promotions.now() is not None:
                    async with self._store.database.alone("gate") as alone:
                        if alone:
                            await self.look()
            except (LightningError, OSError) as error:  # the next look may succeed
                log.warning("the candidate cannot be weighed now: %s", error)
            except Exception:  # without a gate the trainer would wait for ever
                log.exception("the candidate cannot be weighed")
            await asyncio.sleep(max(LOOK_S, REST * (monotonic() - began)))

    async def look(self) -> None:
        """Weigh what there is, and decide if it is enough."""
        trial = await self._store.promotions.now()
        if trial is None:
            return
        test, now = trial.promotion, time.time()
        seen = (test.n, *await self._store.promotions.stamp(test))
        if seen == self._seen and now < self._look_again:
            return
        weighed = await self._weigh(test, now)
        if weighed.outcome is None:
            await self._store.promotions.found(test, weighed.evidence)
        elif await self._store.promotions.decide(test, weighed.outcome, weighed.reason, weighed.evidence):
            what = "is live" if weighed.outcome == "promoted" else "is taken back"
            log.warning("policy version %d %s after its test: %s", test.version, what, weighed.reason)
        self._seen, self._look_again = seen, now + LOOK_ANYWAY_S

    async def _weigh(self, test: Promotion, now: float) -> Weighed:
        rollouts = await self._store.promotions.observed(test)
        return await aside(LARGE * len(rollouts), partial(weigh, test, rollouts, self._rules, now))
