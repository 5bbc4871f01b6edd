"""What is kept of a rollout's turns: within limits, and without reading the rollout again for each call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, RolloutName
from lightning_proxy.proxy.dialects.turns import turn_of
from lightning_proxy.proxy.gateway.exact import AsText, earlier_turn
from lightning_proxy.proxy.gateway.recent import History
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import open_database
from lightning_proxy.store.store import Store

Json = dict[str, Any]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_the_rollouts_that_were_quiet_the_longest_are_forgotten(tmp_path: Path) -> None:
    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    recent = History(Store(database), lambda call, known: call.request, memory=3_300)
    asked = {"messages": [user("hi"), {"role": "assistant", "content": "ho"}, user("more")]}
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}]}
    for name in "abbbac":
        recent.add(name, "", turn_of(asked, response, (1, 2), (Choice(0, (3,), (-1.0,), "stop"),), (1,)))
    assert [len(recent.known(name).turns) for name in "acb"] == [2, 1, 0]
    await database.close()


async def test_an_edited_history_reads_the_rollout_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its length: after that, each call asks only whether another worker has answered."""
    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    name, answer = RolloutName("r", None, None), (Choice(0, (3,), (-1.0,), "stop"),)
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}]}
    edited = {"model": "m", "messages": [user("hi"), {"role": "assistant", "content": "edited"}, user("more")]}

    async def call(recorder: Recorder, call_id: str) -> None:
        await recorder.start(CallStart(call_id, name, "chat/completions", "m", 0, {"messages": [user("hi")]}, 0.0))
        await recorder.end(CallEnd(call_id, "r", "ok", response, 200, (1,), answer))

    read: list[str] = []
    for way in ("all", "quick"):
        run = getattr(database, way)
        monkeypatch.setattr(database, way, lambda sql, params=None, run=run: read.append(sql) or run(sql, params))
    async with Recorder(Store(database), merged=False) as mine, Recorder(Store(database), merged=False) as others:
        for n in range(100):
            await call(mine, f"c{n}")
        recent, statements = History(Store(database), lambda call, known: call.request), []
        for n in range(6):
            read.clear()
            with pytest.raises(AsText, match="edited"):
                await earlier_turn(recent, "r", edited)
            statements.append(len(read))
            await call(mine, f"d{n}")
            recent.add("r", f"d{n}")
        assert statements[1:] == [1] * 5
        await call(others, "another worker's")
        read.clear()
        with pytest.raises(AsText, match="edited"):
            await earlier_turn(recent, "r", edited)
        assert len(read) == 2
    await database.close()


async def test_what_another_worker_answers_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout is read whole once; after that, the rows of the other worker's new calls, however long it is."""
    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    name, messages, prompt = RolloutName("r", None, None), [user("hi")], (1,)
    async with Recorder(Store(database), merged=False) as mine, Recorder(Store(database), merged=False) as others:

        async def turn(recorder: Recorder, n: int) -> None:
            nonlocal messages, prompt
            said = {"role": "assistant", "content": f"answer {n}"}
            sampled = (Choice(0, (n + 2,), (-1.0,), "stop"),)
            request = {"model": "m", "messages": messages}
            await recorder.start(CallStart(f"c{n}", name, "chat/completions", "m", 0, request, 0.0))
            response = {"choices": [{"index": 0, "message": said}]}
            await recorder.end(CallEnd(f"c{n}", "r", "ok", response, 200, prompt, sampled))
            messages, prompt = [*messages, said, user("more")], (*prompt, n + 2, 1)

        for n in range(40):
            await turn((mine, others)[n % 2], n)
        recent, rows = History(Store(database), lambda call, known: call.request), list[int]()
        await earlier_turn(recent, "r", {"model": "m", "messages": messages})
        run = database.all

        async def counted(sql: str, params: Any = None) -> Any:
            found = await run(sql, params)
            rows.append(len(found))
            return found

        monkeypatch.setattr(database, "all", counted)
        for n in range(40, 46):
            await turn((mine, others)[n % 2], n)
            found = await earlier_turn(recent, "r", {"model": "m", "messages": messages})
            assert (found.ids.tolist(), found.messages) == ([*prompt[:-1]], messages[:-2])
        assert rows == [1] * 6
    await database.close()
