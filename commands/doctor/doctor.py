"""`doctor`: checks every link, from the configuration to the next step, and says what to fix."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp

from ...core.config.address import shown, without_secrets
from ...core.config.file import load_config
from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...core.config.upstreams import UpstreamConfig, below
from ...core.errors import ConfigError
from ...core.groups import Grouping
from ...core.http import through
from ...serving.mode import publish_mode
from ...store.opening import first_value, opened
from ...store.sqlite.database import ROOM, has_room
from ...store.sqlite.file import lock_file
from ...store.store import Store
from ...store.versions import DECIDED
from ...trainer.collect.groups import full_groups, what_is_missing
from ..api_client import ApiClient, ApiError, ProxyNotThere
from ..put_back import put_back_left
from ..signals import run_until_signal
from ..vllm import other_port
from .checks import Doubt, Finding, Report
from .vllm import REFUSED, VllmChecks

TIMEOUT_S = 120.0  # the first answer of a fresh vLLM is slow
REACH_S = 5.0
NEWEST = 200  # rollouts that are looked at for their rewards
STARTING = (
    "start it with `lightning-proxy vllm`; if it is starting, wait until it prints `Application startup complete` (of "
    "`up`: in lightning-logs/vllm.log); or correct upstreams.base_url"
)
NO_REWARDS = (
    "POST /reward with each rollout's id when it is done, or let a function or a judge give it (docs/rewards.md)"
)
OTHER_STORE = "answers, but its store is not this configuration's"
ELSEWHERE = "run doctor where it was started, or with `--config` and its file"


def doctor(path: Path | None, *, as_json: bool) -> bool:
    """Print every check and return whether none failed."""
    report = Report(as_json=as_json)
    run_until_signal(run_checks(path, report))
    return report.end()


async def run_checks(path: Path | None, report: Report) -> None:
    """Make all checks that are possible, and none behind a broken link."""
    try:
        config = load_config(path)
    except ConfigError as error:
        report.add("configuration", "failed", error.message, "correct it and run doctor again")
        return
    report.add("configuration", "ok", str(path) if path else "defaults and environment")
    mend = "start the server, or set store.url" if config.store.is_postgres else "make it writable, or set store.url"
    await report.check("store", probe_store(config.store), mend)
    try:
        await put_back_left(config, partial(report.add, "learn", "ok"))
    except ConfigError:
        report.add("learn", "ok", "a `doctor --learn` is at work")
    async with open_session() as session, ApiClient.of(config) as api:
        await check_running(config, session, api, report)


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=REACH_S))


async def check_running(config: Config, session: aiohttp.ClientSession, api: ApiClient, report: Report) -> None:
    """Check what has been started: the proxy, model servers, the policy's among them, and what is trained on."""
    wrong = "use the configuration that the proxy was started with"
    proxy = await report.check("proxy", probe_proxy(api, config.store), wrong)
    if OTHER_STORE in proxy.found:
        return  # another system's: what this configuration says of vLLM is not about it
    answers, policy, policy_answers = proxy.outcome != "failed", config.policy_upstream, False
    for upstream in config.upstreams:
        reachable = await check_servers(config, session, upstream, report)
        policy_answers |= reachable and upstream is policy
    if policy is None:
        found = "no upstream of kind vllm: calls are recorded but never trained on"
        report.add("policy", "warning", found, "add an upstream with kind: vllm to train")
    elif policy_answers:
        await VllmChecks(config, session, policy).run(report)
    if answers and policy_answers:
        same = "give proxy, trainer and vLLM the same policy.publish, and start all of them again"
        await report.check("publish mode", probe_mode(config, api), same)
        await report.check("alias", probe_alias(config, session, api), "look at the proxy's log")
    if answers:
        await report.check("rewards", probe_rewards(api), NO_REWARDS)
    if answers and policy is not None and config.store.may_be_there:
        await report.check("trainer", probe_trainer(config), "start it with `lightning-proxy train`")
        await report.check("next step", probe_step(config), "see the store's check above")


async def probe_store(config: StoreConfig) -> str:
    """Check that the store can be opened and written, or made, on a disk with room."""
    if config.is_postgres:
        await _require_writable(config)
        return f"{config.where}, writable"
    path = config.path.absolute()
    directory, is_there = next(parent for parent in path.parents if parent.exists()), path.exists()
    can_write = directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
    if not is_there and not can_write:
        raise Finding(f"{path} cannot be made: {directory} is not writable", "set store.url to another place")
    free = shutil.disk_usage(directory).free
    if free < ROOM or (can_write and not has_room(directory)):
        raise Finding(f"{directory}: the disk is full", "make room: calls and rewards are refused with 503")
    if is_there:
        await _require_writable(config)
    found = "writable" if is_there else "not there yet: the first start makes it"
    return f"{path}, {found}, {free / 2**30:.0f} GiB free"


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


