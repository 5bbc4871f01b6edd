"""Verifies by log-probabilities that vLLM serves the published weights, or by names and files if that fails to tell."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file

from ..core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ..core.errors import PublishError
from ..core.records import PolicyVersion, Rollout
from ..serving.swap import Swap
from ..serving.vllm import AWAY, VllmError, VllmServer
from .step.engine import TrainingEngine
from .step.shortage import give_back
from .types import Sample
from .waiting import all_of, before_retry, in_thread, until_done
from .weights import tolerance

log = logging.getLogger(__name__)

VERIFIED_TOKENS = 8
# Where these do not distinguish new weights from old ones, more answers are sampled at once, up to this many tokens.
MORE_ANSWERS, MORE_TOKENS, MOST_TOKENS, ROUNDS = 16, 32, 2048, 6
FAR = 10.0  # nats that a log-probability can be from the served one
SURE = 3.5  # standard deviations by which the answers must be nearer to one of the weights
ADAPTER_FILE = "adapter_model.safetensors"
VERIFY_RESTARTS = 3

SamplesOf = Callable[[Sequence[Rollout]], Awaitable[list[Sample]]]


class WeightEvidence:
    """Evidence of whether answers come from the new weights or the old ones.

    For each token it is how much nearer the served log-probability is to the new weights' than to the old ones'. The
    sum is judged by its own spread, so the size of rounding errors does not matter.
    """

    def __init__(self) -> None:
        self._from_new, self._from_old = list[float](), list[float]()

    def add(self, served: Iterable[float], new: Iterable[float], old: Iterable[float]) -> None:
        """Add an answer: its tokens' log-probabilities as served, under the new weights and under the old ones.

        Weights that would not sample a token count as `FAR` away: rounding makes top_p and the like exclude a few.
        """
        for value, by_new, by_old in zip(served, new, old, strict=True):
            self._from_new.append(abs(min(value - by_new, FAR)))
            self._from_old.append(abs(min(value - by_old, FAR)))

    @property
    def difference(self) -> float:
        """Return the mean difference from the new weights' log-probabilities, in nats; NaN if there are no tokens."""
        return fmean(self._from_new) if self._from_new else math.nan

    @property
    def deviations(self) -> float:
        """Return how clearly answers come from the new weights, in standard deviations; negative if from the old."""
        nearer = [old - new for new, old in zip(self._from_new, self._from_old, strict=True)]
        spread = math.hypot(*nearer)
        return sum(nearer) / spread if spread > 0 else 0.0

    @property
    def is_new(self) -> bool:
        return self.deviations >= SURE

    @property
    def is_old(self) -> bool:
        return self.deviations <= -SURE

    @property
    def may_become_clear(self) -> bool:
        """Return whether more answers may still show which weights answer."""
        if not (tokens := len(self._from_new)):
            return True
        sure = abs(self.deviations)
        return tokens < MOST_TOKENS and 0 < sure < SURE <= (sure + 2) * math.sqrt(MOST_TOKENS / tokens)

    def __str__(self) -> str:
        return (
            f"the log-probabilities of {len(self._from_new)} tokens differ by {self.difference:.4g} on average from "
            f"the published weights', and by {fmean(self._from_old):.4g} from the earlier weights'"
        )


