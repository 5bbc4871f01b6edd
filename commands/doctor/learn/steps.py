"""A few training steps on a synthetic reward, each link of which is looked at. Needs torch."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ....core.errors import LightningError
from ....trainer.loop import TrainingLoop
from ....trainer.plugins import TrainerCore
from ....trainer.step.step_metrics import nats_apart, wrong_sampler
from ....trainer.types import Batch
from ....trainer.verify import SURE
from ....trainer.waiting import in_thread
from ....trainer.weights import tolerance
from ...api_client import ApiClient
from ...run.run import RunOptions, run_tasks
from ...run.runner import Runner
from ...run.tasks import Task
from ..checks import Check, Report, failed, ok, warning
from .setup import GROUP_SIZE, REWARD

STEPS = 3
CONCURRENCY = 16
PUBLISH_S = 240.0
RESTART = "start vLLM with `lightning-proxy vllm`"

Json = dict[str, Any]

SELDOM, OFTEN = 0.2, 0.8

SHUFFLES = 2000
LARGEST_P = 0.01  # the largest p-value that counts


@dataclass(slots=True)
class LearnSteps:
    """The steps of a second system, whose trainer is `core`. `rate`: the learning rate of the user's own."""

    core: TrainerCore
    api: ApiClient
    runner: Runner
    tasks: Sequence[Task]
    loop: TrainingLoop
    rate: float
    report: Report
    step: int = 0
    _aim: Aim | None = None
    _rewards: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Take the steps. Raise Broken at the first failed check."""
        await self.loop.resume()
        for self.step in range(1, STEPS + 1):
            answers = self._read(await self._work())
            mean = await self._reward(answers)
            if (batch := await self._advantages()) is None:
                break
            before = await self._logprobs(batch)
            await in_thread(self.core.engine.forward_backward, batch)
            metrics = await in_thread(self.core.engine.optim_step)
            self._ratios(metrics)
            gained = self._likelier(batch, before, await self._logprobs(batch))
            apart = await self._publish(batch, metrics)
            if self.step > 1:
                self.report(ok(f"step {self.step}", f"mean reward {mean:.2f}; {gained}; {apart}"))

    def _say(self, check: Check) -> None:
        """Tell of the first step's checks, and of those that are not ok."""
        if self.step == 1 or check.outcome == "failed":
            self.report(check)

    async def _work(self) -> list[Json]:
        """Let the agent work on every task; return its rollouts with their calls."""
        name, options = "agent", RunOptions(GROUP_SIZE, CONCURRENCY, timeout_s=self.core.config.run.timeout_s)
        results = await run_tasks(self.api, self.tasks, self.runner, options)
        ended = [result for result in results if not result.failed]
        if not ended:
            self.report.fail(name, f"every run failed: {results[0].reason}", "correct it; `run` shows more of it")
        rollouts = [await self.api.rollout(result.rollout_id) for result in ended]
        calls = sum(len(rollout["calls"]) for rollout in rollouts)
        if not calls:
            fix = "have it call OPENAI_BASE_URL, which `doctor` and `run` set"
            self.report.fail(name, f"{len(ended)} runs ended, and made no call through the proxy", fix)
        lost = "" if len(ended) == len(results) else f"; {len(results) - len(ended)} runs failed"
        self._say(ok(name, f"{len(ended)} rollouts of {len(self.tasks)} tasks made {calls} calls{lost}"))
        return rollouts

    def _read(self, rollouts: Sequence[Json]) -> dict[str, dict[str, RolloutText]]:
        """Check that calls arrived with their tokens; return the answers by task and rollout."""
        name, calls = "calls", [call for rollout in rollouts for call in rollout["calls"]]
        if all(call["policy_version"] is None for call in calls):
            asked = Counter(str(call["request"].get("model")) for call in calls).most_common(1)[0][0]
            found = f"the calls ask for {asked!r}, which is not the policy's model: they cannot be trained on"
            self.report.fail(name, found, f"have the agent ask for the model {self.core.config.policy.alias!r}")
        reasons = Counter(str(call["untrainable_reason"]) for call in calls if not call["trainable"])
        good = len(calls) - reasons.total()
        found = f"{good} of {len(calls)} calls have the tokens that were sampled, and how likely each was"
        if reasons:
            why = reasons.most_common(1)[0][0]
            fix = "if the agent asks for that, see docs/training.md; lightning-proxy doctor names what a server lacks"
            self._say((warning if good else failed)(name, f"{found}; the others: {why}", fix))
        else:
            self._say(ok(name, found))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self.core.config.policy.model))
        answers: dict[str, dict[str, RolloutText]] = {}
        for rollout in rollouts:
            sampled = [call["response_token_ids"] or [] for call in rollout["calls"] if call["trainable"]]
            text = " ".join(str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in sampled)
            of_task = answers.setdefault(rollout["task_id"], {})
            of_task[rollout["rollout_id"]] = RolloutText(text, sum(map(len, sampled)))
        return answers

    async def _reward(self, answers: Mapping[str, Mapping[str, RolloutText]]) -> float:
        """Post the rewards, check that they arrived, and return their mean."""
        groups = [[*of_task.values()] for of_task in answers.values()]
        if self._aim is None or not self._aim.tells_apart(groups):  # the model may have learnt it since
            self._aim = aim_of(groups)
        given = {name: self._aim.reward(text) for of_task in answers.values() for name, text in of_task.items()}
        body = [{"rollout_id": name, "reward": reward, "name": REWARD} for name, reward in given.items()]
        await self.api.request("POST", "/reward", body)
        missing = [name for name in given if (await self.api.rollout(name))["reward"] is None]
        if missing:
            found = f"{self._aim}; {len(missing)} of {len(given)} rewards did not arrive"
            self.report.fail("rewards", found, "look at the lines above: the proxy says why it refused them")
        self._rewards |= given
        mean = fmean(given.values())
        self._say(ok("rewards", f"{self._aim}; {len(given)} rewards arrived, {mean:.2f} on average"))
        return mean

    async def _advantages(self) -> Batch | None:
        """Check that the rewards tell siblings apart; return the rows of the step. None if they did before."""
        name, batch = "advantages", await self.loop.collector.next_batch(self.loop.base, fewer=True)
        if batch is None:
            dropped = Counter([(await self.api.rollout(rollout))["dropped"] for rollout in self._rewards])
            why = dropped.most_common(1)[0][0]
            fix = "sample at temperature 1, with other tasks: siblings that all answer alike teach nothing"
            if why is None or "equal" not in why:
                fix = "docs/faults.md says what to do"
            if self.step == 1:
                self.report.fail(name, f"there is nothing to learn from: {why}", fix)
            found = f"the answers are all alike after step {self.step - 1}: {why}"
            self.report(warning(f"step {self.step}", found, "trainer.learning_rate is high for this model"))
            return None
        counts = batch.metrics
        nonzero = sum(any(sample.advantages) for sample in batch.samples)
        self._say(ok(name, f"{nonzero} of {len(batch.samples)} training rows have advantages other than 0"))
        if counts["forks_drift"] + counts["forks_edited"] > counts["calls_merged"]:
            found = "a second call does not begin with the tokens of the first: a row for each call (slower, not wrong)"
            drift = "set policy.token_continuity: exact"
            edited = "give vLLM a --chat-template that leaves earlier turns as they were"
            self._say(warning("rows", found, drift if counts["forks_drift"] > counts["forks_edited"] else edited))
        return batch

    async def _logprobs(self, batch: Batch) -> list[float]:
        """Of each row, the log-probability of its sampled tokens by the trainer's present weights."""
        rows = [sample.token_ids for sample in batch.samples]
        found = await in_thread(self.core.engine.logprobs, rows)
        return [
            math.fsum(value for value, sampled in zip(values, sample.mask, strict=True) if sampled)
            for values, sample in zip(found, batch.samples, strict=True)
        ]

    def _ratios(self, metrics: Json) -> None:
        """Check that the trainer finds the sampled tokens as likely as the server said they were."""
        name = "ratios"
        kl, allowed = metrics.get("kl", 0.0), tolerance(self.core.engine.settings, self.core.config.policy)
        if fix := wrong_sampler(kl, allowed):
            found = f"{metrics['ratio_mean']:.4f} on average ({nats_apart(kl):.2g} nats off)"
            self.report.fail(name, f"with unchanged weights they are not 1, but {found}", fix)
        if metrics["skipped"]:
            why = self.core.engine.skipped_because
            self.report.fail("step", f"the step was skipped: {why}", "docs/faults.md says what to do")
        found = f"{metrics['ratio_mean']:.4f} on average, {metrics['ratio_max']:.3f} at most"
        self._say(ok(name, f"with unchanged weights they are 1: {found}"))

    def _likelier(self, batch: Batch, before: Sequence[float], after: Sequence[float]) -> str:
        """Check that the step made what was rewarded likelier than its siblings; return by how much."""
        changes: dict[str, dict[str, float]] = {}
        for sample, old, new in zip(batch.samples, before, after, strict=True):
            of_task = changes.setdefault(sample.task_id, {})
            of_task[sample.rollout_id] = of_task.get(sample.rollout_id, 0.0) + new - old
        groups = [([self._rewards[name] for name in task], [*task.values()]) for task in changes.values()]
        found, rate = likelier(groups), self.core.engine.rate.value
        gained = f"{found.nats:+.3g} nats (p = {found.p:.2g})"
        if not any(change for _, of_task in groups for change in of_task):
            fix = "set a larger trainer.learning_rate (docs/training.md has usual ones)"
            self.report.fail("likelier", f"the step moved no weight: trainer.learning_rate is {rate:g}", fix)
        if not found.is_sure and self.step == 1:  # later, too few siblings may differ for a test
            fix = "run it again; if it stays so, look at your own trainer.loss or credit, and at trainer.learning_rate"
            self.report.fail("likelier", f"a step did not make what was rewarded likelier: {gained}", fix)
        own = "" if rate == self.rate else f", at a learning rate of {rate:g} (yours is {self.rate:g})"
        self._say(ok("likelier", f"a step made what was rewarded likelier than the rest: {gained}{own}"))
        return gained

    async def _publish(self, batch: Batch, metrics: Json) -> str:
        """Check that the server answers with the step's weights, not with those before; return how clearly."""
        name, fix = "new weights", "the lines above say what it waits for; look at vLLM's log"
        try:
            async with asyncio.timeout(PUBLISH_S):
                await self.loop.conclude(batch, metrics)
                metrics |= await self.loop.verify_live()
        except TimeoutError:
            self.report.fail(name, f"they are not live after {PUBLISH_S:.0f} s", fix)
        except LightningError as error:
            fix = (
                f"{RESTART}, which adds --enable-lora and --max-lora-rank; behind a router, name every server in "
                "upstreams.servers; give vLLM and trainer the same model and dtype; vLLM's log says more"
            )
            self.report.fail(name, error.message, fix)
        apart = float(metrics.get("verify_deviations", 0.0))
        shown = f"{apart:.0f} standard deviations apart"
        if apart < SURE:
            found = f"the server has them by name, and its answers do not tell them from the old ones: {shown}"
            self.report(warning(name, found, "the step was small: a larger trainer.learning_rate would show"))
        else:
            self._say(ok(name, f"the server answers with them and not with the old ones: {shown}"))
        return shown


