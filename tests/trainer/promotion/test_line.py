"""Which weights go on from which."""

from __future__ import annotations

import pytest

from lightning_proxy.trainer.promotion.line import goes_on

PARENTS = {1: 0, 2: 1, 3: 2, 4: 1}


@pytest.mark.parametrize(
    ("version", "live", "gone", "expected"),
    [
        (3, 3, set(), True),
        (3, 1, set(), True),
        (3, 0, set(), True),
        (3, 1, {2}, False),
        (3, 1, {3}, False),
        (3, 1, {1}, True),  # it was made live by hand since
        (4, 2, set(), False),
        (0, 1, set(), False),
        (-1, 0, set(), False),
    ],
)
def test_a_line_is_broken_by_what_was_taken_back(version: int, live: int, gone: set[int], expected: bool) -> None:
    assert goes_on(version, live, PARENTS, gone) is expected
