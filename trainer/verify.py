"""Verifies that vLLM serves the published weights: its log-probabilities are compared with the trainer's own."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from ..core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ..core.errors import PublishError, UpstreamTimeout, UpstreamUnreachable
from ..core.records import PolicyVersion
from ..serving.swap import Check, Superseded, Swap
from ..serving.vllm import VllmError, VllmServer
from .step.engine import TrainingEngine
from .step.shortage import give_back
from .types import Sample
from .waiting import all_of, before_retry, in_thread
from .weights import tolerance

log = logging.getLogger(__name__)

VERIFIED_TOKENS = 8
# Where these do not distinguish new weights from old ones, more answers are sampled at once, up to so many tokens.
MORE_ANSWERS = 16
MORE_TOKENS = 32
MOST_TOKENS = 2048
ROUNDS = 6
# In nats: as far as a log-probability can be from the served one.
FAR = 10.0
# By so many standard deviations the answers must be nearer to one of them.
SURE = 3.5
ADAPTER_FILE = "adapter_model.safetensors"
VERIFY_TRIES = 150
VERIFY_RESTARTS = 3

Give = Callable[[Check], Awaitable[None]]  # hands new weights to servers
Answer = tuple[list[int], list[float]]  # token ids, and their log-probabilities


class Verifier:
    """Lets vLLM continue the prompts of a few samples. Raises PublishError if it does not serve the new weights.

    It does not ask for prompt_logprobs, which end the engine of vLLM 0.32 on a CPU with LoRA enabled.
    """

    def __init__(self, config: PolicyConfig, swap: Swap, trainer: TrainingEngine) -> None:
        self._config = config
        self._swap = swap
        self._trainer = trainer
        self._seen: list[tuple[WeightEvidence, str | None]] = []  # by adapter and server; what was checked besides
        self._doubt: WeightEvidence | None = None  # that the live version is served
        self.remember_served()

    def remember_served(self) -> None:
        """Take the trainer's present weights for those that vLLM serves: new ones are told from them."""
        for adapter in (DEFAULT_ADAPTER, *self._config.adapters):
            self._trainer.remember_served(adapter)

    @property
    def measured(self) -> dict[str, Any]:
        """Return the step's metrics about what was verified last: the worst of its adapters and servers.

        An adapter that the step did not move counts only if none moved.
        """
        if not self._seen:
            return {}
        moved = [(evidence, by) for evidence, by in self._seen if evidence.tells_apart] or self._seen
        found: dict[str, Any] = {
            "verify_difference": max(evidence.difference for evidence, _ in self._seen),
            "verify_deviations": min(evidence.deviations for evidence, _ in moved),
        }
        by = next((by for _, by in moved if by is not None), None)
        return found if by is None else found | {"verified_by": by}

    async def load_and_verify(self, version: PolicyVersion, samples: Sequence[Sample], stop: asyncio.Event) -> None:
        """Load a version's adapters and verify them. Do it again if vLLM restarts meanwhile: it forgets them."""
        for _ in range(VERIFY_RESTARTS):
            await self._swap.load(version)
            self._seen, self._doubt = [], None
            try:
                for adapter, model in {DEFAULT_ADAPTER: str(version.served_model), **version.adapters}.items():
                    own = [sample for sample in samples if sample.adapter == adapter]
                    await self._verify(version, model, own or samples, adapter, stop)
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
        give_back()  # vLLM may wait for the memory
        while True:
            await self._swap.restore(set())
            self._seen = []
            try:
                base = await self._swap.vllm.base_model()
                return await self._verify(version, base, samples, DEFAULT_ADAPTER, stop)
            except PublishError:
                if (live := await self._swap.store.versions.live()).version != version.version:
                    raise Superseded(f"policy version {live.version} was made live meanwhile") from None
                if await self._swap.has_label(self._swap.vllm, version):
                    raise
                log.warning("vLLM restarted while its weights were verified: trying again")

    async def sees_new_weights_in(self, rows: AsyncIterator[Sample], evidence: WeightEvidence) -> bool:
        """Return whether agents' answers, by a server's new weights alone, show that it serves those.

        They are added to the `evidence`; no more are scored than it takes. Where they look like the old weights', a
        name is no proof in `verify_merged`, which comes next.
        """
        tokens = MORE_ANSWERS * MORE_TOKENS
        while evidence.may_become_clear and (some := [row async for row in _first(rows, tokens)]):
            new = await in_thread(self._trainer.scores_of, some)
            old = await in_thread(self._trainer.scores_of, some, served=True)
            evidence.add(*_of_answers(some, new, old))
        give_back()
        self._doubt = evidence if evidence.is_old else None
        if not (evidence.is_new and evidence.difference <= self._tolerance):
            return False
        self._seen = [(evidence, None)]
        self._trainer.remember_served(DEFAULT_ADAPTER)
        return True

    async def give_checked(
        self, version: PolicyVersion, samples: Sequence[Sample], give: Give, stop: asyncio.Event
    ) -> None:
        """Have merged weights given to servers, each of which is verified before it answers agents."""
        await give(self._check(version, samples, stop))
        self._trainer.remember_served(DEFAULT_ADAPTER)
        give_back()

    def _check(self, version: PolicyVersion, samples: Sequence[Sample], stop: asyncio.Event) -> Check:
        """Check a server with new merged weights before it answers agents."""
        self._seen, self._doubt = [], None

        async def check(server: VllmServer) -> None:
            await self._verify_on(server, version, await server.base_model(), samples, DEFAULT_ADAPTER, stop)

        return check

    async def _has_adapters(self, version: PolicyVersion) -> bool:
        """Whether every server that answers still has all adapters of the version."""
        servers = await self._swap.vllm.reachable()
        served = [{model["id"] for model in await server.models()} for server in servers]
        return all(models.issuperset(version.served_models) for models in served)

    async def _verify(
        self, version: PolicyVersion, model: str, samples: Sequence[Sample], adapter: str, stop: asyncio.Event
    ) -> None:
        """Ask every replica. One that goes away meanwhile is left out: it gets the weights before it serves again."""
        verified = 0
        for server in await self._swap.vllm.reachable():
            try:
                await self._verify_on(server, version, model, samples, adapter, stop)
            except (UpstreamUnreachable, UpstreamTimeout) as error:
                log.warning("the published weights are not verified on one server: %s", error)
                continue
            verified += 1
        if not verified:
            raise UpstreamUnreachable("the published weights are not verified yet: vLLM went away")
        self._trainer.remember_served(adapter)
        give_back()

    async def _verify_on(
        self,
        server: VllmServer,
        version: PolicyVersion,
        model: str,
        samples: Sequence[Sample],
        adapter: str,
        stop: asyncio.Event,
    ) -> None:
        count = self._config.verify_samples
        chosen = samples[:: max(1, len(samples) // count)][:count]  # spread evenly
        prompts = [sample.token_ids[: sample.mask.index(1)] for sample in chosen] or [(0,)]
        evidence, by = await self._ask(server, model, prompts, adapter, stop), None
        if not evidence.is_new and self._doubt is not None:
            raise PublishError(f"agents got answers of the previous weights from {model}: {self._doubt}")
        if not evidence.is_new:
            by = await self._look_at_names(server, version, adapter, model, evidence)
        self._seen.append((evidence, by))

    async def _ask(
        self, server: VllmServer, model: str, prompts: Sequence[Sequence[int]], adapter: str, stop: asyncio.Event
    ) -> WeightEvidence:
        """Let the server answer until it is clear which weights do. PublishError if they are not the adapter's."""
        evidence = WeightEvidence()
        while evidence.may_become_clear:
            if not evidence.rounds:
                used = list(prompts)
                answers = await self._sample(server, model, used, stop)
            else:
                used = [prompts[i % len(prompts)] for i in range(MORE_ANSWERS)]
                answers = await all_of(server.sample(model, prompt, MORE_TOKENS) for prompt in used)
            rows = [[*prompt, *ids] for prompt, (ids, _) in zip(used, answers, strict=True)]
            ours = await in_thread(self._trainer.logprobs, rows, adapter)
            if not evidence.rounds:
                self._require_near(model, ours, answers)
            before = await in_thread(self._trainer.logprobs, rows, adapter, served=True)
            evidence.add(ours, before, answers)
        if evidence.is_old:
            raise PublishError(f"vLLM still serves the previous weights as {model}: {evidence}")
        return evidence

    async def _look_at_names(
        self, server: VllmServer, version: PolicyVersion, adapter: str, model: str, evidence: WeightEvidence
    ) -> str:
        """Where answers prove nothing: check the server's name for the weights, and that the files are the trainer's.

        Return what was checked. Raises PublishError if it is wrong.
        """
        if self._swap.mode == "merged":
            if not await self._swap.has_label(server, version):
                raise PublishError(f"vLLM does not say that it serves policy version {version.version}")
            by, what = "its label", ""
        else:
            path = Path(str(version.path)) / ("" if adapter == DEFAULT_ADAPTER else adapter)
            roots = [entry.get("root") for entry in await server.models() if entry["id"] == model]
            if roots != [str(path)]:
                raise PublishError(f"vLLM serves {model} from {roots}, not from {path}")
            digest = await in_thread(self._digest, path, adapter)
            by, what = "its name and its files", f" (sha256 {digest[:12]})"
        log.info("%s is verified by %s%s alone: %s", model, by, what, evidence)
        return by

    def _digest(self, path: Path, adapter: str) -> str:
        """The digest of an adapter's file; PublishError if it does not hold the trainer's weights."""
        ours, content = self._trainer.adapter(adapter), (path / ADAPTER_FILE).read_bytes()
        written = load(content)
        if written.keys() != ours.keys() or not all(torch.equal(written[k], w.cpu()) for k, w in ours.items()):
            raise PublishError(f"{path} does not hold the trainer's weights")
        return sha256(content).hexdigest()

    async def _sample(
        self, server: VllmServer, model: str, prompts: Sequence[Sequence[int]], stop: asyncio.Event
    ) -> list[Answer]:
        """The server's answers. If no other server answers, this one is waited for; the proxy restores its weights."""
        for _ in range(VERIFY_TRIES):
            try:
                return await all_of(server.sample(model, prompt, VERIFIED_TOKENS) for prompt in prompts)
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

    @property
    def _tolerance(self) -> float:
        return tolerance(self._trainer.settings, self._config)

    def _require_near(self, model: str, ours: Sequence[Sequence[float]], answers: Sequence[Answer]) -> None:
        """Raise PublishError if the answers are not those of the trainer's weights, whatever else they are."""
        difference, allowed = mean_difference(ours, answers), self._tolerance
        if not difference <= allowed:  # NaN fails too
            raise PublishError(
                f"vLLM does not serve the weights that were published as {model}: its log-probabilities of "
                f"{sum(len(ids) for ids, _ in answers)} tokens differ from the trainer's by {difference:.4g} on "
                f"average (policy.verify_tolerance is {allowed:g}); the previous version stays live"
            )


class WeightEvidence:
    """Evidence whether answers come from new weights or from the old ones.

    By token, it is how much nearer the served log-probability is to that of the new weights. The sum is judged by its
    own spread, so it does not matter how large rounding is.
    """

    def __init__(self) -> None:
        self.tokens = self.rounds = 0
        self._sum = self._squares = 0.0
        self._apart = [0.0, 0.0]  # from new and old

    def add(self, new: Sequence[Sequence[float]], old: Sequence[Sequence[float]], answers: Sequence[Answer]) -> None:
        """Add answers, and the log-probabilities of the rows that they end by new and by old weights."""
        self.rounds += 1
        for (served, by_new), (_, by_old) in zip(_pairs(new, answers), _pairs(old, answers), strict=True):
            nearer = abs(served - by_old) - abs(served - by_new)
            self.tokens += 1
            self._sum += nearer
            self._squares += nearer * nearer
            self._apart[0] += abs(served - by_new)
            self._apart[1] += abs(served - by_old)

    @property
    def difference(self) -> float:
        """Return the mean difference from the new weights' log-probabilities, in nats."""
        return self._apart[0] / max(1, self.tokens)

    @property
    def tells_apart(self) -> bool:
        """Return whether new and old weights differ in any of the answers' tokens."""
        return self._squares > 0

    @property
    def deviations(self) -> float:
        """Return how clearly the answers are those of the new weights; below 0, of the old ones."""
        return self._sum / math.sqrt(self._squares) if self.tells_apart else 0.0

    @property
    def is_new(self) -> bool:
        return self.deviations >= SURE

    @property
    def is_old(self) -> bool:
        return self.deviations <= -SURE

    @property
    def may_become_clear(self) -> bool:
        """Return whether more answers may still decide it."""
        if not self.rounds:
            return True
        by_then = (abs(self.deviations) + 2) * math.sqrt(MOST_TOKENS / max(1, self.tokens))
        more = self.tells_apart and self.tokens < MOST_TOKENS and self.rounds < ROUNDS
        return more and abs(self.deviations) < SURE <= by_then

    def __str__(self) -> str:
        old = self._apart[1] / max(1, self.tokens)
        return (
            f"the log-probabilities of {self.tokens} tokens differ by {self.difference:.4g} on average from those of "
            f"the published weights, and by {old:.4g} from those of the weights before"
        )


async def _first(rows: AsyncIterator[Sample], tokens: int) -> AsyncIterator[Sample]:
    """The first rows that have so many sampled tokens. Short ones are scored together: they share their prompts."""
    async for row in rows:
        yield row
        tokens -= sum(row.mask)
        if tokens <= 0:
            return


def _of_answers(
    samples: Sequence[Sample], new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]
) -> tuple[list[list[float]], list[list[float]], list[Answer]]:
    """What `WeightEvidence.add` takes, of the answers' tokens alone.

    A token that the new weights would not sample counts as far from them, and one that the old would not as far from
    those: top_p and the like leave a few out by rounding.
    """
    by_new, by_old, answers = [], [], list[Answer]()
    for sample, news, olds in zip(samples, new, old, strict=True):
        places = [i for i, sampled in enumerate(sample.mask) if sampled]
        by_new.append([max(news[i], sample.logprobs[i] - FAR) for i in places])
        by_old.append([max(olds[i], sample.logprobs[i] - FAR) for i in places])
        answers.append(([sample.token_ids[i] for i in places], [sample.logprobs[i] for i in places]))
    return by_new, by_old, answers


def _pairs(ours: Sequence[Sequence[float]], answers: Sequence[Answer]) -> Iterator[tuple[float, float]]:
    """Of each token of the answers, which end rows of `ours`: its log-probability as served, and ours."""
    for row, (ids, served) in zip(ours, answers, strict=True):
        yield from zip(served, row[len(row) - len(ids) :], strict=True)


def mean_difference(ours: Sequence[Sequence[float]], answers: Sequence[Answer]) -> float:
    """Compute the mean absolute difference over the answers' tokens, which end rows of `ours`; NaN without tokens."""
    differences = [abs(served - own) for served, own in _pairs(ours, answers)]
    return math.fsum(differences) / len(differences) if differences else math.nan
