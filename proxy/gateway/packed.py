"""Unpacks request bodies: gzip, deflate and zstd, also several on top of each other."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any

from ...core.errors import InvalidRequest, TooLarge, UnsupportedMediaType
from ...core.http import LARGE, in_thread_if_large
from .asgi import Loan

MOST_LAYERS = 4  # encodings that one body may have
PIECE = 2**18  # bytes that are unpacked at a time
MOST_PARTS = 100  # members of gzip and frames of zstd that one body may have
_WINDOW = 23  # 8 MB, the most that zstd may need over HTTP: RFC 9659, section 3
_PLAIN = ("", "identity")


async def unpack(body: bytes, content_encoding: str, limit: int, loan: Loan) -> bytes:
    """Return the unpacked body, which `loan` holds as it grows.

    Raise TooLarge for more than `limit` bytes, InvalidRequest if it is damaged, Overloaded if memory for it is lacking.
    `content_encoding` names the encodings in the order in which they were applied (RFC 9110, section 8.4).
    """
    layers = [name for one in content_encoding.lower().split(",") if (name := one.strip()) not in _PLAIN]
    if not all(name in _UNPACKERS for name in layers):
        raise UnsupportedMediaType(f"Content-Encoding is gzip, deflate, zstd or none, got {content_encoding[:60]!r}")
    if len(layers) > MOST_LAYERS:
        raise UnsupportedMediaType(f"Content-Encoding names {len(layers)} encodings, the most is {MOST_LAYERS}")
    held = loan.size
    for name in reversed(layers):
        body = await _unpacked(body, name, limit, loan)
        loan.shrink(held)
        held = len(body)
    return body


async def _unpacked(body: bytes, name: str, limit: int, loan: Loan) -> bytes:
    size, found, pieces = 0, list[bytes](), _pieces(body, name)
    while piece := await in_thread_if_large(LARGE if found else len(body), partial(next, pieces, b"")):
        size += len(piece)
        if size > limit:
            raise TooLarge(f"the unpacked body is larger than {limit} bytes (proxy.max_body_mb)")
        await loan.grow(len(piece))
        found.append(piece)
    return b"".join(found)


def _pieces(body: bytes, name: str) -> Iterator[bytes]:
    """Yield what all members or frames hold, at most `PIECE` bytes at a time."""
    for _ in range(MOST_PARTS):
        unpacker, packed = _UNPACKERS[name](body), body
        while not unpacker.eof:
            try:
                piece = unpacker.decompress(packed, PIECE)
            except Exception as error:  # zlib.error and ZstdError share no class
                raise InvalidRequest(f"the body is not valid {name}: {error}") from None
            if piece:
                yield piece
            elif not unpacker.eof:
                raise InvalidRequest(f"the body is not valid {name}: it is cut off")
            packed = getattr(unpacker, "unconsumed_tail", b"")
        body = unpacker.unused_data
        if not body:
            return
    raise InvalidRequest(f"the body is {name} in more than {MOST_PARTS} parts")


def _deflate(body: bytes) -> Any:
    """Unpack zlib's format, as the standard has it, or without its header, as some clients send it."""
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _gzip(_: bytes) -> Any:
    return zlib.decompressobj(zlib.MAX_WBITS | 16)


def _zstd(_: bytes) -> Any:
    zstd = _zstd_module()
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW})


@cache
def _zstd_module() -> Any:
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


_UNPACKERS: dict[str, Callable[[bytes], Any]] = {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate, "zstd": _zstd}