class RolloutText(NamedTuple):
    """All that the model said in a rollout: its text, and the number of its tokens."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Aim:
    """A synthetic reward: 1 for answers with the word or letter `piece`; without one, more for fewer tokens."""

    piece: str | None
    longest: int = 1

    def reward(self, answer: RolloutText) -> float:
        """Return the reward of an answer, between 0 and 1."""
        if self.piece is None:
            return max(0.0, 1 - answer.tokens / self.longest)
        return float(self.piece in _pieces(answer.text))

    def tells_apart(self, groups: Sequence[Sequence[RolloutText]]) -> bool:
        """Return whether siblings have different rewards."""
        return any(len({self.reward(answer) for answer in group}) > 1 for group in groups)

    def __str__(self) -> str:
        if self.piece is None:
            return "more for a shorter answer"
        return f'1 for an answer with the {"letter" if len(self.piece) == 1 else "word"} "{self.piece}"'


def aim_of(groups: Sequence[Sequence[RolloutText]]) -> Aim:
    """Return what tells siblings apart best: a word, else a letter, that 20 % to 80 % of the answers have, else length.

    >>> group = [RolloutText(text, 3) for text in ("a red fox", "a grey fox", "one red ant", "fox")]
    >>> str(aim_of([group]))
    '1 for an answer with the word "red"'
    """
    found = [[_pieces(answer.text) for answer in group] for group in groups]
    total = sum(map(len, groups))
    best: tuple[bool, float] = (False, 0.0)
    aim = Aim(None, max(answer.tokens for group in groups for answer in group) or 1)
    for piece in sorted({piece for group in found for pieces in group for piece in pieces}):
        having = [sum(piece in pieces for pieces in group) for group in found]
        shares = [count / len(group) for count, group in zip(having, groups, strict=True) if group]
        score = (len(piece) > 1, sum(share * (1 - share) for share in shares))
        if SELDOM <= sum(having) / total <= OFTEN and score[1] > 0 and score > best:
            best, aim = score, Aim(piece)
    return aim


def _pieces(text: str) -> set[str]:
    """The words of a text, and its letters."""
    words = re.findall(r"[^\W_]+", text.lower())
    return {word for word in words if len(word) > 1} | {letter for letter in text.lower() if letter.isalpha()}


class Likelier(NamedTuple):
    """By how many nats an answer gained on its siblings for each point of reward, and the p-value of that."""

    nats: float
    p: float

    @property
    def is_sure(self) -> bool:
        return self.nats > 0 and self.p <= LARGEST_P


def likelier(groups: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int = 0) -> Likelier:
    """Compare siblings: of each group the rewards, and the changes of the answers' log-probabilities.

    The p-value is that of a permutation test: how often rewards that are shuffled among siblings do as well.

    >>> likelier([([1, 0, 1, 0], [0.5, 0.1, 0.5, 0.1])])[0]
    0.4
    """
    rng = np.random.default_rng(seed)
    covariance, spread, shuffled = 0.0, 0.0, np.zeros(SHUFFLES)
    for rewards, changes in groups:
        r, c = np.asarray(rewards, dtype=float), np.asarray(changes, dtype=float)
        r, c = r - r.mean(), c - c.mean()
        covariance += float(r @ c)
        spread += float(r @ r)
        shuffled += rng.permuted(np.tile(r, (SHUFFLES, 1)), axis=1) @ c
    as_good = int((shuffled >= covariance - 1e-12).sum())
    return Likelier(covariance / spread if spread else 0.0, (1 + as_good) / (1 + SHUFFLES))
