"""The judge of calls: a model scores every call of a rollout before its group is compared (`trainer.credit: judge`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ...core.config.root import Config
from ...core.records import ModelCall, Reward
from ...proxy.api.views import call_view
from ...proxy.dialects.transcript import chat_turns
from ...store.store import Store
from ...trainer.credit.agents import TrainedAgents
from ...trainer.credit.strategies import JUDGE, strategy_of
from ...trainer.plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.waiting import JudgeError
from .config import JudgeConfig
from .model import (
    Away,
    Json,
    JudgeModel,
    NoReward,
    decisions,
    fenced,
    mark_for,
    require_model,
    shown_message,
    written,
)
from .rewarders import together

log = logging.getLogger(__name__)
MAX_STEP = 4000  # characters of a step that the judge is shown
UNDECIDED = 0.5
OF_TEN = {str(i): i / 10 for i in range(11)}
SYSTEM = """You read the steps of an agent that works on a task: what it saw last, and what it answered. {data}
Judge how much one of the steps helped the task on. Say why in a few words. Answer with a whole number from 0 (it did \
harm) over 5 (neither) to 10 (it was just what was needed)."""


class StepJudge:
    """Scores calls of agents with a judge's credit. Its answers, and what it used, are in the store."""

    def __init__(self, whole: Config, store: Store) -> None:
        self._source, self._store = whole.section(JudgeConfig).calls.model, store
        self._model = JudgeModel(JUDGE, whole.section(JudgeConfig).calls, whole, store.database)
        self._agents, self._credit = TrainedAgents(whole.trainer.agents), whole.trainer.credit

    async def missing(self, calls: Sequence[ModelCall], rewards: Sequence[Reward]) -> list[Reward]:
        """Score the calls of a rollout that this model has not scored yet; store and return the scores.

        Raise JudgeError. What was answered until then is not asked again.
        """
        known = {one.call_id for one in rewards if (one.name, one.source) == (JUDGE, self._source)}
        steps = decisions({"calls": [*map(call_view, calls)]})
        wanted = [i for i, call in enumerate(steps) if call["call_id"] not in known and self._wants(call["agent"])]
        if not wanted:
            return []
        mark, shown = await asyncio.to_thread(transcript, steps, self._model.clean)

        async def score(i: int) -> Reward:
            rollout_id = calls[0].rollout_id
            try:
                said, why = await self._model.choose(SYSTEM, mark, question(shown, i), OF_TEN, [rollout_id])
                value = OF_TEN[said]
            except NoReward as error:
                value, why = UNDECIDED, f"no score: {str(error)[:300]}"
            return Reward(rollout_id, value, steps[i]["call_id"], JUDGE, self._source, why, False)

        try:
            given = await together(map(score, wanted))
        except Away as error:
            raise JudgeError(str(error)) from None
        await self._store.rewards.post(given, None, b"")
        return given

    def _wants(self, agent: str | None) -> bool:
        return self._agents.role(agent) is not None and strategy_of(agent, self._credit) == JUDGE


def transcript(steps: Sequence[Json], clean: Callable[[str], str] = str) -> tuple[str, str]:
    """Return a mark, and every step as text: the model's last input and its answer."""
    turns = [[shown_message(one, clean) for one in (*turn.shown[-1:], *turn.answer)] for turn in chat_turns(steps)]
    mark = mark_for(text for turn in turns for text in turn)
    texts = (fenced(mark, f"Step {i}", written(mark, turn, MAX_STEP)) for i, turn in enumerate(turns, 1))
    return mark, "\n\n".join(texts)


def question(shown: str, step: int) -> str:
    """Return the question about one step of a transcript, counted from 0."""
    return f"{shown}\n\nThe number for step {step + 1}:"


class JudgePlugin(TrainerPlugin):
    """Has the calls scored that have a judge's credit."""

    def check(self, run: Run) -> None:
        if JUDGE in self.config.trainer.credits.values():
            require_model("judge.calls", self.config.section(JudgeConfig).calls, self.config)

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        if JUDGE not in core.config.trainer.credits.values():
            yield TrainerHooks()
            return
        log.info("judge.calls: %s reads rollouts", core.config.section(JudgeConfig).calls.model)
        yield TrainerHooks(judge=StepJudge(core.config, core.store).missing)


plugin = JudgePlugin
