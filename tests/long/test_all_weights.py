"""A real vLLM serves weights that are all trained: a tied embedding and a norm change what it says, and come back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from tokenizers import Tokenizer

from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.proxy.gateway.routing import difference
from lightning_proxy.serving.operator import operator_headers
from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import VllmFleet, operator_session
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.publish import Publisher
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Sample
from support.models import TEMPLATE, save_llama
from support.sections import PolicyConfig, TrainerConfig
from support.served import own_vllm
from support.training import require_seen_clearly

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NORM, EMBEDDING, LAYER = "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
PROMPT = (40, 41, 42, 43)
SAMPLE = Sample("r", "t", (*PROMPT, 44), (0, 0, 0, 0, 1), (0.0,) * 4 + (-5.0,), (0.0,) * 4 + (1.0,), (1.0,) * 5)
SAME, MOVED = 0.01, 0.05  # nats on average


def save_tied_model(directory: Path) -> Path:
    smollm = prepare_model(cache_directory())
    size = Tokenizer.from_file(str(smollm / "tokenizer.json")).get_vocab_size()
    save_llama(
        directory, size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm / name, directory / name)
    return directory


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[LightningTrainer, Publisher, Swap, Store]]:
    """A trainer of all weights and the vLLM that serves them."""
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
            yield trainer, Publisher(policy, store, swap, trainer), swap, store


def noise(scale: float) -> Callable[[Any], Any]:
    return lambda weight: weight + scale * torch.randn_like(weight)


async def test_what_vllm_serves_moves_with_each_kind_of_weight_and_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (trainer, publisher, swap, store):
        (server,) = swap.vllm.servers
        probe = partial(server.probe, await server.base_model())
        said, version = [await probe()], 0
        for changed in (
            {NORM: lambda weight: 1.3 * weight},
            {EMBEDDING: noise(0.1)},
            {LAYER: noise(0.2)},
            {NORM: lambda weight: 0.7 * weight, EMBEDDING: noise(0.1)},
        ):
            before = trainer.adapter()
            with torch.no_grad():
                for name, parameter in trainer.policy_model.named_parameters():
                    if name in changed:
                        parameter.copy_(changed[name](parameter))
            after = trainer.adapter().items()
            assert {name for name, weight in after if not torch.equal(weight, before[name])} == set(changed)
            step = await store.steps.claim((), version)
            await store.steps.trained(step, "", {})
            await publisher.publish(step, [SAMPLE], {}, version, asyncio.Event())
            version += 1
            await publisher.verify_live(version, AsyncMock(return_value=[]), asyncio.Event())
            assert (await store.versions.live()).version == version
            await require_seen_clearly(store, version)
            said.append(await probe())
            assert difference(*said[-2:]) > MOVED, f"{list(changed)} did not reach vLLM"
        for number, expected in ((0, said[0]), (version, said[-1])):
            await swap.promote(number)
            assert difference(expected, await probe()) < SAME
