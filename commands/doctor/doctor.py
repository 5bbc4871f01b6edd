"""`doctor`: checks every link, from the configuration to the next step, and says what to fix."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import aiohttp
from rich.console import Console

from ...core.config.address import shown, without_secrets
from ...core.config.file import load_config
from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...core.config.upstreams import UpstreamConfig, below
from ...core.errors import ConfigError, LightningError, StoreUnavailable
from ...core.groups import Grouping
from ...core.http import through
from ...core.json_text import encode, loads
from ...core.prices import require_litellm
from ...proxy.gateway.attempts import Upstreams
from ...proxy.gateway.upstream import Request, make_session
from ...proxy.plugins import makers_of, plugins_of
from ...serving.mode import publish_mode
from ...store.opening import opened
from ...store.store import Store
from ...trainer.collect.groups import full_groups, what_is_missing
from ...trainer.plan import make_plan
from ..api_client import ApiClient
from ..formats import print_json
from ..plan import plan_line
from ..put_back import put_back_left
from ..signals import run_until_signal
from ..vllm import other_port
from .checks import Check, checks_table, failed, ok, warning
from .proxy import (
    OTHER_STORE,
    REFUSED,
    check_alias,
    check_proxy,
    check_publish,
    check_rewards,
    check_store,
    check_warnings,
)
from .vllm import VllmChecks

TIMEOUT_S = 120.0  # the first answer of a fresh vLLM is slow
REACH_S = 5.0
STARTING = (
    "start it with `lightning-proxy vllm`; if it is starting, wait until it prints `Application startup complete` (of "
    "`up`: in lightning-logs/vllm.log); or correct upstreams.base_url"
)


def doctor(path: Path | None, model: str | None, *, as_json: bool) -> bool:
    """Print every check and return whether none failed."""
    checks = run_until_signal(run_checks(path, model))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        Console(highlight=False).print(checks_table(checks))
    return not any(check.outcome == "failed" for check in checks)


async def run_checks(path: Path | None, model: str | None = None) -> list[Check]:
    """Make all checks that are possible, and none behind a broken link. `model`: in place of policy.model."""
    where = str(path) if path else "defaults and environment"
    try:
        config = load_config(path, {"policy.model": model})
    except ConfigError as error:
        return [failed("configuration", error.message, "correct it and run doctor again")]
    checks = [
        ok("configuration", where),
        *check_memory(config),
        await check_store(config.store),
        *await check_left(config),
    ]
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=REACH_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, ApiClient.of(config) as api:
        return checks + [check async for check in _live_checks(config, session, api)]


async def check_left(config: Config) -> list[Check]:
    """Put back what a `doctor --learn` left that was killed, and say so."""
    told: list[str] = []
    try:
        await put_back_left(config, told.append)
    except ConfigError:
        return [ok("learn", "a `doctor --learn` is at work")]
    return [ok("learn", line) for line in told]


def check_memory(config: Config) -> list[Check]:
    """Return the check of the memory plan, on a machine with GPUs."""
    try:
        plan = make_plan(config)
    except ConfigError as error:
        return [failed("memory", error.message, "lightning-proxy plan --gpus … shows what other cards would do")]
    return [] if not plan.cards else [ok("memory", plan_line(plan))]


async def check_call(config: Config, upstream: UpstreamConfig) -> Check:
    """Make one call of one token: many providers check a key on calls alone."""
    name = f"upstream {upstream.name}"
    named = [upstream.model_map.get(model, model) for model in upstream.models] or [*upstream.model_map.values()]
    model = named[0] if named else config.policy.model
    session = make_session()
    upstreams = Upstreams(session, makers=makers_of(plugins_of(config)))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            model = model or await _listed(upstreams, upstream) or config.policy.alias
            path = "/v1/messages" if upstream.api_key_header == "x-api-key" else "/v1/chat/completions"
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            status, answer = await _asked(upstreams, upstream, "POST", path, encode(body))
    except (LightningError, TimeoutError) as error:
        why = getattr(error, "message", "it takes too long")
        return failed(name, f"a call is not answered: {why}", "check the provider's status")
    finally:
        await upstreams.close()
        await session.close()
    said = without_secrets(answer.decode(errors="replace"))[:200]
    found = f"a call for {model!r} is answered with HTTP {status}"
    if status in REFUSED and upstream.api_key is not None:
        return failed(name, f"it refuses its key: {found}: {said}", "correct its api_key")
    if status in REFUSED:
        fix = "set its api_key or the provider's environment variable, unless the agents bring keys"
        return warning(name, f"it wants another key: {found}: {said}", fix)
    if status >= 400 and (named or status >= 429):
        return warning(name, f"{found}: {said}", "see what it says: calls of agents may end so, too")
    return ok(name, found)


async def _listed(upstreams: Upstreams, upstream: UpstreamConfig) -> str | None:
    """The first model that the upstream lists."""
    status, answer = await _asked(upstreams, upstream, "GET", "/v1/models", b"")
    try:
        found = loads(answer)["data"][0]["id"] if status < 400 else None
    except (ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


async def _asked(
    upstreams: Upstreams, upstream: UpstreamConfig, method: str, path: str, body: bytes
) -> tuple[int, bytes]:
    """The status and the body of an answer, as an agent would get them."""
    headers = [(b"content-type", b"application/json"), (b"anthropic-version", b"2023-06-01")]
    request = Request(method, path, b"", headers, body, forward_authorization=False, identity=True)
    return await upstreams.ask(upstream, request)


async def _live_checks(config: Config, session: aiohttp.ClientSession, api: ApiClient) -> AsyncIterator[Check]:
    proxy = await check_proxy(api, config.store)
    yield proxy
    if OTHER_STORE in proxy.found:
        return  # another system's: what this configuration says of vLLM is not about it
    reached = {}
    for upstream in config.upstreams:
        if upstream.kind == "litellm":
            try:
                require_litellm(f"upstream {upstream.name} of kind litellm")
            except ConfigError as error:
                yield failed(f"upstream {upstream.name}", error.message, "install it, or remove the upstream")
                continue
            reachable = True
        else:
            for url in dict.fromkeys((*upstream.urls, *upstream.published_to)):
                reached[url] = await check_server(config, session, upstream, url)
                yield reached[url]
            reachable = reached[upstream.urls[0]].outcome == "ok"
        has_key = upstream.api_key is not None or upstream.kind == "litellm"
        if reachable and has_key and upstream is not config.policy_upstream:
            yield await check_call(config, upstream)
    policy = config.policy_upstream
    if policy is None:
        fix = "add an upstream with kind: vllm to train"
        yield Check("policy", "warning", "no upstream of kind vllm: calls are recorded but never trained on", fix)
    elif reached[policy.urls[0]].outcome == "ok":
        async for check in VllmChecks(config, session, policy, publish_mode(config)).all():
            yield check
        if proxy.outcome != "failed":
            for check in await check_publish(config, api):
                yield check
            yield await check_alias(config, session, api)
    if proxy.outcome != "failed":
        yield await check_rewards(api)
        for check in await check_warnings(api):
            yield check
        if policy is not None:
            async for check in check_training(config):
                yield check


async def check_server(config: Config, session: aiohttp.ClientSession, upstream: UpstreamConfig, url: str) -> Check:
    """Check that a model server answers."""
    name = f"upstream {upstream.name}"
    fix = "check the provider's status, or correct upstreams.base_url"
    if upstream.kind == "vllm":
        fix = other_port(config) or STARTING
    try:
        limit = aiohttp.ClientTimeout(total=REACH_S)
        way = through(upstream, url)
        async with session.get(below(url, "/models"), headers=upstream.credentials, timeout=limit, **way) as answer:
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        return failed(name, f"{shown(url)} is not reachable: {without_secrets(str(error)) or 'no answer in time'}", fix)
    if status in (401, 403) and upstream.api_key is None:
        return Check(name, "ok", f"{shown(url)} wants a key: the agents' own keys are passed on")
    if status >= 400:
        return failed(name, f"{shown(url)}/models answers HTTP {status}", "correct its base_url or api_key")
    return ok(name, shown(url))


async def check_training(config: Config) -> AsyncIterator[Check]:
    """Yield checks of the trainer and of its next step."""
    if not config.store.may_be_there:
        return
    try:
        async with opened(config.store, to_write=False) as database:
            groups = await Store(database).waiting.groups(grouping=Grouping.of(config.trainer))
    except StoreUnavailable as error:
        yield failed("next step", error.message, "see the store's check above")
        return
    enough = full_groups(groups) >= config.trainer.tasks_per_step
    if trainer_runs(config.store):
        yield ok("trainer", "one runs on this store")
    elif enough:
        yield warning("trainer", "none runs, and a step could be made", "start it with `lightning-proxy train`")
    else:
        yield ok("trainer", "none runs on this machine; `lightning-proxy train` starts one")
    yield ok("next step", what_is_missing(groups, config.trainer))


def trainer_runs(store: StoreConfig) -> bool:
    """Return whether a trainer on this machine holds the lock of the store's file."""
    if store.is_postgres:
        return False
    path = store.path.expanduser().resolve()
    try:
        with Path(f"{path}-trainer").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there was never one
        return False
    return False
