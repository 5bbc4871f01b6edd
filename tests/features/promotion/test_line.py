"""Which weights go on from which."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.features.promotion.gated import builds_on
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url

PARENTS = {1: 0, 2: 1, 3: 2, 4: 1}


@pytest.mark.parametrize(
    ("version", "live", "gone", "since", "expected"),
    [
        (3, 3, set(), 0, True),
        (3, 1, set(), 0, True),
        (3, 0, set(), 0, True),
        (3, 1, {2}, 0, False),
        (3, 1, {3}, 0, False),
        (3, 1, {1}, 0, True),  # it was made live by hand since
        (4, 2, set(), 0, False),
        (0, 1, set(), 0, False),
        (-1, 0, set(), 0, False),
        (3, 1, set(), 2**40, False),
    ],
)
async def test_a_line_is_broken_by_what_was_taken_back_or_is_older_than_a_choice(
    tmp_path: Path, version: int, live: int, gone: set[int], since: float, expected: bool
) -> None:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        store = Store(database)
        for made, base in PARENTS.items():
            assert await store.versions.new("lora", await store.steps.claim([], base), {}) == made
        for taken_back in gone:
            await store.versions.failed(taken_back, "it was worse")
        assert builds_on(await store.versions.line(version, live, since), live, since) is expected
