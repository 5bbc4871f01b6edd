"""Completes ids, tasks and versions, for a shell that asks. The running proxy knows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import typer

from ..load import config_file

if TYPE_CHECKING:
    from ..api_client import ApiClient

PATIENCE_S = 2.0  # a person waits at a prompt
NEWEST = 500


def rollout_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Return ids of the newest rollouts that begin so."""

    async def look(api: ApiClient) -> Iterable[str]:
        return [one["rollout_id"] for one in (await api.rollouts(limit=NEWEST))["data"]]

    return known(context, incomplete, look)


def task_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Return ids of tasks that begin so."""

    async def look(api: ApiClient) -> Iterable[str]:
        return [one["task_id"] for one in (await api.request("GET", "/tasks"))["data"]]

    return known(context, incomplete, look)


def versions(context: typer.Context, incomplete: str) -> list[str]:
    """Return numbers of policy versions that begin so."""

    async def look(api: ApiClient) -> Iterable[str]:
        return [str(one["version"]) for one in (await api.request("GET", "/policy/versions"))["data"]]

    return known(context, incomplete, look)


def known(context: typer.Context, incomplete: str, look: Callable[[ApiClient], Awaitable[Iterable[str]]]) -> list[str]:
    """Return what the proxy knows that begins so; nothing if it does not answer soon."""
    import asyncio

    from ...core.config.file import load_config
    from ...core.errors import LightningError
    from ..api_client import ask

    try:
        config = load_config(config_file(context.find_root().params.get("config")))
        found = ask(config, lambda api: asyncio.wait_for(look(api), PATIENCE_S))
    except (LightningError, TimeoutError):
        return []
    return sorted({name for name in found if name and name.startswith(incomplete)})
