"""Has a model score every call of a rollout before its group is compared, once (`trainer.credit: judge`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict

from ...core.config.root import Config
from ...core.records import ModelCall, Reward
from ...proxy.api.views import call_view
from ...store.store import Store
from ...trainer.credit.agents import TrainedAgents
from ...trainer.credit.strategies import strategy_of
from ...trainer.plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.waiting import JudgeError
from .config import JudgeConfig
from .kinds import JUDGE, Judge, require_model
from .rewarder import Away

log = logging.getLogger(__name__)


class StepJudge(Judge):
    """Scores calls of agents whose credit is a judge's. Its answers, and what it used, are in the store."""

    def __init__(self, whole: Config, store: Store) -> None:
        super().__init__(JUDGE, whole.section(JudgeConfig).calls.rewarder(), whole, store.database)
        self._agents, self._credit, self._store = TrainedAgents(whole.trainer.agents), whole.trainer.credit, store

    def wants(self, agent: str | None) -> bool:
        return self._agents.role(agent) is not None and strategy_of(agent, self._credit) == JUDGE

    async def missing(self, calls: Sequence[ModelCall], rewards: Sequence[Reward]) -> list[Reward]:
        """Score the calls of a rollout that this model has not scored yet; store and return the scores.

        Raise JudgeError. What was answered until then is not asked again.
        """
        rollout_id = calls[0].rollout_id if calls else ""
        seen = {"rollout_id": rollout_id, "calls": [*map(call_view, calls)], "rewards": [*map(asdict, rewards)]}
        try:
            (given,) = await self.reward([seen])
        except Away as error:
            raise JudgeError(str(error)) from None
        if given.error is not None:
            raise JudgeError(given.error)
        await self._store.rewards.post([*given.rewards], None, b"")
        return [*given.rewards]


class JudgePlugin(TrainerPlugin):
    """Has the calls scored whose credit is a judge's."""

    def check(self, run: Run) -> None:
        if JUDGE in self.config.trainer.credits.values():
            require_model(self.config.section(JudgeConfig).calls.rewarder(), self.config)

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        if JUDGE not in core.config.trainer.credits.values():
            yield TrainerHooks()
            return
        log.info("judge.calls: %s reads rollouts", core.config.section(JudgeConfig).calls.model)
        yield TrainerHooks(judge=StepJudge(core.config, core.store).missing)


plugin = JudgePlugin
