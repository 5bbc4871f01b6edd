"""Checks the store, the proxy, a call through it, and the rewards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import aiohttp

from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...serving.mode import publish_mode
from ...store.opening import first_value, opened
from ...store.sqlite.database import ROOM, has_room
from ...store.versions import DECIDED
from ..api_client import ApiClient, ApiError, ProxyNotThere
from .checks import Finding

LOW_DISK_GIB = 1.0
REFUSED = (401, 403)
NEWEST = 200
LOOKED_INTO = 3
OTHER_STORE = "answers, but its store is not this configuration's"
ELSEWHERE = "run doctor where it was started, or with `--config` and its file"
QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
NO_REWARDS = (
    "POST /reward with each rollout's id when it is done, or let a function or a judge give it (docs/rewards.md)"
)


async def probe_store(config: StoreConfig) -> str:
    """Check that the store can be opened and written, or made, on a disk with room."""
    if config.is_postgres:
        await _require_writable(config)
        return f"{config.where}, writable"
    path = config.path.absolute()
    directory, is_there = next(parent for parent in path.parents if parent.exists()), path.exists()
    can_write = os.access(directory, os.W_OK | os.X_OK)
    if not is_there and not (directory.is_dir() and can_write):
        raise Finding(f"{path} cannot be made: {directory} is not writable", "set store.url to another place")
    free = shutil.disk_usage(directory).free
    if free < ROOM or (can_write and not has_room(directory)):
        raise Finding(f"{directory}: the disk is full", "make room: calls and rewards are refused with 503")
    if is_there:
        await _require_writable(config)
    found = f"{path}, writable" if is_there else f"{path} is not there yet: the first start makes it"
    if free < LOW_DISK_GIB * 2**30:
        few = f"{found}, but only {free / 2**30:.1f} GiB free"
        raise Finding(few, "make room: a full disk stops agents with 503", "warning")
    return f"{found}, {free / 2**30:.0f} GiB free"


async def _require_writable(config: StoreConfig) -> None:
    async with opened(config, to_write=False):
        pass  # one of another schema is not changed by looking
    async with opened(config) as database:
        await database.require_writable()


async def probe_proxy(api: ApiClient, store: StoreConfig) -> str:
    """Check that the proxy answers, accepts this configuration's key and can have its store."""
    try:
        policy = await api.policy()
    except ProxyNotThere:
        start = "start it with `lightning-proxy serve`; `up` starts it once vLLM answers"
        elsewhere = "" if store.may_be_there else f"; if it runs already, {ELSEWHERE}"
        raise Finding(f"nothing answers at {api.url}", f"{start}{elsewhere}") from None
    if not store.may_be_there:
        raise Finding(f"{api.url} {OTHER_STORE}: there is no {store.where}", ELSEWHERE)
    return f"{api.url}, policy version {policy['live_version']} live"


async def probe_mode(config: Config, api: ApiClient) -> str:
    """Check that proxy, store and this configuration publish in the same mode."""
    mode, kept, policy = publish_mode(config), first_value(config.store, DECIDED), await api.policy()
    others = {"the running proxy": policy["publish"], "the store": kept}
    if wrong := [f"{name} has {other}" for name, other in others.items() if other not in (None, mode)]:
        raise Finding(f"{mode} by this configuration, but {' and '.join(wrong)}")
    return mode


async def probe_alias(config: Config, session: aiohttp.ClientSession, api: ApiClient) -> str:
    """Check that a call for the policy alias is answered and recorded well enough to train on. It is deleted again."""
    alias, rollout = config.policy.alias, f"doctor-{uuid4().hex}"
    # Rollouts in mode eval are never trained on.
    headers = {"X-Rollout-Id": rollout, "X-Rollout-Mode": "eval", **api.headers}
    body = QUESTION | {"model": alias}
    async with session.post(f"{api.url}/v1/chat/completions", json=body, headers=headers) as answer:
        text = await answer.text()
    call = (await api.rollout(rollout))["calls"][0]
    left = await _clear(api, rollout)
    if answer.status != 200:
        raise Finding(f"model {alias!r} answers HTTP {answer.status}: {text[:200]}", "look at the upstream's log")
    if not call["trainable"]:
        raise Finding(f"its calls cannot be trained on: {call['untrainable_reason']}", "see the checks above")
    tokens = f"{len(call['prompt_token_ids'])}+{len(call['response_token_ids'])} tokens"
    return f"{alias!r} answers through the proxy; recorded as trainable, {tokens}{left}"


async def _clear(api: ApiClient, rollout: str) -> str:
    """End the check's rollout and delete it. Return a note if it stays."""
    await api.end_rollout(rollout, "discarded", "a check of lightning-proxy doctor")
    try:
        await api.delete_rollout(rollout)
    except ApiError as error:
        if error.status_code not in REFUSED:
            raise
        return f"; rollout {rollout} stays: only an admin's key deletes it"
    return ""


async def probe_rewards(api: ApiClient) -> str:
    """Check that most of the newest ended training rollouts have a reward."""
    newest = (await api.rollouts(mode="train", limit=NEWEST))["data"]
    called = [r for r in newest if r["calls"]]
    ended = [r for r in called if r["status"] in ("completed", "failed")]
    rewarded = sum(r["reward"] is not None for r in ended)
    if not called:
        return "no training rollout yet"
    if not ended:
        idle = f"{NO_REWARDS}; rollouts.end_after_idle_s ends those that nobody ends"
        raise Finding(f"none of the newest {len(called)} training rollouts has ended", idle, "warning")
    found = f"{rewarded} of the newest {len(ended)} ended training rollouts have one"
    if rewarded == 0:
        raise Finding(found, await _uncounted(api, ended))
    if rewarded < len(ended) / 2:
        raise Finding(found, None, "warning")
    if all(r["task_id"] is None for r in ended):
        fix = "send X-Task-Id: only rollouts of one task are compared"
        raise Finding(f"{found}, but none names its task", fix, "warning")
    return found


async def _uncounted(api: ApiClient, ended: Sequence[dict[str, Any]]) -> str | None:
    """The fix if rollouts have rewards, but under names that do not count."""
    posted = [reward for one in ended[:LOOKED_INTO] for reward in (await api.rollout(one["rollout_id"]))["rewards"]]
    names = ", ".join(sorted({reward["name"] for reward in posted}))
    return f"they have rewards named {names}: give these names weights in trainer.reward_weights" if names else None
