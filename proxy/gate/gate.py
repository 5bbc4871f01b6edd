"""The gate before new versions, of the policy or of prompts: weighs the rollouts of each test, and decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic

from ..aside import aside
from ..config.trainer import TrainerConfig
from ..errors import LightningError
from ..store.database import Database
from .config import GateConfig
from .metrics import metrics
from .table import GateTests, Test
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


async def never() -> str | None:
    """Return None: nothing keeps a candidate from going live."""
    return None


class Gate(Generic[Test]):
    """Decides about candidates by the rewards in the store. All its state is there: a restart changes nothing."""

    def __init__(
        self,
        name: str,
        tests: GateTests[Test],
        database: Database,
        rules: GateRules,
        waits_for: Callable[[], Awaitable[str | None]] = never,
    ) -> None:
        """`name`: of the lock by which one of several processes decides. `waits_for`: why nothing may go live now."""
        self._waits_for = waits_for
        self._name = name
        self._tests = tests
        self._database = database
        self._rules = rules
        self._read = 0  # rollouts of the newest look
        self._without_evidence: set[int] = set()  # tests without evidence, each logged once
        self._seen: dict[
            int, tuple[tuple[Any, ...], float]
        ] = {}  # by test: the stamp that was weighed, and until when it holds

    async def run(self) -> None:
        """Weigh new rollouts and decide until cancelled. One process of several does it."""
        while True:
            self._read = 0
            try:
                if await self._tests.under_way():
                    async with self._database.alone(self._name) as alone:
                        if alone:
                            await self.look()
            except (LightningError, OSError) as error:  # the next look may succeed
                log.warning("candidates cannot be weighed now: %s", error)
            except Exception:  # without a gate the trainer would wait for ever
                log.exception("candidates cannot be weighed")
            await asyncio.sleep(max(LOOK_S, self._read / PACE))

    async def look(self) -> None:
        """Weigh the rollouts so far, and decide if they are enough."""
        tests = await self._tests.under_way()
        self._seen = {test.n: self._seen[test.n] for test in tests if test.n in self._seen}
        for test in tests:
            try:
                await self._look_at(test)
            except (LightningError, OSError):
                raise
            except Exception:  # other tests continue
                log.exception("%s cannot be weighed", test.candidate)

    async def _look_at(self, test: Test) -> None:
        now, stamp = time.time(), await self._tests.stamp(test)
        seen, until = self._seen.get(test.n, ((), 0.0))
        if stamp == seen and now < until:
            return
        rollouts = await self._tests.observed(test)
        self._read += len(rollouts)
        if not rollouts and test.n not in self._without_evidence and await self._tests.has_others(test):
            self._without_evidence.add(test.n)
            log.warning("%s: %s", test.candidate, NO_EVIDENCE)
        weighed = await aside(LARGE * len(rollouts), partial(weigh, test, rollouts, self._rules, now))
        if weighed.outcome == "promoted" and (waits := await self._waits_for()) is not None:
            weighed = Weighed(weighed.evidence | {"waits": waits}, None, "")
        if weighed.outcome is None:
            await self._tests.found(test, weighed.evidence)
        elif await self._tests.decide(test, weighed.outcome, weighed.reason, weighed.evidence):
            what = "is live" if weighed.outcome == "promoted" else "is taken back"
            log.warning("%s %s after its test: %s", test.candidate, what, weighed.reason)
        self._seen[test.n] = stamp, now + LOOK_ANYWAY_S


def rules(gate: GateConfig, trainer: TrainerConfig) -> GateRules:
    """Return the rules of tests, of the policy or of prompts, by `gate`. Siblings are those of the trainer."""
    return GateRules(
        metrics=metrics(gate, trainer.reward_weights),
        level=gate.level,
        max_rollouts=gate.max_rollouts,
        reward_timeout_s=gate.reward_timeout_s,
        group_size=trainer.group_size,
        group_timeout_s=trainer.group_timeout_s,
    )
