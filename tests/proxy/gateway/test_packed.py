"""Packed request bodies: what is known is unpacked, within bounds; what is not is refused."""

import asyncio
import gzip
import os
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import aiohttp
import orjson
import pytest

from lightning_proxy.proxy.errors import InvalidRequest, LightningError, TooLarge, UnsupportedMediaType
from lightning_proxy.proxy.gateway.asgi import Memory
from lightning_proxy.proxy.gateway.packed import MOST_PARTS, unpack
from support.cases import Case, cases_with
from support.relaying import MemoryRecorder, relaying, speaking

try:
    zstd: Any = import_module("compression.zstd")
except ImportError:
    zstd = import_module("backports.zstd")

LIMIT = 1_000_000
SAID = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "é" * 1000}]})


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def without_a_size(data: bytes, window: int = 20) -> bytes:
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window})
    return bytes(packer.compress(data) + packer.flush())


SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00note"  # a frame that decoders leave out: RFC 8878, section 3.1.2
PACK: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstd.compress, "gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress,
    "deflate-raw": raw_deflate, "identity": bytes, "": bytes,
}  # fmt: skip


def the_encoding(value: object) -> str:
    """An id that every process of the tests has alike."""
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        *((name.removesuffix("-raw"), pack(SAID)) for name, pack in PACK.items()),
        ("ZSTD", without_a_size(SAID)),
        ("zstd", zstd.compress(SAID[:9]) + SKIPPED + zstd.compress(SAID[9:])),
        ("gzip", gzip.compress(SAID[:9]) + gzip.compress(SAID[9:])),
        ("gzip, zstd", zstd.compress(gzip.compress(SAID))),
        ("deflate,identity , gzip,", gzip.compress(raw_deflate(SAID))),
    ],
    ids=the_encoding,
)
async def test_a_body_in_known_encodings_is_unpacked(encoding: str, body: bytes) -> None:
    with Memory(LIMIT, LIMIT).loan("key") as loan:
        assert await unpack(body, encoding, LIMIT, loan) == SAID
        assert loan.size == len(SAID) * (encoding not in ("", "identity"))


@pytest.mark.parametrize(
    ("encoding", "body", "error"),
    [
        ("br", b"x", UnsupportedMediaType),
        ("gzip, br", b"x", UnsupportedMediaType),
        ("compress", b"x", UnsupportedMediaType),
        ("gzip;q=1", b"x", UnsupportedMediaType),
        (", ".join(["gzip"] * 5), b"x", UnsupportedMediaType),
        *((name, b"this is not packed at all", InvalidRequest) for name in ("zstd", "gzip", "x-gzip", "deflate")),
        *((name, pack(SAID)[:-3], InvalidRequest) for name, pack in list(PACK.items())[:4]),
        *((name, b"", InvalidRequest) for name in ("zstd", "gzip", "deflate")),
        *((name, pack(SAID) + b"more", InvalidRequest) for name, pack in list(PACK.items())[:4]),
        *((n.removesuffix("-raw"), PACK[n](b" " * (LIMIT + 1)), TooLarge) for n in ("zstd", "gzip", "deflate-raw")),
        ("zstd", without_a_size(b" " * (LIMIT + 1)), TooLarge),
        ("zstd", zstd.compress(b" " * (LIMIT // 2 + 1)) * 2, TooLarge),
        ("gzip, zstd", zstd.compress(gzip.compress(b" " * (LIMIT + 1))), TooLarge),
        ("zstd, gzip", gzip.compress(zstd.compress(b" ") * (MOST_PARTS + 1)), InvalidRequest),
        ("zstd", SKIPPED * 10_000, InvalidRequest),
        ("zstd", without_a_size(os.urandom(100), window=27), InvalidRequest),
    ],
    ids=the_encoding,
)
async def test_what_is_unknown_damaged_or_too_large_is_refused(
    encoding: str, body: bytes, error: type[LightningError]
) -> None:
    with pytest.raises(error), Memory(LIMIT, LIMIT).loan("key") as loan:
        await unpack(body, encoding, LIMIT, loan)


@pytest.mark.parametrize("case", cases_with("request_encoding"), ids=lambda case: case["name"])
async def test_a_packed_request_is_recorded_as_what_it_says(case: Case) -> None:
    packed = PACK[case["request_encoding"]](SAID)
    status, request = await _recorded(packed, case["request_encoding"].removesuffix("-raw"))
    assert (status, request) == (case["status"], orjson.loads(SAID))


async def test_encodings_in_two_headers_are_those_of_one() -> None:
    assert await _recorded(zstd.compress(gzip.compress(SAID)), "gzip", "zstd") == (200, orjson.loads(SAID))


async def _recorded(body: bytes, *encodings: str) -> tuple[int, Any]:
    """The status that a client gets for this body, and the request as it is recorded."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()

    recorder, headers = MemoryRecorder(), [("Content-Encoding", one) for one in encodings]
    async with (
        speaking(answer) as base,
        relaying(base, recorder) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as reply,
    ):
        return reply.status, recorder.starts[0].request
