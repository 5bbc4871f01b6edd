"""Unpacks request bodies: gzip, deflate and zstd, also several on top of each other."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from ..errors import InvalidRequest, TooLarge, UnsupportedMediaType

MOST_LAYERS = 4  # encodings that one body may have
MOST_PARTS = 100  # members of gzip and frames of zstd that one body may have
_WINDOW = 23  # 8 MB, the most that zstd may need over HTTP: RFC 9659, section 3
_PLAIN = ("", "identity")


def unpack(body: bytes, content_encoding: str, limit: int) -> bytes:
    """Return the unpacked body. Raise TooLarge for more than `limit` bytes, InvalidRequest if it is damaged.

    `content_encoding` names the encodings in the order in which they were applied (RFC 9110, section 8.4).
    """
    layers = [name for one in content_encoding.lower().split(",") if (name := one.strip()) not in _PLAIN]
    if not all(name in _UNPACKERS for name in layers):
        raise UnsupportedMediaType(f"Content-Encoding is gzip, deflate, zstd or none, got {content_encoding[:60]!r}")
    if len(layers) > MOST_LAYERS:
        raise UnsupportedMediaType(f"Content-Encoding names {len(layers)} encodings, the most is {MOST_LAYERS}")
    for name in reversed(layers):
        body = _unpacked(body, name, limit)
    return body


def _unpacked(body: bytes, name: str, limit: int) -> bytes:
    raw = bytearray()
    for part in _parts(body, name, limit + 1):
        raw += part
        if len(raw) > limit:
            raise TooLarge(f"the unpacked body is larger than {limit} bytes (proxy.max_body_mb)")
    return bytes(raw)


def _parts(body: bytes, name: str, most: int) -> Iterator[bytes]:
    """Yield what each member or frame holds, at most `most` bytes of it."""
    for _ in range(MOST_PARTS):
        unpacker = _UNPACKERS[name](body)
        try:
            yield unpacker.decompress(body, most)
        except Exception as error:  # zlib.error and ZstdError share no class
            raise InvalidRequest(f"the body is not valid {name}: {error}") from None
        if not unpacker.eof:
            raise InvalidRequest(f"the body is not valid {name}: it is cut off")
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
