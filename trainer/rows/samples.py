"""Makes samples (training rows) from the calls of a rollout, by exact token prefixes. No torch.

An answer is trained on after exactly the tokens that the model saw when sampling it. So a call joins a row only if
its prompt begins with all of that row and goes beyond it; without tokens in between, two answers would become one. An
agent may send an answer back that reads the same but is tokenised differently (drift). Then the sampled answer stays
in its row, and the call opens a new row, with its own prompt as context. No answer is trained on twice, and none
loses tokens. A fork costs only what comes after it, since the prefix tree computes a shared prefix only once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...core.config.policy import DEFAULT_ADAPTER
from ...core.records import ModelCall
from ...core.tokens import is_not_followed
from ...core.tools import conversation, only_results
from ..types import Sample, Sampling
from .prefix_tree import Ints, shared_prefix
from .sampling import sampling_of

# Why a call opened a row though its rollout had one:
# - drift: the last answer came back tokenised differently.
# - edited: an earlier part of the history did, or the agent continued from an earlier point.
# - repeated: the very same prompt, or a shorter one, was sent again.
# - adjoining: nothing came between the call and the answer before.
# - new: it shares no answer with any row. It is another agent's, or a new conversation.
FORKS = ("forks_drift", "forks_edited", "forks_repeated", "forks_adjoining", "forks_new")

# Says how a call's answer was sampled; None if that cannot be computed again.
SamplingOf = Callable[[ModelCall], Sampling | None]

# vLLM writes this for -inf, which JSON does not have.
NO_PROBABILITY = -9999.0


class Placement(NamedTuple):
    """Where a call's answer went. `row` is the index of the row that has it, or None if no row has it.

    `placed` is `first` if the call opened the first row of its rollout (or adapter). Else it is the step metric that
    counts the call, without the metric's first word: `merged`, `drift`, …, `too_long`.
    """

    row: int | None
    placed: str


@dataclass(frozen=True, slots=True)
class RolloutSamples:
    """The rows of one rollout, counts of its calls by step metric, and the placement of each call, in order.

    `calls` are in a row, `calls_merged` of them after another call. All others are left out: `calls_untrainable` have
    no usable token ids, or temperature 0; `calls_not_followed` were sampled in a way that cannot be computed again;
    `calls_ambiguous` have several answers, so the reward belongs to no single one; `calls_not_finite` have a
    log-probability that is not finite; `calls_other_tokens` have tokens outside the vocabulary; `rows_too_long` have
    more than `max_tokens` tokens.
    """

    samples: tuple[Sample, ...]
    counts: Counter[str]
    placements: tuple[Placement, ...] = ()


@dataclass(slots=True)
class _Row:
    """A row under construction. `calls` have their advantages and sampling; `ids` are the row's tokens so far."""

    adapter: str
    calls: list[tuple[ModelCall, float, Sampling]] = field(default_factory=list)
    ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, call: ModelCall, advantage: float, sampling: Sampling) -> None:
        """Append a call with a prompt that begins with this row."""
        self.calls.append((call, advantage, sampling))
        self.ids = np.array(call.row_token_ids, np.int64)

    def sample(self, rollout_id: str, task_id: str) -> Sample:
        n, last = len(self.ids), self.calls[-1][0]
        mask, logprobs, advantages, temperatures = [0] * n, [0.0] * n, [0.0] * n, [1.0] * n
        shaped: list[tuple[int, int, Sampling]] = []
        for call, advantage, sampling in self.calls:
            start, end = len(call.prompt_token_ids), len(call.row_token_ids)
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = call.logprobs
            advantages[start:end] = [advantage] * (end - start)
            temperatures[start:end] = [sampling.temperature] * (end - start)
            if not sampling.is_plain:
                shaped.append((start, end, sampling))
        calls = [call for call, _, _ in self.calls]
        return Sample(
            rollout_id=rollout_id,
            task_id=task_id,
            token_ids=tuple(last.row_token_ids),
            mask=tuple(mask),
            logprobs=tuple(logprobs),
            advantages=tuple(advantages),
            temperatures=tuple(temperatures),
            call_ids=tuple(call.call_id for call in calls),
            adapter=self.adapter,
            shaped=tuple(shaped),
            results=tuple(_results(calls)),
            versions=tuple(sorted({version for call in calls for version in call.policy_versions})),
        )


def _results(calls: Sequence[ModelCall]) -> Iterator[tuple[int, int]]:
    """Yield the token ranges between a row's answers in which only tool results were added."""
    for before, call in pairwise(calls):
        known = 0 if call.request.get("previous_response_id") else len(conversation(before.request))
        if only_results(conversation(call.request)[known:]):
            yield len(before.row_token_ids), len(call.prompt_token_ids)


