"""Has a teacher score the policy's answers: on-policy distillation (arXiv 2306.08543, arXiv 2306.13649)."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from ...core.config.address import shown
from ...core.errors import ConfigError, UpstreamTimeout, UpstreamUnreachable
from ...serving.vllm import VllmError, VllmServer
from ...trainer.types import Batch, Guidance, Sample
from ...trainer.waiting import GuideError, all_of
from .config import TeacherConfig

ROWS_AT_ONCE = 8
COUNTS = ("calls_taught", "calls_not_plain", "calls_beyond_teacher")
# Tokenizers that differ do so here: words, numbers, blanks, code, other scripts.
TEXT = "Hello, world! 1234567 + 89 = 3.14159\n\n\tdef f(x):\n        return x ** 2  # naïve café 東京 Привет 🙂 "


class Teacher:
    """A model on a vLLM server. It scores the tokens of a row and sees nothing else."""

    def __init__(self, config: TeacherConfig, server: VllmServer, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._server = server
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(ROWS_AT_ONCE)
        self._model: str | None = None  # None until `check` found one that fits
        self._longest = sys.maxsize

    async def check(self) -> None:
        """Raise ConfigError if the teacher's tokens differ from the policy's, GuideError if a request fails."""
        text = TEXT + " ".join(self._tokenizer.all_special_tokens)
        try:
            model = self._config.model or await self._server.base_model()
            served = {one["id"]: one.get("max_model_len") for one in await self._server.models()}
            theirs = await self._server.tokens(model, text)
        except (UpstreamUnreachable, UpstreamTimeout, VllmError) as error:
            raise GuideError(f"teacher: {error}") from None
        if theirs != self._tokenizer.encode(text, add_special_tokens=False):
            raise ConfigError(
                f"teacher: {model} at {shown(self._server.base_url)} has a different tokenizer from policy.model; use "
                "a teacher with the policy's tokenizer, such as a model of the same family"
            )
        # vLLM reports no length of an adapter. It samples a token after each row.
        longest = served.get(model) or max(filter(None, served.values()), default=None)
        self._longest = sys.maxsize if longest is None else int(longest) - 1
        self._model = model

    async def guided(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's log-probabilities. Raises the same errors as `check`."""
        started, counts, samples = time.perf_counter(), Counter[str](), list[Sample]()
        if self._model is None:
            await self.check()
        rows = [sample.token_ids[: self._longest] for sample in batch.samples]
        spans = [answers_of(sample) for sample in batch.samples]
        asked = (row for row, of_row in zip(rows, spans, strict=True) if any(is_plain for *_, is_plain in of_row))
        distinct = list(dict.fromkeys(asked))
        scored = dict(zip(distinct, await all_of(map(self._ask, distinct)), strict=True))
        for sample, row, of_row in zip(batch.samples, rows, spans, strict=True):
            values, said = [math.nan] * len(sample.token_ids), scored.get(row, [])
            for start, end, is_plain in of_row:
                taught = "calls_taught" if start < self._longest else "calls_beyond_teacher"
                counts[taught if is_plain else "calls_not_plain"] += 1
                if is_plain:
                    values[start : min(end, len(said))] = said[start:end]
            samples.append(replace(sample, guidance=Guidance(tuple(values), self._config.weight)))
        metrics = {name: float(counts[name]) for name in COUNTS}
        metrics["teacher_tokens"] = float(sum(len(row) + 1 for row in distinct))  # vLLM samples one after each row
        metrics["guide_s"] = time.perf_counter() - started
        return replace(batch, samples=tuple(samples), metrics={**batch.metrics, **metrics})

    async def _ask(self, row: tuple[int, ...]) -> list[float]:
        assert self._model is not None
        async with self._slots:
            try:
                return await self._server.scored(self._model, row)
            except (UpstreamUnreachable, UpstreamTimeout, VllmError) as error:
                raise GuideError(f"teacher: {error}") from None


def answers_of(sample: Sample) -> list[tuple[int, int, bool]]:
    """Return the start and end of each answer in a row, and whether it was sampled at plain temperature 1."""
    found, place, shaped = [], 0, {start for start, _, _ in sample.shaped}
    for sampled, tokens in groupby(sample.mask):
        start, place = place, place + len(list(tokens))
        if sampled:  # there is context between any two
            found.append((start, place, sample.temperatures[start] == 1.0 and start not in shaped))
    return found
