"""How a process learns of what others write: a server tells it; a file says nothing, and is looked at again."""

from __future__ import annotations

import asyncio
from typing import Literal

# `prompts`: a version or a promotion; `rewards`: a reward, or a rollout that ended; `live`: the live policy version;
# `calls`: whatever recorders write.
Topic = Literal["keys", "prompts", "rewards", "live", "steps", "calls"]


LOOK_S = 5.0  # from one look to the next without news: who wrote may have ended before it told


class Changes:
    """Waits until it is worth looking at the store again. Each that looks has one of its own."""

    async def wait(self, seconds: float, longest: float = LOOK_S) -> None:
        """Return after so many seconds.

        Where a server tells of changes, return once something was written since the last return, but at most once in
        `seconds`; without news after `longest` s.
        """
        await asyncio.sleep(seconds)
