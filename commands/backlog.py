"""How far agents may run ahead of the policy: what they answered that is in no live version yet."""

from __future__ import annotations

import asyncio

from lightning_proxy.commands.control import ControlClient

POLL_S = 0.25


class Backlog:
    """Keeps rollouts fresh: opens no group while `limit` training rollouts are not in the live version yet.

    A group has `group_size` rollouts. A limit of less than a group is one of a group.
    """

    def __init__(self, api: ControlClient, limit: int, group_size: int) -> None:
        self._api, self._limit, self._group_size = api, max(limit, group_size), group_size
        self._room = 0

    async def wait(self) -> None:
        """Return when there is room for one more group."""
        while self._room < self._group_size:
            self._room = self._limit - await self._unpublished()
            if self._room < self._group_size:
                await asyncio.sleep(POLL_S)
        self._room -= self._group_size

    async def _unpublished(self) -> int:
        """Rollouts that run, wait for the trainer, or belong to the step that it works on."""
        last = (await self._api.policy())["last_step"]
        published = 0
        if last is not None:
            done = last["version"] is not None or last["metrics"].get("skipped")
            published = last["step"] if done else last["step"] - 1
        page = await self._api.rollouts(mode="train", limit=min(1000, 4 * self._limit))
        return sum(
            one["step"] > published
            if one["step"] is not None
            else not one["dropped"] and one["status"] in ("running", "completed")
            for one in page["data"]
        )
