"""Asks the reward function about every completed rollout, and records its answers as rewards.

A completed rollout awaits its rewards in the store, where no training step takes it. After a kill, the next proxy asks
about it. One process of several does the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..config.root import Config
from ..control.views import rollout_detail
from ..errors import LightningError, NotFound
from ..json_text import encode_in_turns
from ..store.store import Store
from ..types import Reward
from .process import FunctionProcess, Judgement, NoReward, NotLoaded, source_of

log = logging.getLogger(__name__)

POLL_S = 0.25
RETRY_S = 5.0
LOOK = 100  # rollouts in one look


class Scorer:
    """Runs beside the proxy. `on_recorded` is called with the number of rewards that were recorded."""

    def __init__(self, config: Config, store: Store, on_recorded: Callable[[int], None]) -> None:
        self._config = config.rewards
        self._counted = config.trainer.reward_weights
        self._store = store
        self._on_recorded = on_recorded
        self._processes = [FunctionProcess(config.rewards) for _ in range(config.rewards.processes)]
        self._free: asyncio.Queue[FunctionProcess] = asyncio.Queue()
        for process in self._processes:
            self._free.put_nowait(process)
        self._logged: set[str] = set()

    async def run(self) -> None:
        """Score rollouts as they end, until cancelled. Return at once if there is no function."""
        if self._config.function is None:
            return
        try:
            while True:
                await self._score_until_a_fault()
                await asyncio.sleep(RETRY_S)
        finally:
            for process in self._processes:
                await process.close()

    async def _score_until_a_fault(self) -> None:
        changes = self._store.database.changes("rewards")
        try:
            async with self._store.database.alone("scorer") as alone:
                while alone:
                    await self._score_all()
                    await changes.wait(POLL_S)
        except* NotLoaded as errors:
            self._say_once(f"rewards.function: {errors.exceptions[0]}; rollouts wait for it")
        except* (LightningError, OSError) as errors:
            log.warning("rewards.function: its rewards cannot be recorded: %s", errors.exceptions[0])
        except* Exception as errors:
            log.error("rewards.function: internal error", exc_info=errors.exceptions[0])

    async def _score_all(self) -> None:
        """Ask about all rollouts that await it, some at once."""
        while rollouts := await self._store.endings.awaiting(LOOK):
            async with asyncio.TaskGroup() as group:
                for rollout_id in rollouts:
                    group.create_task(self._score(rollout_id))

    async def _score(self, rollout_id: str) -> None:
        process = await self._free.get()
        try:
            judgement = await process.ask(await self._seen(rollout_id))
        except NotFound:  # deleted meanwhile, and awaited no more
            return
        except NoReward as error:
            log.warning("rewards.function: no reward for rollout %s: %s", rollout_id, error)
            judgement = Judgement({}, "")
        finally:
            self._free.put_nowait(process)
        await self._record(rollout_id, judgement)

    async def _seen(self, rollout_id: str) -> bytes:
        """The function's input: the rollout as `GET /rollouts/{id}` returns it."""
        store = self._store
        rollout, calls = await store.rollouts.get(rollout_id), await store.calls.of(rollout_id)
        rewards, events = await store.rewards.of(rollout_id), await store.events.of(rollout_id)
        return await asyncio.to_thread(lambda: encode_in_turns(rollout_detail(rollout, calls, rewards, events)))

    async def _record(self, rollout_id: str, judgement: Judgement) -> None:
        source = source_of(self._config, judgement.version)
        rewards = [
            Reward(rollout_id, value, name=name, source=source, final=False) for name, value in judgement.values.items()
        ]
        if await self._store.endings.rewarded(rollout_id, rewards) and rewards:
            self._on_recorded(len(rewards))
            if not judgement.values.keys() & self._counted.keys():
                names, counted = " or ".join(judgement.values), ", ".join(self._counted)
                self._say_once(f"rewards.function: {names} does not count in training, only {counted} does: "
                               "name the function so, or add the name to trainer.reward_weights")  # fmt: skip

    def _say_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            log.warning("%s", line)