def rollout_samples(
    calls: Sequence[ModelCall],
    advantages: Sequence[float],
    *,
    task_id: str,
    max_tokens: int,
    vocabulary: int | None = None,
    adapter_of: Callable[[str | None], str] = lambda agent: DEFAULT_ADAPTER,
    sampled: SamplingOf = lambda call: sampling_of(call.request),
) -> RolloutSamples:
    """Merge `calls` (of one rollout, in order, one advantage each) into rows of at most `max_tokens` tokens.

    A call continues a row that its prompt begins with and goes beyond; if there is none, it opens a new one. Its answer
    is trained on only there; in the prompts of later calls it is context. `vocabulary` is the number of the model's
    tokens (None: any). `adapter_of` says which adapter an agent has: each adapter has its own rows. `sampled` says how
    a call's answer was sampled.
    """
    rows: list[_Row] = []
    counts: Counter[str] = Counter()
    placements: list[Placement] = []
    ending: dict[str, int] = {}  # by call, the row that ended in its answer
    for call, advantage in zip(calls, advantages, strict=True):
        sampling = sampled(call)
        if reason := _unusable(call, sampling, max_tokens, vocabulary):
            counts[reason] += 1
            placements.append(Placement(None, reason.partition("_")[2]))
            continue
        assert sampling is not None
        adapter, prompt = adapter_of(call.agent), np.array(call.prompt_token_ids, np.int64)
        index, outcome = _place(rows, adapter, prompt, ending.get(call.extends or ""))
        if index == len(rows):
            rows.append(_Row(adapter))
        rows[index].add(call, advantage, sampling)
        ending[call.call_id] = index
        counts.update(["calls", outcome] if outcome else ["calls"])
        placements.append(Placement(index, outcome.partition("_")[2] if outcome else "first"))
    rollout_id = calls[0].rollout_id if calls else ""
    samples = tuple(row.sample(rollout_id, task_id) for row in rows)
    return RolloutSamples(samples, counts, tuple(placements))


def merge_rate(counts: Mapping[str, int]) -> float:
    """Return the share of calls that joined a row, first calls aside; 1.0 if there are no others."""
    merged = counts["calls_merged"]
    could = merged + sum(counts[reason] for reason in FORKS)
    return merged / could if could else 1.0


def _unusable(call: ModelCall, sampling: Sampling | None, max_tokens: int, vocabulary: int | None) -> str | None:
    if len(call.choices) > 1:
        return "calls_ambiguous"
    if is_not_followed(call.untrainable_reason):
        return "calls_not_followed"
    if not (call.trainable and call.prompt_token_ids and call.response_token_ids):
        return "calls_untrainable"
    if sampling is None or not sampling.fits(vocabulary):
        return "calls_not_followed"
    # Temperature 0 is greedy: there is no sampling distribution to take the gradient of.
    if sampling.temperature <= 0:
        return "calls_untrainable"
    if not all(NO_PROBABILITY < logprob < math.inf for logprob in call.logprobs):
        return "calls_not_finite"
    if min(call.row_token_ids) < 0 or (vocabulary is not None and max(call.row_token_ids) >= vocabulary):
        return "calls_other_tokens"
    return "rows_too_long" if len(call.prompt_token_ids) + len(call.response_token_ids) > max_tokens else None


def _place(rows: Sequence[_Row], adapter: str, prompt: Ints, likely: int | None) -> tuple[int, str | None]:
    """Return the index of the row that a call continues or opens, and the call's step metric (None: first call).

    Row `likely` is tried first, so that the work for most calls does not grow with the number of rows.
    """

    def is_continued(index: int, shared: int) -> bool:
        return rows[index].adapter == adapter and shared == len(rows[index].ids) < len(prompt)

    if likely is not None and is_continued(likely, shared_prefix(rows[likely].ids, prompt)):
        return likely, "calls_merged"
    shared = [(shared_prefix(row.ids, prompt), i) for i, row in enumerate(rows) if row.adapter == adapter]
    if not shared:
        return len(rows), None
    if continued := [(n, i) for n, i in shared if is_continued(i, n)]:
        return max(continued, key=lambda one: one[0])[1], "calls_merged"
    # Among rows that share as much, the agent most likely continued the newest.
    n, index = max(shared)
    return len(rows), _fork(rows[index], n, len(prompt))


def _fork(nearest: _Row, shared: int, prompt: int) -> str:
    if shared == prompt:
        return "forks_adjoining" if shared == len(nearest.ids) else "forks_repeated"
    first, last = (len(nearest.calls[i][0].prompt_token_ids) for i in (0, -1))
    if shared > last:
        return "forks_drift"
    return "forks_edited" if shared >= first else "forks_new"
