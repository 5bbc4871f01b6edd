"""Asks the policy's own tokenizer: its vLLM, or else the files of its model. Nothing is downloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...core.config.root import Config
from ...core.errors import LightningError
from ...proxy.api.parts import Parts
from ...serving.mode import trained_model
from ...serving.vllm import VllmFleet
from .decoding import Undecodable, token_texts

PATIENCE_S = 5.0


async def policy_texts(p: Parts, token_ids: Sequence[int]) -> list[str | None] | None:
    """Return the text of each token, as `token_texts` does; None where no tokenizer is at hand."""
    if p.swap is not None and p.watch is not None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await _from_vllm(p.swap.vllm, token_ids)
        except (LightningError, TimeoutError, Undecodable):
            pass
    return await asyncio.to_thread(_from_files, p.config, token_ids)


async def _from_vllm(vllm: VllmFleet, token_ids: Sequence[int]) -> list[str | None]:
    """Ask a server from here, and find the texts in a thread: long answers would hold up the calls under way."""
    server, loop = (await vllm.reachable())[0], asyncio.get_running_loop()

    async def decode(ids: Sequence[int]) -> str:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.decoded(ids), loop))

    async def encode(text: str) -> list[int]:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.encoded(text), loop))

    return await asyncio.to_thread(lambda: asyncio.run(token_texts(token_ids, decode, encode)))


def _from_files(config: Config, token_ids: Sequence[int]) -> list[str | None] | None:
    model = config.policy.model or trained_model(config.store)
    tokenizer = None if model is None else _loaded(model)
    if tokenizer is None:
        return None

    async def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    async def encode(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False).ids]

    try:
        return asyncio.run(token_texts(token_ids, decode, encode))
    except (Undecodable, OverflowError):
        return None


@lru_cache(1)
def _loaded(model: str) -> Any:
    """The tokenizer of a directory or of a model that was fetched before; None without it."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from tokenizers import Tokenizer

        path = Path(model)
        file = path / "tokenizer.json" if path.is_dir() else try_to_load_from_cache(model, "tokenizer.json")
        return Tokenizer.from_file(str(file)) if isinstance(file, str | Path) else None
    except Exception:  # no such package or file, or one that it cannot read: ids are shown
        return None
