"""Lets the policy guide itself: it scores its own answers again, after a prompt with a hint in it.

What it learned from the hint is in the difference: a token that the hint makes likelier gets a positive advantage
(SDPO, arXiv 2601.20802). A hint is the comment of a reward, or the answer of a better sibling.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from ...proxy.errors import NotFound
from ...proxy.guides.config import GuideKeys
from ...proxy.store.store import Store
from ...proxy.types import ModelCall, Rollout
from ..credit.rewards import training_rules
from ..types import Batch, Guidance, Sample
from ..waiting import in_thread
from .hinted import Hint, answers_of, hinted_prompt, hinted_row
from .sources import Recorded, comments, siblings

log = logging.getLogger(__name__)

# Scores the answers of rows: a log-probability for each token.
Score = Callable[[Sequence[Sample]], list[list[float]]]
LEAK = 0.2  # nats a token; without a leak it is minus a KL divergence, but for chance
COUNTS = ("calls_hinted", "calls_without_hint", "hints_not_shown", "hints_too_long")


class Hints:
    """Shows the policy the hint for each call that has one, and notes its log-probabilities of the answer."""

    def __init__(
        self, config: GuideKeys, store: Store, tokenizer: PreTrainedTokenizerBase, max_tokens: int, score: Score
    ) -> None:
        """A row with a hint has at most `max_tokens` tokens."""
        assert config.hints != "off"
        self._kind: Hint = config.hints
        self._weight = config.hint_weight
        self._rules = training_rules(config)
        self._store = store
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._score = score
        self._warned = False

    async def teaches(self, rollout: Rollout) -> bool:
        """Return whether somebody commented on the rollout. No sibling is better where rewards are equal."""
        if self._kind != "comments":
            return False
        recorded = await self._recorded(rollout.rollout_id, "")
        return recorded is not None and bool(comments([recorded]))

    async def guided(self, batch: Batch) -> Batch:
        """Return the batch with the log-probabilities of its answers after a hint."""
        recorded: list[Recorded] = []
        tasks = {sample.rollout_id: sample.task_id for sample in batch.samples}
        owners = await self._store.waiting.owners(tasks)  # nobody's answer is a hint to rollouts that may not see it
        for rollout_id, task_id in tasks.items():
            siblings = f"{task_id} {owners.get(rollout_id) or ''}"
            if (found := await self._recorded(rollout_id, siblings)) is not None:
                recorded.append(found)
        samples, counts = await in_thread(self._guided, batch.samples, recorded)
        metrics = {name: float(counts[name]) for name in COUNTS}
        return replace(batch, samples=samples, metrics={**batch.metrics, **metrics})

    async def _recorded(self, rollout_id: str, task_id: str) -> Recorded | None:
        """What the store has of a rollout; None if it was deleted meanwhile."""
        with suppress(NotFound):
            calls = await self._store.calls.of(rollout_id)
            return Recorded(task_id, calls, await self._store.rewards.of(rollout_id))
        return None

    def _guided(
        self, samples: Sequence[Sample], recorded: Sequence[Recorded]
    ) -> tuple[tuple[Sample, ...], Counter[str]]:
        calls = {call.call_id: call for rollout in recorded for call in rollout.calls}
        hints = comments(recorded) if self._kind == "comments" else siblings(recorded, self._rules, self._tokenizer)
        scores = [[math.nan] * len(sample.token_ids) for sample in samples]
        counts: Counter[str] = Counter()
        places: list[tuple[list[float], int, int]] = []
        rows: list[Sample] = []
        for sample, values in zip(samples, scores, strict=True):
            for call_id, start, end in answers_of(sample):
                row, why = self._row(sample, start, end, calls.get(call_id), hints.get(call_id))
                counts[why] += 1
                if row is not None:
                    places.append((values, start, end))
                    rows.append(row)
        for (values, start, end), found in zip(places, self._score(rows), strict=True):
            values[start:end] = found[start - end :]
        self._look_for_leaks(samples, scores)
        guidance = [Guidance(tuple(values), self._weight) for values in scores]
        return tuple(replace(s, guidance=(*s.guidance, g)) for s, g in zip(samples, guidance, strict=True)), counts

    def _look_for_leaks(self, samples: Sequence[Sample], scores: Sequence[Sequence[float]]) -> None:
        """Warn once if hints make the answers likelier on average: hints that reveal nothing make them less likely."""
        gaps = [
            hinted - own
            for sample, values in zip(samples, scores, strict=True)
            for hinted, own in zip(values, sample.logprobs, strict=True)
            if not math.isnan(hinted)
        ]
        if self._warned or self._kind != "comments" or not gaps or (gap := fmean(gaps)) < LEAK:
            return
        self._warned = True
        log.warning(
            "hints: they make the policy's own answers likelier, by %.1f nats a token. It learns to repeat itself if "
            "comments contain its answer: let them say what was wrong, and what is right", gap,
        )  # fmt: skip

    def _row(
        self, sample: Sample, start: int, end: int, call: ModelCall | None, hint: str | None
    ) -> tuple[Sample | None, str]:
        """The answer at [start, end) after a hint, or None; and the name of its count."""
        if call is None or hint is None:
            return None, "calls_without_hint"
        prompt = hinted_prompt(call, hint, self._kind, self._tokenizer)
        if prompt is None:
            return None, "hints_not_shown"
        row = hinted_row(sample, start, end, prompt)
        return (None, "hints_too_long") if len(row.token_ids) > self._max_tokens else (row, "calls_hinted")
