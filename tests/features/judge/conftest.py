"""A scripted judge that ranks by numbers, and rewarders that try again soon."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.judging import ScriptedJudge, by_number, judging


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "GROUPS_POLL_S"):
        monkeypatch.setattr(f"lightning_proxy.features.judge.scoring.{name}", 0.1)


@pytest.fixture
async def judge() -> AsyncIterator[ScriptedJudge]:
    async with judging(by_number) as judge:
        yield judge
