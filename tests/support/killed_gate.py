"""`lightning-proxy`, killed with SIGKILL when its gate decides: KILL_AT=before, or inside the transaction."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning_proxy.cli import app
from lightning_proxy.features.promotion.promotions import Promotions

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
