"""What a burst of large requests took is given back to the system. In a process of its own: ours holds more besides."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_proxy.proxy.memory import STATM

BURST = """
import asyncio, random
from lightning_proxy.proxy import memory

async def main():
    looking = asyncio.create_task(memory.watch(0.02)) if {watched} else None
    await asyncio.sleep(0.1)
    bytearray(b"x" * (30 << 20))  # once such a block was freed, smaller ones are of the heap
    sizes, bodies, kept = random.Random(0), [], []
    for _ in range(600):
        bodies.append(bytearray(b"x" * sizes.randrange(100_000, 1_000_000)))
        kept.append(bytearray(sizes.randrange(1_000, 60_000)))  # something that stays, after each
    before = memory.resident_bytes()
    del bodies
    for _ in range(100):
        await asyncio.sleep(0.02)
        if memory.resident_bytes() < before / 4:
            break
    print(memory.resident_bytes() / before)

asyncio.run(main())
"""


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux")
def test_memory_of_a_burst_is_given_back() -> None:
    def left(watched: bool) -> float:
        program = BURST.format(watched=watched)
        return float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=50).stdout
        )

    assert left(watched=True) < 0.25
    assert left(watched=False) > 0.5  # else the test shows nothing
