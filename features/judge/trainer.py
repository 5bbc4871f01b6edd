"""Has an LLM score every call of a rollout before its group is compared, once (`trainer.credit: judge`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ...core.config.root import Config
from ...core.prices import require_litellm
from ...core.records import ModelCall, Reward
from ...proxy.api.views import call_view
from ...store.store import Store
from ...trainer.credit.agents import TrainedAgents
from ...trainer.credit.strategies import JUDGE, strategy_of
from ...trainer.plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.waiting import JudgeError, all_of
from .config import BudgetConfig, JudgeConfig, RewarderConfig
from .judge import Judge, transcript
from .kinds import without_secrets
from .rewarder import Away
from .table import StoredAnswers

log = logging.getLogger(__name__)


class StepJudge:
    """Asks the judge for scores of the calls that it has not scored yet, of agents whose credit is its own."""

    def __init__(self, whole: Config, store: Store) -> None:
        config, judge = whole.trainer, whole.section(JudgeConfig).calls
        spent = StoredAnswers(store.database, JUDGE, RewarderConfig(kind="judge"), BudgetConfig())
        self._judge = Judge(judge, answers=spent)
        self._model = judge.model
        self._agents = TrainedAgents(config.agents)
        self._credit = config.credit
        self._store, self._clean = store, without_secrets(whole)

    async def missing(self, calls: Sequence[ModelCall], rewards: Sequence[Reward]) -> list[Reward]:
        """Score the calls of a rollout that this model has not scored yet; store and return the scores.

        Raises JudgeError. The scores until then are stored.
        """
        known = {r.call_id for r in rewards if r.name == JUDGE and r.source == self._model}
        steps = [call for call in calls if call.is_decision]
        wanted = [
            (i, call) for i, call in enumerate(steps) if call.call_id not in known and self._is_judged(call.agent)
        ]
        shown = transcript([call_view(call) for call in steps], self._clean) if wanted else ""
        try:
            return await all_of(self._score(call, i, shown) for i, call in wanted)
        except Away as error:
            raise JudgeError(str(error)) from None

    def _is_judged(self, agent: str | None) -> bool:
        return self._agents.role(agent) is not None and strategy_of(agent, self._credit) == JUDGE

    async def _score(self, call: ModelCall, step: int, shown: str) -> Reward:
        score = await self._judge.score(shown, step)
        reward = Reward(
            call.rollout_id, score.value, call.call_id, name=JUDGE, source=self._model, comment=score.comment,
            final=False,
        )  # fmt: skip
        await self._store.rewards.post([reward], None, b"")
        return reward


class JudgePlugin(TrainerPlugin):
    """Has the calls scored whose credit is a judge's."""

    def check(self, run: Run) -> None:
        if "judge" in self.config.trainer.credits.values():
            require_litellm("judge.calls")

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        if "judge" not in core.config.trainer.credits.values():
            yield TrainerHooks()
            return
        log.info("judge.calls: %s reads rollouts", core.config.section(JudgeConfig).calls.model)
        yield TrainerHooks(judge=StepJudge(core.config, core.store).missing)


plugin = JudgePlugin
