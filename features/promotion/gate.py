"""The gate before new versions of the policy: weighs the rollouts of a test, and decides."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from ...core.config.root import Config
from ...core.errors import LightningError
from ...core.http import in_thread_if_large
from ...store.store import Store
from .config import PromotionConfig
from .metrics import metrics
from .promotions import Promotions
from .weigh import GateRules, Weighed, weigh

log = logging.getLogger(__name__)

LOOK_S = 1.0
PACE = 1_000  # rollouts that are read a second, at most: time that others take from a look must not put off the next
LOOK_ANYWAY_S = 10.0  # time alone settles rollouts without a reward
LARGE = 1_000  # bytes; a rollout is weighed like so many of JSON

NO_EVIDENCE = (
    "no rollout of its test is evidence: none was opened or rewarded with an admin's key, or one of "
    "`keys create NAME --evaluator` (docs/promotion.md)"
)


class Gate:
    """Decides about candidates by the rewards in the store. All its state is there: a restart changes nothing."""

    def __init__(self, config: Config, store: Store, tests: Promotions) -> None:
        self._store = store
        self._tests = tests
        self._rules = rules(config)
        self._read = 0  # rollouts of the newest look
        self._without_evidence: set[int] = set()  # tests without evidence, each logged once
        self._seen: tuple[int, tuple[Any, ...], float] = (0, (), 0.0)  # a test, its stamp, and until when it holds

    async def run(self) -> None:
        """Weigh new rollouts and decide until cancelled. One process of several does it."""
        while True:
            self._read = 0
            try:
                if await self._tests.under_way():
                    async with self._store.database.lock("gate") as ours:
                        if ours:
                            await self.look()
            except (LightningError, OSError) as error:  # the next look may succeed
                log.warning("candidates cannot be weighed now: %s", error)
            except Exception:  # without a gate the trainer would wait for ever
                log.exception("candidates cannot be weighed")
            await asyncio.sleep(max(LOOK_S, self._read / PACE))

    async def look(self) -> None:
        """Weigh the rollouts so far, and decide if they are enough."""
        test = await self._tests.under_way()
        if test is None:
            return
        now, stamp = time.time(), await self._tests.stamp(test)
        if self._seen[:2] == (test.n, stamp) and now < self._seen[2]:
            return
        rollouts = await self._tests.observed(test)
        self._read += len(rollouts)
        if not rollouts and test.n not in self._without_evidence and await self._tests.has_others(test):
            self._without_evidence.add(test.n)
            log.warning("policy version %d: %s", test.version, NO_EVIDENCE)
        weighed = await in_thread_if_large(LARGE * len(rollouts), partial(weigh, test, rollouts, self._rules, now))
        if weighed.outcome == "promoted" and await self._store.steps.collapse() is not None:
            # A new live version would lift the stop, which only a person may.
            weighed = Weighed(weighed.evidence | {"waits": "publication is stopped for a collapse"}, None, "")
        if weighed.outcome is None:
            await self._tests.found(test, weighed.evidence)
        elif await self._tests.decide(test, weighed.outcome, weighed.reason, weighed.evidence):
            what = "is live" if weighed.outcome == "promoted" else "is taken back"
            log.warning("policy version %d %s after its test: %s", test.version, what, weighed.reason)
        self._seen = test.n, stamp, now + LOOK_ANYWAY_S


def rules(config: Config) -> GateRules:
    """Return the rules of tests. Siblings are those of the trainer."""
    gate, trainer = config.section(PromotionConfig), config.trainer
    return GateRules(
        metrics=metrics(gate, trainer.reward_weights),
        level=gate.level,
        max_rollouts=gate.max_rollouts,
        reward_timeout_s=gate.reward_timeout_s,
        group_size=trainer.group_size,
        group_timeout_s=trainer.group_timeout_s,
    )
