"""Asks the policy's vLLM servers for their own metrics: calls, tokens, the KV cache."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from ..control.parts import Parts
from ..errors import LightningError
from ..policy.vllm import VllmServer
from ..upstreams.health import replica_name

ASKING_S = 2.0
# Several engines of a server each have a line.
NUMBER = re.compile(r"^vllm:(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)
COUNTS = {
    "running": "num_requests_running", "waiting": "num_requests_waiting",
    "read_tokens": "prompt_tokens_total", "sampled_tokens": "generation_tokens_total",
}  # fmt: skip


async def servers(p: Parts) -> list[dict[str, Any]]:
    """Return what each server says, or why it does not; nothing where no vLLM serves the policy."""
    return [] if p.swap is None else await asyncio.gather(*map(_asked, p.swap.vllm.servers))


async def _asked(server: VllmServer) -> dict[str, Any]:
    name = {"server": replica_name(server.base_url)}
    try:
        return name | numbers(await asyncio.wait_for(server.metrics(), ASKING_S))
    except TimeoutError:
        return name | {"problem": f"no answer within {ASKING_S:g} s"}
    except LightningError as error:
        return name | {"problem": error.message}


def numbers(text: str) -> dict[str, float | None]:
    """Return the numbers of a server's metrics, in Prometheus' text format; None for those that it does not have."""
    found: dict[str, list[float]] = {}
    for name, value in NUMBER.findall(text):
        found.setdefault(name, []).append(float(value))
    counts = {ours: int(sum(found[theirs])) if theirs in found else None for ours, theirs in COUNTS.items()}
    return counts | {"cache": max(found.get("kv_cache_usage_perc", []), default=None)}
