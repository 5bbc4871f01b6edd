"""A real vLLM serves weights that are all trained: a tied embedding and a norm change what it says, and come back."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.serving.operator import operator_headers
from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import VllmFleet, operator_session
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.types import Sample
from support.models import TEMPLATE
from support.sections import PolicyConfig, TrainerConfig
from support.served import own_vllm

torch = pytest.importorskip("torch")

from tokenizers import Tokenizer  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from lightning_proxy.commands.demo.model import cache_directory, prepare_model  # noqa: E402
from lightning_proxy.trainer.publish import Publisher  # noqa: E402
from lightning_proxy.trainer.step.trainer import LightningTrainer  # noqa: E402
from lightning_proxy.trainer.verify import WeightEvidence  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NORM, EMBEDDING, LAYER = "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
PROMPT = (40, 41, 42, 43)
SAMPLE = Sample("r", "t", (*PROMPT, 44), (0, 0, 0, 0, 1), (0.0,) * 4 + (-5.0,), (0.0,) * 4 + (1.0,), (1.0,) * 5)
SAME, MOVED = 0.002, 0.05  # nats on average


def save_tied_model(directory: Path) -> Path:
    smollm = prepare_model(cache_directory())
    torch.manual_seed(0)
    size = Tokenizer.from_file(str(smollm / "tokenizer.json")).get_vocab_size()
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
            initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        )
    ).save_pretrained(directory)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm / name, directory / name)
    return directory


async def no_samples(_: object) -> list[Sample]:
    return []  # no agent was answered


class Bench:
    """A trainer of all weights and the vLLM that serves them."""

    def __init__(self, trainer: LightningTrainer, publisher: Publisher, swap: Swap, store: Store) -> None:
        self.trainer, self.publisher, self.swap, self.store = trainer, publisher, swap, store

    async def publish(self, changed: dict[str, Callable[[Any], Any]]) -> int:
        """Change weights of the trainer's, publish them; returns their version."""
        with torch.no_grad():
            for name, parameter in self.trainer.policy_model.named_parameters():
                if name in changed:
                    parameter.copy_(changed[name](parameter))
        base = (await self.store.versions.live()).version
        step = await self.store.steps.claim((), base)
        await self.store.steps.trained(step, "", {})
        await self.publisher.publish(step, [SAMPLE], {}, base, asyncio.Event())
        await self.publisher.verify_live(base + 1, no_samples, asyncio.Event())
        live = await self.store.versions.live()
        assert live.verified
        return live.version

    async def far_from(self, weights: dict[str, Any]) -> float:
        """How far the log-probabilities of what vLLM samples now are from those under these weights, in nats."""
        (server,) = self.swap.vllm.servers
        model = await server.base_model()
        answers = [await server.sample(model, PROMPT, 16) for _ in range(4)]
        own = self.trainer.adapter()
        self.trainer.weight_sets.set({"default": weights})
        ours = self.trainer.logprobs([[*PROMPT, *ids] for ids, _ in answers])
        self.trainer.weight_sets.set({"default": own})
        evidence = WeightEvidence()
        for (_, served), row in zip(answers, ours, strict=True):
            evidence.add(served, row[len(PROMPT) :], row[len(PROMPT) :])
        assert math.isfinite(evidence.difference)
        return evidence.difference


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Bench]:
    model = await asyncio.to_thread(save_tied_model, directory / "model")
    policy = PolicyConfig(model=str(model), directory=directory / "lightning-policy", keep_versions=9)
    config = TrainerConfig(weights="full", report_to=[], dtype="float32", learning_rate=1e-5)
    store_config = StoreConfig(url=f"sqlite:///{directory}/store.db")
    with own_vllm(directory, model, TEMPLATE) as url:
        async with opened(store_config) as database, operator_session() as session:
            store, headers = Store(database), operator_headers(policy.directory)
            fleet = VllmFleet(session, [url], headers, str(model))
            swap = Swap(store, fleet, "merged", policy.directory)
            trainer = LightningTrainer(config, policy)
            yield Bench(trainer, Publisher(policy, store, swap, trainer), swap, store)


def noise(scale: float) -> Callable[[Any], Any]:
    return lambda weight: weight + scale * torch.randn_like(weight)


async def test_what_vllm_serves_moves_with_each_kind_of_weight_and_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as b:
        first = b.trainer.adapter()
        assert await b.far_from(first) < SAME
        for changed in (
            {NORM: lambda weight: 1.3 * weight},
            {EMBEDDING: noise(0.1)},
            {LAYER: noise(0.2)},
            {NORM: lambda weight: 0.7 * weight, EMBEDDING: noise(0.1)},
        ):
            before = b.trainer.adapter()
            version = await b.publish(changed)
            last = b.trainer.adapter()
            assert {name for name, weight in last.items() if not torch.equal(weight, before[name])} == set(changed)
            assert await b.far_from(last) < SAME
            assert await b.far_from(before) > MOVED, f"{list(changed)} did not reach vLLM"
        await b.swap.promote(0)
        assert await b.far_from(first) < SAME and await b.far_from(last) > MOVED
        await b.swap.promote(version)
        assert await b.far_from(last) < SAME and await b.far_from(first) > MOVED
