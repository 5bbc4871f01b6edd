"""Edges between calls, found in sessions of real and of played programs, and compared with what these did."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.scripted import Proxy, scripted
from support.sessions import Session, played, recorded, replay

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERE = Path(__file__).parent
# How much of it is found at least without a name.
RECALL = {"one rollout": 0.88, "continues": 1, "delegates": 0.9, "returns": 0.9, "edits": 0.95, "compacts": 0.8}
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


async def test_unnamed_sessions_at_the_same_time_are_told_apart(proxy: Proxy) -> None:
    """All at once: those of played programs with one key, those of real ones, which have texts in common, with theirs.

    What is found without a name is right, and most of it is found. Runs of different programs or users are never one.
    """
    found = await asyncio.gather(*(replay(proxy, session) for session in SESSIONS))
    runs, table = dict[str, set[tuple[str, str]]](), Table()
    for session, replayed in zip(SESSIONS, found, strict=True):
        for i, call in enumerate(session.calls):
            runs.setdefault(replayed.rollouts[i], set()).add((session.label, call.run))
            for edge in replayed.edges[i] | call.edges:
                table.note(edge[0], edge in replayed.edges[i], edge in call.edges)
            for j in range(i):
                together = replayed.rollouts[i] == replayed.rollouts[j]
                table.note("one rollout", together, call.run == session.calls[j].run)
    assert [names for names in runs.values() if len(names) > 1] == []
    print(f"\n{table}")
    for name, wrong in table.wrong.items():
        assert wrong == 0, f"{name}\n{table}"
    assert {name: table.recall(name) >= least for name, least in RECALL.items()} == dict.fromkeys(RECALL, True), table


class Table:
    """What was found, wrongly found, and missed, by name."""

    def __init__(self) -> None:
        self.right, self.wrong, self.missed = Counter[str](), Counter[str](), Counter[str]()

    def note(self, name: str, is_found: bool, is_there: bool) -> None:
        self.right[name] += is_found and is_there
        self.wrong[name] += is_found and not is_there
        self.missed[name] += is_there and not is_found

    def recall(self, name: str) -> float:
        return self.right[name] / (self.right[name] + self.missed[name])

    def __str__(self) -> str:
        return "\n".join(
            f"{name:12}{n:4} right{self.wrong[name]:4} wrong{self.missed[name]:4} missed"
            for name, n in self.right.items()
        )


async def test_the_document_describes_contexts(proxy: Proxy) -> None:
    schemas = (await proxy.get("/openapi.json"))["components"]["schemas"]
    assert {"contexts", "rejected"} <= set(schemas["Call"]["properties"])
    assert "contexts" in schemas["Status"]["properties"]


async def test_the_status_counts_contexts_of_rollouts_that_have_ended(proxy: Proxy) -> None:
    (session,) = (one for one in SESSIONS if one.label == "the best of three, at once")
    before = (await proxy.get("/status"))["contexts"]
    rollout = (await replay(proxy, session, "counted")).rollouts[0]
    assert (await proxy.get("/status"))["contexts"] == before
    await proxy.post("/reward", {"rollout_id": rollout, "reward": 1.0})
    counts = (await proxy.get("/status"))["contexts"]
    assert counts == {"new": 1, "continues": 4, "rejected": 2}
