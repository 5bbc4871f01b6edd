"""Recorded traffic: what reached the proxy and what it answered, in the order of starts and ends.

A line of JSON each. The first: `versions` of the frameworks. Then, for each call n, `start` with path, key, truth (the
rollout that the agent named in a header), retry (of the client) and body; and `end` with status and answer, a streamed
one as the whole object that its events make up. No answer: the client left.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

Json = dict[str, Any]
FIXTURE = Path(__file__).parent / "traffic.jsonl.xz"


@dataclass
class Call:
    path: str
    truth: str
    retry: int
    body: Json
    status: int | None = None
    answer: Any = None


@dataclass
class Traffic:
    """`moments`: (call, whether it ended) in order."""

    versions: dict[str, str]
    calls: list[Call]
    moments: list[tuple[int, bool]]


def read(path: Path = FIXTURE) -> Traffic:
    first, *lines = map(orjson.loads, lzma.decompress(path.read_bytes()).splitlines())
    traffic = Traffic(first["versions"], [], [])
    for line in lines:
        if "start" in line:
            traffic.calls.append(Call(line["path"], line["truth"], line["retry"], line["body"]))
            traffic.moments.append((line["start"], False))
        else:
            call = traffic.calls[line["end"]]
            call.status, call.answer = line["status"], line["answer"]
            traffic.moments.append((line["end"], True))
    return traffic


def only(traffic: Traffic, wanted: Callable[[Call], bool]) -> Traffic:
    """The same calls without the others."""
    moments = [(n, ended) for n, ended in traffic.moments if wanted(traffic.calls[n])]
    return Traffic(traffic.versions, traffic.calls, moments)
