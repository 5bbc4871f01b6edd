"""New weights go live: save, load into vLLM, verify, move the alias. Nothing half-written is ever served."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..proxy.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ..proxy.errors import LightningError, PublishError, UpstreamTimeout, UpstreamUnreachable
from ..proxy.policy.swap import Superseded, Swap
from ..proxy.policy.vllm import VllmError, VllmServer
from ..proxy.store.store import Store
from ..proxy.store.training import Step
from ..proxy.types import PolicyVersion
from .step.adapters import Weights
from .step.trainer import LightningTrainer
from .types import Sample

log = logging.getLogger(__name__)

# How far rounding alone takes the mean log-probability of two implementations apart.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
# Below this share of the tolerance, a difference says nothing.
ROUNDING = 0.02
VERIFIED_TOKENS = 8
VERIFY_TRIES = 150
VERIFY_RESTARTS = 3
RETRY_S = 2.0


class Publisher:
    """Publishes the trainer's weights as policy versions."""

    def __init__(self, config: PolicyConfig, store: Store, swap: Swap, trainer: LightningTrainer) -> None:
        self._config = config
        self._store = store
        self._swap = swap
        self._trainer = trainer
        self._directory = config.directory.absolute() / "versions"
        self._served: dict[str, Weights] = {}  # the weights of each adapter that were seen to be served last
        self.keep: Callable[[], Awaitable[set[int]]] | None = None  # versions whose files stay beside the newest
        self.stop = asyncio.Event()  # once it is set, nobody waits for vLLM any more

    async def publish(self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int) -> PolicyVersion:
        """Make the weights of `step`, which started from version `base`, live; may be called again after a failure.

        PublishError, and `base` live again, if vLLM does not serve them; Superseded if another version was made live.
        """
        live = await self._store.versions.live()
        await self._swap.vllm.models()  # not reachable: before a version is reserved
        if live.step == step and live.publish == self._swap.mode == "merged" and not live.verified:
            version = live  # only its verification is missing
            made_by = await self._store.steps.of_version(live.version)
            base = made_by.base if made_by else base
        else:
            version = await self._save(step, metrics)
        try:
            if self._swap.mode == "lora":
                await self._swap.unload(version)  # of another store, perhaps
                await self._verify_adapters(version, samples)
                await self._swap.activate(version, step, expected=base, verified=True)
            else:
                if version is not live:
                    await self._swap.activate(version, step, expected=base)
                await self._verify_merged(version, samples)
        except (PublishError, Superseded) as error:
            await self._store.versions.failed(version.version, str(error))
            if isinstance(error, PublishError) and self._swap.mode == "merged":
                await self.take_back(version.version, base)
            raise
        if self._swap.mode == "merged":
            await self._store.versions.verified(version.version)
        await self._prune()
        return await self._store.versions.get(version.version)

    def is_done(self, live: PolicyVersion, last: Step) -> bool:
        """Whether the last step's weights are live, seen to be served, and published in the way that is configured."""
        return last.version == live.version and live.verified and live.publish == self._swap.mode

    def is_of_another_mode(self, live: PolicyVersion) -> bool:
        """Whether `policy.publish` was changed since the live version was published."""
        return live.publish not in (None, self._swap.mode)

    async def take_back(self, version: int, base: int) -> None:
        """Make `base` live again instead of `version`; where vLLM cannot have it now, the proxy goes on trying."""
        try:
            await self._swap.activate(await self._store.versions.get(base), expected=version)
        except Superseded:
            log.warning("policy version %d is not taken back: another one was made live", version)
        except LightningError as error:
            log.error("policy version %d is live again, but not in vLLM yet: %s", base, error.message)
            await self._store.versions.set_live(base)

    async def _verify_adapters(self, version: PolicyVersion, samples: Sequence[Sample]) -> None:
        """Load them and verify what vLLM serves; once more where it was restarted meanwhile, and knows them no more."""
        for _ in range(VERIFY_RESTARTS):
            await self._swap.load(version)
            try:
                return await self._verify_each_adapter(version, samples)
            except VllmError:
                if await self._has_adapters(version):
                    raise
                log.warning("vLLM was restarted while its weights were verified: once more")
        raise PublishError(
            f"vLLM was restarted {VERIFY_RESTARTS} times while policy version {version.version} was verified (its log "
            "may say why); the previous version stays live"
        )

    async def _has_adapters(self, version: PolicyVersion) -> bool:
        """Whether every server that answers still has all that was loaded."""
        servers = await self._swap.vllm.reachable()
        served = [{model["id"] for model in await server.models()} for server in servers]
        return all(models.issuperset(version.served_models) for models in served)

    async def _verify_each_adapter(self, version: PolicyVersion, samples: Sequence[Sample]) -> None:
        """By what its own agents were asked, or the others' where a step has nothing of them."""
        for adapter, model in {DEFAULT_ADAPTER: str(version.served_model), **version.adapters}.items():
            own = [sample for sample in samples if sample.adapter == adapter]
            await self._verify(model, own or samples, adapter)

    async def _verify_merged(self, version: PolicyVersion, samples: Sequence[Sample]) -> None:
        """Verify what vLLM serves now, unless it serves something else by then: restarted, or changed by hand."""
        while True:
            await self._swap.restore(set())
            try:
                await self._verify(await self._swap.vllm.base_model(), samples)
            except PublishError:
                if (live := await self._store.versions.live()).version != version.version:
                    raise Superseded(f"policy version {live.version} was made live meanwhile") from None
                if await self._swap.serves(version):
                    raise
                log.warning("vLLM was restarted while its weights were verified: once more")
            else:
                return

    async def abandon_unfinished(self, why: str = "the trainer was stopped while it published this version") -> None:
        """Versions that a killed trainer was publishing, or this one gave up, will not go live."""
        for version in await self._unfinished():
            await self._store.versions.failed(version.version, why)
            await self._remove(version)

    async def forget_unfinished(self) -> None:
        """As if it had not been tried: the next try gets the version's number, for what is stale goes by numbers."""
        for version in await self._unfinished():
            await self._store.versions.forget_unfinished(version.version)
            await asyncio.to_thread(shutil.rmtree, self._directory / f"v{version.version}", ignore_errors=True)

    async def _unfinished(self) -> list[PolicyVersion]:
        return [version for version in await self._store.versions.all() if version.status == "publishing"]

    async def _save(self, step: int, metrics: dict[str, Any]) -> PolicyVersion:
        number = await self._store.versions.new(self._swap.mode, step, metrics)
        path = self._directory / f"v{number}"
        lora = self._swap.mode == "lora"
        await asyncio.to_thread(self._trainer.save_weights, path, merged=not lora)
        served = f"{self._config.alias}-v{number}" if lora else await self._swap.vllm.base_model()
        await self._store.versions.saved(
            number, str(path), served, {own: f"{served}.{own}" for own in self._config.adapters}
        )
        return await self._store.versions.get(number)

    async def _verify(self, model: str, samples: Sequence[Sample], adapter: str = DEFAULT_ADAPTER) -> None:
        """Let vLLM go on from the prompts of a few samples, and compare its log-probabilities with the trainer's own.

        Every replica is asked, but for one that goes away meanwhile: it gets the weights before it serves again. Not by
        prompt_logprobs: they end the engine of vLLM 0.32 on a CPU with LoRA enabled.
        """
        chosen = _varied(samples, self._config.verify_samples)
        prompts = [sample.token_ids[: sample.mask.index(1)] for sample in chosen] or [(0,)]
        servers = await self._swap.vllm.reachable()
        if not any([await self._verify_server(server, model, prompts, adapter) for server in servers]):
            raise UpstreamUnreachable("the published weights are not verified yet: vLLM went away")
        self._served[adapter] = self._trainer.adapter(adapter)

    async def _verify_server(
        self, server: VllmServer, model: str, prompts: Sequence[Sequence[int]], adapter: str
    ) -> bool:
        """False if the server goes away meanwhile."""
        try:
            answers = [await self._sample(server, model, prompt) for prompt in prompts]
        except (UpstreamUnreachable, UpstreamTimeout) as error:
            log.warning("the published weights are not verified there: %s", error)
            return False
        rows = [[*prompt, *ids] for prompt, (ids, _) in zip(prompts, answers, strict=True)]
        difference = _difference(await asyncio.to_thread(self._trainer.logprobs, rows, None, adapter), answers)
        tolerance = self._config.verify_tolerance or TOLERANCE[self._trainer.policy_model.dtype]
        if not difference <= tolerance:  # NaN fails too
            raise PublishError(
                f"vLLM does not serve the weights that were published as {model}: its log-probabilities of "
                f"{sum(len(ids) for ids, _ in answers)} tokens differ from the trainer's by {difference:.4g} on "
                f"average (policy.verify_tolerance is {tolerance:g}); the previous version stays live"
            )
        if adapter in self._served and difference > tolerance * ROUNDING:
            as_before = await asyncio.to_thread(self._trainer.logprobs, rows, self._served[adapter], adapter)
            before = _difference(as_before, answers)
            if before < difference / 2:
                raise PublishError(
                    "vLLM still serves the weights from before: its log-probabilities differ from theirs by "
                    f"{before:.4g} on average, and from those of the published weights by {difference:.4g}"
                )
        return True

    async def _sample(self, server: VllmServer, model: str, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        """vLLM's answer; waits for the only server until `stop`, if it is away: the proxy puts it in line then."""
        for _ in range(VERIFY_TRIES):
            try:
                return await server.sample(model, prompt, VERIFIED_TOKENS)
            except (UpstreamUnreachable, UpstreamTimeout) as error:
                if await self._another_answers(server):
                    raise
                log.warning("verifying the published weights waits: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), RETRY_S)
                if self.stop.is_set():
                    raise
        raise UpstreamUnreachable(f"the published weights are not verified yet: vLLM is away for {VERIFY_TRIES} tries")

    async def _another_answers(self, server: VllmServer) -> bool:
        try:
            return any(other is not server for other in await self._swap.vllm.reachable())
        except (UpstreamUnreachable, UpstreamTimeout):
            return False

    async def _prune(self) -> None:
        """Remove the files of old versions, except those that running rollouts or `keep` keep to."""
        versions = [v for v in await self._store.versions.all() if v.path is not None]
        keep = {v.version for v in versions[-self._config.keep_versions :]} | {
            (await self._store.versions.live()).version
        }
        keep |= set() if self.keep is None else await self.keep()
        keep |= (
            await self._store.versions.pinned(time.time() - self._config.pin_timeout_s)
            if self._swap.mode == "lora"
            else set()
        )
        for version in versions:
            if version.version not in keep:
                await self._remove(version)

    async def _remove(self, version: PolicyVersion) -> None:
        if self._swap.mode == "lora":
            with suppress(LightningError):  # a server that is away has unloaded them already
                await self._swap.unload(version)
        await self._store.versions.forget_files(version.version)
        await asyncio.to_thread(shutil.rmtree, self._directory / f"v{version.version}", ignore_errors=True)


def _difference(ours: Sequence[Sequence[float]], answers: Sequence[tuple[list[int], list[float]]]) -> float:
    """Mean absolute difference over the answers' tokens, which end the rows; NaN without any."""
    differences = [
        abs(a - b)
        for row, (ids, served) in zip(ours, answers, strict=True)
        for a, b in zip(row[len(row) - len(ids) :], served, strict=True)
    ]
    return math.fsum(differences) / len(differences) if differences else math.nan


def _varied(samples: Sequence[Sample], count: int) -> Sequence[Sample]:
    """Up to `count` samples, spread evenly."""
    return samples[:: max(1, len(samples) // count)][:count]
