"""Verifies that vLLM serves the published weights: its log-probabilities are compared with the trainer's own."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import torch

from ..proxy.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ..proxy.errors import PublishError, UpstreamTimeout, UpstreamUnreachable
from ..proxy.policy.swap import Superseded, Swap
from ..proxy.policy.vllm import VllmError, VllmServer
from ..proxy.types import PolicyVersion
from .step.adapters import Weights
from .step.shortage import give_back
from .step.trainer import LightningTrainer
from .types import Sample
from .waiting import before_retry

log = logging.getLogger(__name__)

# How far apart rounding alone takes the mean log-probability of two implementations.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
# A difference below this share of the tolerance says nothing.
ROUNDING = 0.02
VERIFIED_TOKENS = 8
VERIFY_TRIES = 150
VERIFY_RESTARTS = 3

Answer = tuple[list[int], list[float]]  # token ids, and their log-probabilities


class Verifier:
    """Lets vLLM go on from the prompts of a few samples. Raises PublishError if it does not serve the new weights.

    It does not ask for prompt_logprobs, which end the engine of vLLM 0.32 on a CPU with LoRA enabled.
    """

    def __init__(self, config: PolicyConfig, swap: Swap, trainer: LightningTrainer) -> None:
        self._config = config
        self._swap = swap
        self._trainer = trainer
        self._served: dict[str, Weights] = {}  # by adapter, the weights that were last seen to be served

    async def load_and_verify(self, version: PolicyVersion, samples: Sequence[Sample], stop: asyncio.Event) -> None:
        """Load a version's adapters and verify them. Do it again if vLLM restarts meanwhile: it forgets them."""
        for _ in range(VERIFY_RESTARTS):
            await self._swap.load(version)
            try:
                for adapter, model in {DEFAULT_ADAPTER: str(version.served_model), **version.adapters}.items():
                    own = [sample for sample in samples if sample.adapter == adapter]
                    await self._verify(model, own or samples, adapter, stop)
                return
            except VllmError:
                if await self._has_adapters(version):
                    raise
                log.warning("vLLM restarted while its weights were verified: trying again")
        raise PublishError(
            f"vLLM restarted {VERIFY_RESTARTS} times while policy version {version.version} was verified (its log may "
            "say why); the previous version stays live"
        )

    async def verify_merged(self, version: PolicyVersion, samples: Sequence[Sample], stop: asyncio.Event) -> None:
        """Verify the live version; again if vLLM restarts meanwhile. Raises Superseded if another is made live."""
        while True:
            await self._swap.restore(set())
            try:
                return await self._verify(await self._swap.vllm.base_model(), samples, DEFAULT_ADAPTER, stop)
            except PublishError:
                if (live := await self._swap.store.versions.live()).version != version.version:
                    raise Superseded(f"policy version {live.version} was made live meanwhile") from None
                if await self._swap.serves(version):
                    raise
                log.warning("vLLM restarted while its weights were verified: trying again")

    async def _has_adapters(self, version: PolicyVersion) -> bool:
        """Whether every server that answers still has all adapters of the version."""
        servers = await self._swap.vllm.reachable()
        served = [{model["id"] for model in await server.models()} for server in servers]
        return all(models.issuperset(version.served_models) for models in served)

    async def _verify(self, model: str, samples: Sequence[Sample], adapter: str, stop: asyncio.Event) -> None:
        """Ask every replica. One that goes away meanwhile is left out: it gets the weights before it serves again."""
        count = self._config.verify_samples
        chosen = samples[:: max(1, len(samples) // count)][:count]  # spread evenly
        prompts = [sample.token_ids[: sample.mask.index(1)] for sample in chosen] or [(0,)]
        verified = 0
        for server in await self._swap.vllm.reachable():
            try:
                answers = [await self._sample(server, model, prompt, stop) for prompt in prompts]
            except (UpstreamUnreachable, UpstreamTimeout) as error:
                log.warning("the published weights are not verified on one server: %s", error)
                continue
            await self._compare(model, prompts, answers, adapter)
            verified += 1
        if not verified:
            raise UpstreamUnreachable("the published weights are not verified yet: vLLM went away")
        self._served[adapter] = self._trainer.adapter(adapter)
        give_back()

    async def _sample(self, server: VllmServer, model: str, prompt: Sequence[int], stop: asyncio.Event) -> Answer:
        """The server's answer. If no other server answers, this one is waited for; the proxy restores its weights."""
        for _ in range(VERIFY_TRIES):
            try:
                return await server.sample(model, prompt, VERIFIED_TOKENS)
            except (UpstreamUnreachable, UpstreamTimeout) as error:
                if await self._another_answers(server):
                    raise
                log.warning("verifying the published weights waits: %s", error)
                await before_retry(stop)
        raise UpstreamUnreachable(f"the published weights are not verified yet: vLLM was away for {VERIFY_TRIES} tries")

    async def _another_answers(self, server: VllmServer) -> bool:
        try:
            return any(other is not server for other in await self._swap.vllm.reachable())
        except (UpstreamUnreachable, UpstreamTimeout):
            return False

    async def _compare(
        self, model: str, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], adapter: str
    ) -> None:
        """Raise PublishError if the answers are not those of the adapter, or closer to those of its old weights."""
        rows = [[*prompt, *ids] for prompt, (ids, _) in zip(prompts, answers, strict=True)]
        difference = mean_difference(await asyncio.to_thread(self._trainer.logprobs, rows, None, adapter), answers)
        tolerance = self._config.verify_tolerance or TOLERANCE[self._trainer.policy_model.dtype]
        if not difference <= tolerance:  # NaN fails too
            raise PublishError(
                f"vLLM does not serve the weights that were published as {model}: its log-probabilities of "
                f"{sum(len(ids) for ids, _ in answers)} tokens differ from the trainer's by {difference:.4g} on "
                f"average (policy.verify_tolerance is {tolerance:g}); the previous version stays live"
            )
        if adapter in self._served and difference > tolerance * ROUNDING:
            old = await asyncio.to_thread(self._trainer.logprobs, rows, self._served[adapter], adapter)
            if (before := mean_difference(old, answers)) < difference / 2:
                raise PublishError(
                    "vLLM still serves the weights from before: its log-probabilities differ from theirs by "
                    f"{before:.4g} on average, and from those of the published weights by {difference:.4g}"
                )


def mean_difference(ours: Sequence[Sequence[float]], answers: Sequence[Answer]) -> float:
    """Compute the mean absolute difference over the answers' tokens, which end rows of `ours`; NaN without tokens."""
    differences = [
        abs(a - b)
        for row, (ids, served) in zip(ours, answers, strict=True)
        for a, b in zip(row[len(row) - len(ids) :], served, strict=True)
    ]
    return math.fsum(differences) / len(differences) if differences else math.nan
