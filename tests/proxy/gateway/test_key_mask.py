"""An upstream's key is taken out of bytes, however they are split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_proxy.proxy.gateway.upstream import KeyMask

KEYS = st.text("ab-", min_size=12, max_size=16)  # few letters: the key begins again within itself


@given(KEYS, st.lists(st.text("ab-x", max_size=6)), st.lists(st.integers(1, 5), min_size=1))
def test_however_it_is_split_the_key_is_masked_and_nothing_else(key: str, texts: list[str], sizes: list[int]) -> None:
    data, mask, out = key.join(texts).encode(), KeyMask(key), b""
    at, n = 0, 0
    while at < len(data):
        size = sizes[n % len(sizes)]
        out += mask.feed(data[at : at + size])
        at, n = at + size, n + 1
    out += mask.end()
    assert len(out) == len(data)
    assert key.encode() not in out
    assert all(masked in (byte, ord("*")) for masked, byte in zip(out, data, strict=True))
    assert (out == data) == (key.encode() not in data)


@given(KEYS, st.binary(max_size=50))
def test_only_what_may_be_the_keys_beginning_is_held_back(key: str, data: bytes) -> None:
    event = b"data: " + data.replace(b"\n", b"") + b"\n\n"
    assert KeyMask(key).feed(event) == event.replace(key.encode(), b"*" * len(key)), "no event ever waits"
