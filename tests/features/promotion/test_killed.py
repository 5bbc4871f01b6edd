"""A proxy that is killed between evidence and decision decides when it is started again, by the same numbers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.system import CLI
from lightning_proxy.cli import app
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.calls import ANSWERED
from support.paths import TESTS
from support.served import proxy_in_front

pytestmark = [pytest.mark.long, pytest.mark.sqlite]

DIES = (sys.executable, __file__)


async def fill(url: str, worse: bool) -> None:
    """A test with enough rewards for a decision."""
    config = Config.model_validate({"store": {"url": url}, "trainer": {"group_size": 2}})
    async with opened(config.store) as database:
        store, tests = Store(database), Promotions(database)
        version = await store.versions.new("lora", 1, {})
        await store.versions.saved(version, "/nowhere", f"policy-v{version}")
        await tests.begin(version, 1, 0)
        test = await tests.under_way()
        assert test is not None
        for n in range(40):
            side = await tests.assign(test, RolloutName(f"r{n}", f"t{n // 2}"), config)
            await database.commit([(ANSWERED, [{"rollout_id": f"r{n}", "version": side}])])
            await store.rewards.post([Reward(f"r{n}", float((side == version) != worse))], None, b"")


@pytest.mark.parametrize("moment", ["before", "inside"])
@pytest.mark.parametrize("worse", [True, False])
async def test_a_decision_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, worse: bool
) -> None:
    monkeypatch.setenv("KILL_AT", moment)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    async with proxy_in_front(tmp_path, DIES) as proxy:
        proxy.set("promotion", mode="gated")
        proxy.set("trainer", group_size=2)
        await fill(f"sqlite:///{proxy.store}", worse)
        start = asyncio.create_task(proxy.start())
        async with asyncio.timeout(60):
            while proxy.process is None:
                await asyncio.sleep(0.05)
            assert await proxy.process.wait() == -signal.SIGKILL
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        assert proxy.rows("SELECT status, decided_at FROM promotions") == [("testing", None)]
        assert proxy.rows("SELECT status FROM policy_versions ORDER BY version") == [("live",), ("candidate",)]
        proxy.program = CLI
        await proxy.start()
        decided: list[Any] = []
        async with asyncio.timeout(60):
            while not decided:
                await asyncio.sleep(0.1)
                decided = proxy.rows("SELECT status, evidence FROM promotions WHERE status <> 'testing'")
        status, evidence = decided[0]
        assert status == ("rejected" if worse else "promoted")
        assert json.loads(evidence)["metrics"]["reward"]["pairs"] == 20
        live = proxy.rows("SELECT version FROM policy_log ORDER BY n DESC LIMIT 1")
        assert live == [(0 if worse else 1,)]


def killed_when_deciding() -> None:
    """`lightning-proxy`, killed with SIGKILL when its gate decides: KILL_AT=before, or inside the transaction."""
    decide = Promotions.decide

    async def killed(self: Promotions, *args: Any) -> bool:
        if os.environ["KILL_AT"] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        write = self._db.write

        async def half(work: Any, size: int = 0) -> Any:
            async def then_die(db: Any) -> None:
                await work(db)
                os.kill(os.getpid(), signal.SIGKILL)

            return await write(then_die, size)

        self._db.write = half  # type: ignore[assignment, method-assign]
        return await decide(self, *args)

    Promotions.decide = killed  # type: ignore[assignment, method-assign]
    app()


if __name__ == "__main__":
    killed_when_deciding()