class Verification:
    """Verifies that vLLM serves a policy version that has the trainer's current weights, or raises PublishError.

    vLLM continues the prompts of a few `samples`. It is not asked for prompt_logprobs, which crash vLLM 0.32 on a CPU
    with LoRA enabled. `seen` has the ids of the rollouts that `by_agents` has looked at.
    """

    def __init__(
        self,
        config: PolicyConfig,
        swap: Swap,
        engine: TrainingEngine,
        version: PolicyVersion,
        samples: Sequence[Sample],
    ) -> None:
        self.version, self.seen = version, set[str]()
        self._config, self._swap, self._engine, self._samples = config, swap, engine, samples
        self._agents = WeightEvidence()  # from the answers of `seen`
        self._found: list[tuple[WeightEvidence, str | None]] = []  # by adapter and server, and what else was checked

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the verification's step metrics: the worst values over adapters and servers. Empty at first.

        `verify_deviations` ignores adapters that the step did not move, unless it moved none.
        """
        if not self._found:
            return {}
        moved = [one for one in self._found if one[0].deviations] or self._found
        by = [by for _, by in moved if by is not None]
        return {
            "verify_difference": max(evidence.difference for evidence, _ in self._found),
            "verify_deviations": min(evidence.deviations for evidence, _ in moved),
        } | ({"verified_by": by[0]} if by else {})

    async def load(self, stop: asyncio.Event) -> None:
        """Load the version's adapters into vLLM and verify them. If vLLM restarts meanwhile, load them again."""
        await self._swap.unload(self.version)  # adapters of this name from another store, perhaps
        restarts, restarted, waits = 0, True, "the verification of the published weights waits"
        while restarts < VERIFY_RESTARTS:
            if restarted:
                await self._swap.load(self.version)
            try:
                return await self.on_all()
            except (VllmError, *AWAY) as error:
                restarted = not await until_done(waits, self._has_adapters, AWAY, stop)
                if isinstance(error, VllmError) and not restarted:
                    raise
                log.warning("%s: %s", waits, error)
            restarts += restarted
            await before_retry(stop)
        raise PublishError(
            f"vLLM restarted {VERIFY_RESTARTS} times while policy version {self.version.version} was being verified "
            "(vLLM's log may say why); the previous version stays live"
        )

    async def _has_adapters(self) -> bool:
        """Whether every server that answers still has all adapters of the version."""
        served = (await self._swap.vllm.ask(VllmServer.models)).values()
        return all({model["id"] for model in models}.issuperset(self.version.served_models) for models in served)

    async def on_all(self) -> None:
        """Verify every replica. One that is down is skipped: it gets the weights before it serves again."""
        self._found = []
        await self._swap.vllm.ask(self.on)

    async def on(self, server: VllmServer) -> None:
        """Verify one server: each adapter by its own samples, or by all samples if it has none."""
        base = await server.base_model() if self._swap.mode == "merged" else str(self.version.served_model)
        for adapter, model in {DEFAULT_ADAPTER: base, **self.version.adapters}.items():
            samples = [sample for sample in self._samples if sample.adapter == adapter] or self._samples
            evidence = await self._ask(server, model, adapter, samples)
            if not evidence.is_new and self._agents.is_old:
                raise PublishError(f"agents got answers from the previous weights when calling {model}: {self._agents}")
            by = None if evidence.is_new else await self._check_names(server, model, adapter, evidence)
            self._found.append((evidence, by))

    async def by_agents(self, rollouts: Sequence[Rollout], samples_of: SamplesOf) -> bool:
        """Return whether answers that agents got show that the only server serves the new weights.

        Scores the shortest row of each rollout, in batches, until the result is clear. If the answers seem to come from
        the old weights, `on`, which runs next, does not accept a matching name as proof.
        """
        rows, evidence = list[Sample](), self._agents
        for rollout in rollouts:
            if not evidence.may_become_clear:
                break
            self.seen.add(rollout.rollout_id)
            if of_rollout := await samples_of([rollout]):
                rows.append(min(of_rollout, key=lambda row: len(row.token_ids)))
            enough = rollout is rollouts[-1] or sum(r.trained_tokens for r in rows) >= MORE_ANSWERS * MORE_TOKENS
            if rows and enough:
                new = await in_thread(self._engine.scores_of, rows)
                old = await in_thread(self._engine.scores_of, rows, served=True)
                for row, *scores in zip(rows, new, old, strict=True):
                    evidence.add(*(compress(values, row.mask) for values in (row.logprobs, *scores)))
                rows = []
        give_back()
        if not (evidence.is_new and evidence.difference <= self._tolerance):
            return False
        self._found = [(evidence, None)]
        return True

    async def _ask(self, server: VllmServer, model: str, adapter: str, samples: Sequence[Sample]) -> WeightEvidence:
        """Sample answers and return their evidence. Raises PublishError if they come from other weights."""
        count = self._config.verify_samples
        chosen = samples[:: max(1, len(samples) // count)][:count]  # spread evenly
        prompts, tokens = [sample.token_ids[: sample.mask.index(1)] for sample in chosen] or [(0,)], VERIFIED_TOKENS
        evidence = WeightEvidence()
        for _ in range(ROUNDS):
            answers = await all_of(server.sample(model, prompt, tokens) for prompt in prompts)
            rows = [[*prompt, *ids] for prompt, (ids, _) in zip(prompts, answers, strict=True)]
            new = await in_thread(self._engine.logprobs, rows, adapter)
            old = await in_thread(self._engine.logprobs, rows, adapter, served=True)
            give_back()
            for (_, served), *scores in zip(answers, new, old, strict=True):
                evidence.add(served, *(row[len(row) - len(served) :] for row in scores))
            if tokens == VERIFIED_TOKENS and not evidence.difference <= self._tolerance:  # NaN fails too
                raise PublishError(
                    f"vLLM does not serve the weights that were published as {model}: its log-probabilities differ "
                    f"from the trainer's by {evidence.difference:.4g} on average (policy.verify_tolerance allows "
                    f"{self._tolerance:g}); the previous version stays live, or goes live again"
                )
            if not evidence.may_become_clear:
                break
            prompts, tokens = [prompts[i % len(prompts)] for i in range(MORE_ANSWERS)], MORE_TOKENS
        if evidence.is_old:
            raise PublishError(f"vLLM still serves the previous weights as {model}: {evidence}")
        return evidence

    @property
    def _tolerance(self) -> float:
        return tolerance(self._engine.settings, self._config)

    async def _check_names(self, server: VllmServer, model: str, adapter: str, evidence: WeightEvidence) -> str:
        """Check the server's label (merged weights), or an adapter's name and files, when answers prove nothing.

        Return what was checked. Raises PublishError if the check fails.
        """
        by = "its label"
        if self._swap.mode == "merged":
            if not await self._swap.has_label(server, self.version):
                raise PublishError(f"vLLM does not say that it serves policy version {self.version.version}")
        else:
            path = Path(str(self.version.path)) / ("" if adapter == DEFAULT_ADAPTER else adapter)
            roots = [entry.get("root") for entry in await server.models() if entry["id"] == model]
            if roots != [str(path)]:
                raise PublishError(f"vLLM must serve {model} from {path}, but the directories it reports are {roots}")
            ours, written = self._engine.adapter(adapter), await in_thread(load_file, path / ADAPTER_FILE)
            if written.keys() != ours.keys() or not all(torch.equal(written[k], w.cpu()) for k, w in ours.items()):
                raise PublishError(f"{path} does not hold the trainer's weights")
            by = "its name and its files"
        log.info("%s is verified by %s alone: %s", model, by, evidence)
        return by