async def check_servers(
    config: Config, session: aiohttp.ClientSession, upstream: UpstreamConfig, report: Report
) -> bool:
    """Check that each of an upstream's servers answers, and return whether the first does."""
    if upstream.kind == "litellm":
        return True  # the proxy does not start without it, and it has no address of its own
    fix = "check the provider's status, or correct upstreams.base_url"
    if upstream.kind == "vllm":
        fix = other_port(config) or STARTING
    name, urls = f"upstream {upstream.name}", dict.fromkeys((*upstream.urls, *upstream.published_to))
    checks = [await report.check(name, probe_server(session, upstream, url), fix) for url in urls]
    return checks[0].outcome == "ok"


async def probe_server(session: aiohttp.ClientSession, upstream: UpstreamConfig, url: str) -> str:
    limit, way = aiohttp.ClientTimeout(total=REACH_S), through(upstream, url)
    try:
        async with session.get(below(url, "/models"), headers=upstream.credentials, timeout=limit, **way) as answer:
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        why = without_secrets(str(error)) or "no answer in time"
        raise Finding(f"{shown(url)} is not reachable: {why}") from None
    if status in REFUSED and upstream.api_key is None:
        return f"{shown(url)} wants a key: the agents' own keys are passed on"
    if status >= 400:
        raise Finding(f"{shown(url)}/models answers HTTP {status}", "correct its base_url or api_key")
    return shown(url)


async def probe_mode(config: Config, api: ApiClient) -> str:
    """Check that proxy, store and this configuration publish in the same mode."""
    mode, kept, policy = publish_mode(config), first_value(config.store, DECIDED), await api.policy()
    others = {"the running proxy": policy["publish"], "the store": kept}
    if wrong := [f"{name} has {other}" for name, other in others.items() if other not in (None, mode)]:
        raise Finding(f"{mode} by this configuration, but {' and '.join(wrong)}")
    return mode


async def probe_alias(config: Config, session: aiohttp.ClientSession, api: ApiClient) -> str:
    """Check that a call for the policy alias is answered and recorded well enough to train on. It is deleted again."""
    alias, rollout, left = config.policy.alias, f"doctor-{uuid4().hex}", ""
    # Rollouts in mode eval are never trained on.
    headers = {"X-Rollout-Id": rollout, "X-Rollout-Mode": "eval", **api.headers}
    body = {"model": alias, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
    async with session.post(f"{api.url}/v1/chat/completions", json=body, headers=headers) as answer:
        text = await answer.text()
    call = (await api.rollout(rollout))["calls"][0]
    await api.end_rollout(rollout, "discarded", "a check of lightning-proxy doctor")
    try:
        await api.delete_rollout(rollout)
    except ApiError as error:
        if error.status_code not in REFUSED:
            raise
        left = f"; rollout {rollout} stays: only an admin's key deletes it"
    if answer.status != 200:
        raise Finding(f"model {alias!r} answers HTTP {answer.status}: {text[:200]}", "look at the upstream's log")
    if not call["trainable"]:
        raise Finding(f"its calls cannot be trained on: {call['untrainable_reason']}", "see the checks above")
    tokens = f"{len(call['prompt_token_ids'])}+{len(call['response_token_ids'])} tokens"
    return f"{alias!r} answers through the proxy; recorded as trainable, {tokens}{left}"


async def probe_rewards(api: ApiClient) -> str:
    """Check that most of the newest ended training rollouts have a reward."""
    called = [r for r in (await api.rollouts(mode="train", limit=NEWEST))["data"] if r["calls"]]
    ended = [r for r in called if r["status"] in ("completed", "failed")]
    rewarded = sum(r["reward"] is not None for r in ended)
    if not called:
        return "no training rollout yet"
    if not ended:
        idle = f"{NO_REWARDS}; rollouts.end_after_idle_s ends those that nobody ends"
        raise Doubt(f"none of the newest {len(called)} training rollouts has ended", idle)
    found = f"{rewarded} of the newest {len(ended)} ended training rollouts have one"
    if rewarded == 0:
        posted = [reward for one in ended[:3] for reward in (await api.rollout(one["rollout_id"]))["rewards"]]
        names = ", ".join(sorted({reward["name"] for reward in posted}))
        fix = f"they have rewards named {names}: give these names weights in trainer.reward_weights"
        raise Finding(found, fix if names else None)
    if rewarded < len(ended) / 2:
        raise Doubt(found)
    if all(r["task_id"] is None for r in ended):
        raise Doubt(f"{found}, but none names its task", "send X-Task-Id: only rollouts of one task are compared")
    return found


async def waiting_groups(config: Config) -> Any:
    async with opened(config.store, to_write=False) as database:
        return await Store(database).waiting.groups(grouping=Grouping.of(config.trainer))


async def probe_trainer(config: Config) -> str:
    """Check that a trainer runs where a step could be made. One on this machine holds the lock of the store's file."""
    path = None if config.store.is_postgres else config.store.path.resolve()
    if path is not None and Path(f"{path}-trainer").exists():
        with lock_file(path, "trainer") as is_free:
            if not is_free:
                return "one runs on this store"
    if full_groups(await waiting_groups(config)) >= config.trainer.tasks_per_step:
        raise Doubt("none runs, and a step could be made")
    return "none runs on this machine; `lightning-proxy train` starts one"


async def probe_step(config: Config) -> str:
    """Return what the next step waits for."""
    return what_is_missing(await waiting_groups(config), config.trainer)
