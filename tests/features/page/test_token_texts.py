"""Tokens as texts, by the files of the policy's model, or not at all; also where tokens share characters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest

from lightning_proxy.features.page import proxy as page
from support.rewarded import record, train
from support.views import byte_tokenizer

Running = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
def ids_of(tmp_path: Path) -> Callable[[str], list[int]]:
    """The ids of a text by a model's tokenizer."""
    return byte_tokenizer(tmp_path)


async def shown(system: Any, query: str = "") -> Any:
    status, answer = await system.call("GET", f"/rollouts/good/tokens{query}")
    assert status == 200, answer
    return answer["data"]


async def test_answers_say_text_log_probability_and_advantage(
    running: Running, tmp_path: Path, ids_of: Callable[[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, add_texts = [], page._add_texts

    def watched(*args: Any) -> None:
        threads.append(current_thread())
        add_texts(*args)

    monkeypatch.setattr(page, "_add_texts", watched)
    async with running(tmp_path, policy={"model": str(tmp_path)}) as system, system.store() as store:
        await record(store, "good", ["a €", "b"], 1.0, ids_of)
        await record(store, "bad", ["c"], 0.0, ids_of)
        before = await shown(system)
        step = await train(store)
        answer = {"call_id": "good-0", "seq": 0, "step": None, "advantage": None, "token_ids": ids_of("a €"),
                  "logprobs": [-0.5] * 5, "texts": ["a", " ", None, None, "€"]}  # fmt: skip
        assert before[0] == answer
        first, second = await shown(system)
        assert first == answer | {"step": step, "advantage": 0.5}
        assert await shown(system, "?call_id=good-1") == [second]
        assert (await system.call("GET", "/rollouts/good/tokens?call_id=x"))[0] == 404
        assert main_thread() not in threads, "no call waits while texts are found"


@pytest.mark.parametrize("policy", [{}, {"model": "none/such"}])
async def test_without_a_tokenizer_ids_are_shown(running: Running, tmp_path: Path, policy: dict[str, str]) -> None:
    async with running(tmp_path, policy=policy) as system, system.store() as store:
        await record(store, "good", ["ab"], 1.0)
        (run,) = await shown(system)
        assert (run["texts"], run["token_ids"]) == (None, [97, 98])
