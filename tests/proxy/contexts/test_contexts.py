"""Edges between calls, found in sessions of real and of played programs, and compared with what these did."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.scripted import Proxy, scripted
from support.sessions import Session, played, recorded, replay

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERE = Path(__file__).parent
SESSIONS = [*recorded(HERE / "sessions.jsonl"), *played(HERE / "scenarios.txt")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxy]:
    async with scripted(tmp_path_factory.mktemp("contexts")) as (one,):
        yield one


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.label)
async def test_the_edges_of_a_session_are_those_that_its_program_made(proxy: Proxy, session: Session) -> None:
    found = await replay(proxy, session, session.label.replace(" ", "-").replace(",", ""))
    assert [sorted(edges) for edges in found.edges] == [sorted(call.edges) for call in session.calls]
    assert found.rejected == {i for i, call in enumerate(session.calls) if call.rejected}


async def test_the_status_counts_contexts_of_rollouts_that_have_ended(proxy: Proxy) -> None:
    (session,) = (one for one in SESSIONS if one.label == "the best of three, at once")
    before = (await proxy.get("/status"))["contexts"]
    rollout = (await replay(proxy, session, "counted")).rollouts[0]
    assert (await proxy.get("/status"))["contexts"] == before
    await proxy.post("/reward", {"rollout_id": rollout, "reward": 1.0})
    counts = (await proxy.get("/status"))["contexts"]
    assert counts == {"new": 1, "continues": 4, "rejected": 2}
