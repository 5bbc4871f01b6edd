"""What was said up to a response of another worker, which is known by its id alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, RolloutName
from lightning_proxy.proxy.dialects.as_chat.recorded import exchange_of, items_of
from lightning_proxy.proxy.gateway.recent import History
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import open_database
from lightning_proxy.store.store import Store


async def test_a_response_of_another_worker_is_read_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout is read whole once; after that, the rows of the other worker's new calls, however long it is."""
    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    name, items = RolloutName("r", None, None), list[Any]()
    mine = History(Store(database), None)
    async with Recorder(Store(database), merged=False) as recorder, Recorder(Store(database), merged=False) as others:

        async def turn(n: int) -> None:
            """Even ones are this worker's."""
            asked, said = [{"role": "user", "content": f"{n}" * 200}], [{"type": "message", "content": f"answer {n}"}]
            request = {"model": "m", "instructions": "i" * 200, "input": asked, "previous_response_id": f"resp_{n - 1}"}
            if n == 0:
                del request["previous_response_id"]
            start = CallStart(f"c{n}", name, "responses", "m", 0, request, 0.0)
            await (recorder, others)[n % 2].start(start)
            sampled = (Choice(0, (n,), (-1.0,), "stop"),)
            end = CallEnd(f"c{n}", "r", "ok", {"id": f"resp_{n}", "output": said}, 200, (1,), sampled)
            await (recorder, others)[n % 2].end(end)
            if n % 2 == 0:
                mine.add("r", f"c{n}", exchange=exchange_of(request, end.response))
            items.extend([*asked, *said])

        for n in range(40):
            await turn(n)
        assert items_of(await mine.up_to("r", "resp_39")) == items
        run, rows = database.all, list[int]()

        async def counted(sql: str, params: Any = None) -> Any:
            found = await run(sql, params)
            rows.append(len(found))
            return found

        monkeypatch.setattr(database, "all", counted)
        for n in range(40, 46):
            await turn(n)
            assert items_of(await mine.up_to("r", f"resp_{n}")) == items
        assert rows == [1] * 3
    await database.close()
