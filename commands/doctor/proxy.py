"""Checks the store, the proxy, a call through it, and the rewards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp

from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ...serving.mode import publish_mode
from ...store.opening import first_value, opened
from ...store.sqlite.database import ROOM, has_room
from ...store.versions import DECIDED
from ..api_client import ApiClient, ApiError, ProxyNotThere
from .checks import Check, failed, ok, warning

LOW_DISK_GIB = 1.0
REFUSED = (401, 403)
NEWEST = 200
LOOKED_INTO = 3
OTHER_STORE = "answers, but its store is not this configuration's"
ELSEWHERE = "run doctor where it was started, or with `--config` and its file"
QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}


async def check_store(config: StoreConfig) -> Check:
    """Check that the store can be opened and written, on a disk with room."""
    path = None if config.is_postgres else config.path.expanduser().absolute()
    if path is not None and not path.exists():
        return _check_place(path)
    room = None if path is None else _check_room("store", path.parent, f"{path}, writable")
    if room is not None and room.outcome == "failed":
        return room
    try:
        async with opened(config, to_write=False):
            pass  # one of another schema is not changed by looking
        async with opened(config) as database:
            await database.require_writable()
    except StoreUnavailable as error:
        fix = "start the server, or set store.url" if path is None else f"make {path} writable, or set store.url"
        return failed("store", error.message, fix)
    return room or ok("store", f"{config.where}, writable")


def _check_place(path: Path) -> Check:
    """Check that a store can be made there, without making one."""
    above = next(parent for parent in path.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        return failed("store", f"{path} cannot be made: {above} is not writable", "set store.url to another place")
    return _check_room("store", above, f"{path} is not there yet: the first start makes it")


def _check_room(name: str, directory: Path, found: str) -> Check:
    """Check that the disk of a directory has room."""
    free = shutil.disk_usage(directory).free
    if free < ROOM or (os.access(directory, os.W_OK) and not has_room(directory)):
        return failed(name, f"{directory}: the disk is full", "make room: calls and rewards are refused with 503")
    if free < LOW_DISK_GIB * 2**30:
        few = f"{found}, but only {free / 2**30:.1f} GiB free"
        return warning(name, few, "make room: a full disk stops agents with 503")
    return ok(name, f"{found}, {free / 2**30:.0f} GiB free")


async def check_proxy(api: ApiClient, store: StoreConfig) -> Check:
    """Check that the proxy answers, accepts this configuration's key and can have its store."""
    try:
        policy = await api.policy()
    except ProxyNotThere:
        start = "start it with `lightning-proxy serve`; `up` starts it once vLLM answers"
        if not store.may_be_there:
            start = f"{start}; if it runs already, {ELSEWHERE}"
        return failed("proxy", f"nothing answers at {api.url}", start)
    except ApiError as error:
        return failed("proxy", error.message, "use the configuration that the proxy was started with")
    if not store.may_be_there:
        return failed("proxy", f"{api.url} {OTHER_STORE}: there is no {store.where}", ELSEWHERE)
    return ok("proxy", f"{api.url}, policy version {policy['live_version']} live")


async def check_publish(config: Config, api: ApiClient) -> list[Check]:
    """Return the problem if proxy, store and this configuration do not publish in the same mode."""
    mode, kept, policy = publish_mode(config), first_value(config.store, DECIDED), await api.policy()
    others = {"the running proxy": policy["publish"], "the store": kept}
    if wrong := [f"{name} has {other}" for name, other in others.items() if other not in (None, mode)]:
        fix = "give proxy, trainer and vLLM the same policy.publish, and start all of them again"
        return [failed("publish mode", f"{mode} by this configuration, but {' and '.join(wrong)}", fix)]
    return []


async def check_alias(config: Config, session: aiohttp.ClientSession, api: ApiClient) -> Check:
    """Check that a call for the policy alias is answered and recorded well enough to train on. It is deleted again."""
    name, alias = "alias", config.policy.alias
    rollout = f"doctor-{uuid4().hex}"
    try:
        status, body = await _call(config, session, api, rollout)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return failed(name, f"no answer for model {alias!r} through the proxy: {error}", "look at the proxy's log")
    try:
        call = (await api.rollout(rollout))["calls"][0]
        left = await _clear(api, rollout)
    except ApiError as error:
        return failed(name, f"the call was not recorded: {error.message}", "look at the proxy's log")
    if status != 200:
        return failed(name, f"model {alias!r} answers HTTP {status}: {str(body)[:200]}", "look at the upstream's log")
    if not call["trainable"]:
        return failed(name, f"its calls cannot be trained on: {call['untrainable_reason']}", "see the checks above")
    tokens = f"{len(call['prompt_token_ids'])}+{len(call['response_token_ids'])} tokens"
    return ok(name, f"{alias!r} answers through the proxy; recorded as trainable, {tokens}{left}")


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


async def _call(config: Config, session: aiohttp.ClientSession, api: ApiClient, rollout: str) -> tuple[int, Any]:
    # Rollouts in mode eval are never trained on.
    headers = {"X-Rollout-Id": rollout, "X-Rollout-Mode": "eval", **api.headers}
    body = QUESTION | {"model": config.policy.alias}
    async with session.post(f"{api.url}/v1/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.json(content_type=None)


async def _uncounted(api: ApiClient, ended: Sequence[dict[str, Any]]) -> str | None:
    """The fix if rollouts have rewards, but under names that do not count."""
    posted = [reward for one in ended[:LOOKED_INTO] for reward in (await api.rollout(one["rollout_id"]))["rewards"]]
    names = ", ".join(sorted({reward["name"] for reward in posted}))
    return f"they have rewards named {names}: give these names weights in trainer.reward_weights" if names else None


async def check_warnings(api: ApiClient) -> list[Check]:
    """Return what features warn of."""
    return [Check("policy", "warning", line) for line in (await api.policy()).get("warnings", ())]


async def check_rewards(api: ApiClient) -> Check:
    """Check that most of the newest ended training rollouts have a reward."""
    name = "rewards"
    fix = "POST /reward with each rollout's id when it is done, or let a function or a judge give it (docs/rewards.md)"
    newest = (await api.rollouts(mode="train", limit=NEWEST))["data"]
    called = [r for r in newest if r["calls"]]
    ended = [r for r in called if r["status"] in ("completed", "failed")]
    rewarded = sum(r["reward"] is not None for r in ended)
    if not called:
        return ok(name, "no training rollout yet")
    if not ended:
        idle = f"{fix}; rollouts.end_after_idle_s ends those that nobody ends"
        return warning(name, f"none of the newest {len(called)} training rollouts has ended", idle)
    found = f"{rewarded} of the newest {len(ended)} ended training rollouts have one"
    if rewarded == 0:
        return failed(name, found, await _uncounted(api, ended) or fix)
    if rewarded < len(ended) / 2:
        return warning(name, found, fix)
    if all(r["task_id"] is None for r in ended):
        return warning(
            name, f"{found}, but none names its task", "send X-Task-Id: only rollouts of one task are compared"
        )
    return ok(name, found)
