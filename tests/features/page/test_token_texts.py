"""Tokens as texts: by vLLM, by the files of the policy's model, or not at all; also where tokens share characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from threading import Thread, current_thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_proxy.features.page import texts as page_texts
from lightning_proxy.features.page.texts import MARK, Decode, Encode, Undecodable, token_texts
from support.rewarded import record, train

Running = Callable[..., AbstractAsyncContextManager[Any]]


def decode(ids: Sequence[int]) -> str:
    """A byte is a token; 256 is `<s>`, and a first blank is left out, as SentencePiece does."""
    text = b"".join(b"<s>" if token == 256 else bytes([token]) for token in ids).decode(errors="replace")
    return text.removeprefix(" ")


def encode(text: str) -> list[int]:
    return [*f" {text}".encode()]


def test_a_characters_first_token_has_its_text() -> None:
    ids = [256, *" 5 €!".encode(), 0xF0, 0x9F]
    assert token_texts(ids, decode, encode) == ["<s>", " ", "5", " ", "€", None, None, "!", "�", "�"]


@given(st.text(max_size=40).filter(lambda text: MARK[0] not in text and "�" not in text))
def test_the_texts_of_tokens_are_the_text(text: str) -> None:
    texts = token_texts([*text.encode()], decode, encode)
    assert "".join(one or "" for one in texts) == text
    assert [one is None for one in texts] == [byte & 0xC0 == 0x80 for byte in text.encode()]


def test_tokens_that_look_like_the_mark_have_no_texts() -> None:
    def as_mark(ids: Sequence[int]) -> str:
        return decode([token for one in ids for token in (encode(MARK) if one == 1 else [one])])

    with pytest.raises(Undecodable):
        token_texts([1, 2], as_mark, encode)


def test_tokens_that_are_never_characters_are_not_asked_about_for_long() -> None:
    asked = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal asked
        asked += len(ids)
        return decode(ids)

    broken = Random(0).choices(range(128, 256), k=20_000)
    assert len(token_texts(broken, counted, encode)) == len(broken)
    assert asked < 5 * len(broken)


async def shown(system: Any, query: str = "") -> Any:
    status, answer = await system.call("GET", f"/rollouts/good/tokens{query}")
    assert status == 200, answer
    return answer["data"]


async def test_answers_say_text_log_probability_and_advantage(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await record(store, "good", ["a€", "b"], 1.0)
        await record(store, "bad", ["c"], 0.0)
        before = await shown(system)
        step = await train(store)
        answer = {"call_id": "good-0", "seq": 0, "step": None, "advantage": None, "token_ids": [*"a€".encode()],
                  "logprobs": [-0.5] * 4, "texts": ["a", "€", None, None]}  # fmt: skip
        assert before[0] == answer
        first, second = await shown(system)
        assert first == answer | {"step": step, "advantage": 0.5}
        assert await shown(system, "?call_id=good-1") == [second]
        assert (await system.call("GET", "/rollouts/good/tokens?call_id=x"))[0] == 404


async def test_no_call_waits_while_texts_are_found(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Thread] = []

    def found(ids: Sequence[int], decode: Decode, encode: Encode) -> list[str | None]:
        threads.append(current_thread())
        return token_texts(ids, decode, encode)

    monkeypatch.setattr(page_texts, "token_texts", found)
    async with running(tmp_path) as system, system.store() as store:
        await record(store, "good", ["a€"], 1.0)
        (run,) = await shown(system)
        assert (run["texts"], len(threads)) == (["a", "€", None, None], 1)
        assert threads[0] is not current_thread()


async def test_without_vllm_the_files_of_the_model_tell(running: Running, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.save(str(tmp_path / "tokenizer.json"))
    async with running(tmp_path, policy={"model": str(tmp_path)}) as system, system.store() as store:
        await record(store, "good", ["a €"], 1.0, lambda text: bpe.encode(text).ids)
        system.vllm.odd = b"[]"
        (run,) = await shown(system)
        assert run["texts"] == ["a", " ", "€", None, None]


async def test_without_a_tokenizer_ids_are_told(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await record(store, "good", ["ab"], 1.0)
        system.vllm.odd = b"[]"
        (run,) = await shown(system)
        assert (run["texts"], run["token_ids"]) == (None, [97, 98])
