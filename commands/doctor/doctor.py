"""`doctor`: checks every link, from the configuration to the next step, and says what to fix."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import aiohttp
from rich.console import Console

from ...core.config.address import shown, without_secrets
from ...core.config.file import load_config
from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...core.config.upstreams import UpstreamConfig, below
from ...core.errors import ConfigError
from ...core.groups import Grouping
from ...core.http import through
from ...core.json_text import encode, loads
from ...core.prices import require_litellm
from ...proxy.gateway.attempts import Upstreams
from ...proxy.gateway.upstream import Request, make_session
from ...proxy.plugins import makers_of, plugins_of
from ...store.opening import opened
from ...store.sqlite.file import lock_file
from ...store.store import Store
from ...trainer.collect.groups import full_groups, what_is_missing
from ...trainer.plan import make_plan
from ..api_client import ApiClient
from ..formats import print_json
from ..plan import plan_line
from ..put_back import put_back_left
from ..signals import run_until_signal
from ..vllm import other_port
from .checks import Check, Finding, check, checks_table, failed, ok, warning
from .proxy import (
    NO_REWARDS,
    OTHER_STORE,
    REFUSED,
    probe_alias,
    probe_mode,
    probe_proxy,
    probe_rewards,
    probe_store,
)
from .vllm import VllmChecks

TIMEOUT_S = 120.0  # the first answer of a fresh vLLM is slow
REACH_S = 5.0
STARTING = (
    "start it with `lightning-proxy vllm`; if it is starting, wait until it prints `Application startup complete` (of "
    "`up`: in lightning-logs/vllm.log); or correct upstreams.base_url"
)
PROVIDER = "check the provider's status, or correct upstreams.base_url"
HEADERS = [(b"content-type", b"application/json"), (b"anthropic-version", b"2023-06-01")]


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
    try:
        config = load_config(path, {"policy.model": model})
    except ConfigError as error:
        return [failed("configuration", error.message, "correct it and run doctor again")]
    checks = [ok("configuration", str(path) if path else "defaults and environment"), *check_memory(config)]
    mend = "start the server, or set store.url" if config.store.is_postgres else "make it writable, or set store.url"
    checks += [await check("store", probe_store(config.store), mend), *await check_left(config)]
    async with open_session() as session, ApiClient.of(config) as api:
        await check_running(config, session, api, checks.append)
    return checks


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=REACH_S))


async def check_left(config: Config) -> list[Check]:
    """Put back what a `doctor --learn` left that was killed, and say so."""
    told: list[str] = []
    try:
        await put_back_left(config, told.append)
    except ConfigError:
        told = ["a `doctor --learn` is at work"]
    return [ok("learn", line) for line in told]


def check_memory(config: Config) -> list[Check]:
    """Return the check of the memory plan, on a machine with GPUs."""
    try:
        plan = make_plan(config)
    except ConfigError as error:
        return [failed("memory", error.message, "lightning-proxy plan --gpus … shows what other cards would do")]
    return [] if not plan.cards else [ok("memory", plan_line(plan))]


async def check_running(
    config: Config, session: aiohttp.ClientSession, api: ApiClient, report: Callable[[Check], None]
) -> None:
    """Check what has been started: the proxy, model servers, the policy's among them, and what is trained on."""
    wrong = "use the configuration that the proxy was started with"
    proxy = await check("proxy", probe_proxy(api, config.store), wrong)
    report(proxy)
    if OTHER_STORE in proxy.found:
        return  # another system's: what this configuration says of vLLM is not about it
    answers, policy = proxy.outcome != "failed", config.policy_upstream
    policy_answers = False
    for upstream in config.upstreams:
        servers = await check_servers(config, session, upstream)
        for one in servers:
            report(one)
        reachable = servers[0].outcome == "ok" if servers else True
        if upstream is policy:
            policy_answers = reachable
        elif reachable and (upstream.api_key is not None or upstream.kind == "litellm"):
            report(
                await check(f"upstream {upstream.name}", probe_call(config, upstream), "check the provider's status")
            )
    if policy is None:
        fix = "add an upstream with kind: vllm to train"
        report(warning("policy", "no upstream of kind vllm: calls are recorded but never trained on", fix))
    elif policy_answers:
        await VllmChecks(config, session, policy, report).run()
        if answers:
            fix = "give proxy, trainer and vLLM the same policy.publish, and start all of them again"
            report(await check("publish mode", probe_mode(config, api), fix))
            report(await check("alias", probe_alias(config, session, api), "look at the proxy's log"))
    if answers:
        report(await check("rewards", probe_rewards(api), NO_REWARDS))
        for line in (await api.policy()).get("warnings", ()):
            report(Check("policy", "warning", line))
        if policy is not None and config.store.may_be_there:
            report(await check("next step", probe_step(config, report), "see the store's check above"))


async def check_servers(config: Config, session: aiohttp.ClientSession, upstream: UpstreamConfig) -> list[Check]:
    """Check that each of an upstream's servers answers; of litellm, that it is installed, which is said if not."""
    name = f"upstream {upstream.name}"
    if upstream.kind == "litellm":
        try:
            require_litellm(f"{name} of kind litellm")
        except ConfigError as error:
            return [failed(name, error.message, "install it, or remove the upstream")]
        return []
    urls = dict.fromkeys((*upstream.urls, *upstream.published_to))
    fix = (other_port(config) or STARTING) if upstream.kind == "vllm" else PROVIDER
    return [await check(name, probe_server(session, upstream, url), fix) for url in urls]


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


async def probe_call(config: Config, upstream: UpstreamConfig) -> str:
    """Make one call of one token, as an agent would: many providers check a key on calls alone."""
    named = [upstream.model_map.get(model, model) for model in upstream.models] or [*upstream.model_map.values()]
    model = next(iter(named), config.policy.model)
    session = make_session()
    upstreams = Upstreams(session, makers=makers_of(plugins_of(config)))

    async def ask(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        request = Request(method, path, b"", HEADERS, body, forward_authorization=False, identity=True)
        return await upstreams.ask(upstream, request)

    try:
        async with asyncio.timeout(TIMEOUT_S):
            if model is None:
                _, listed = await ask("GET", "/v1/models", b"")
                with suppress(ValueError, LookupError, TypeError):
                    model = str(loads(listed)["data"][0]["id"])
            model = model or config.policy.alias
            path = "/v1/messages" if upstream.api_key_header == "x-api-key" else "/v1/chat/completions"
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            status, answer = await ask("POST", path, encode(body))
    finally:
        await upstreams.close()
        await session.close()
    found = f"a call for {model!r} is answered with HTTP {status}"
    said = f"{found}: {without_secrets(answer.decode(errors='replace'))[:200]}"
    if status in REFUSED and upstream.api_key is not None:
        raise Finding(f"it refuses its key: {said}", "correct its api_key")
    if status in REFUSED:
        fix = "set its api_key or the provider's environment variable, unless the agents bring keys"
        raise Finding(f"it wants another key: {said}", fix, "warning")
    if status >= 400 and (named or status >= 429):
        raise Finding(said, "see what it says: calls of agents may end so, too", "warning")
    return found


async def probe_step(config: Config, report: Callable[[Check], None]) -> str:
    """Report whether a trainer runs, and return what its next step waits for."""
    async with opened(config.store, to_write=False) as database:
        groups = await Store(database).waiting.groups(grouping=Grouping.of(config.trainer))
    if trainer_runs(config.store):
        report(ok("trainer", "one runs on this store"))
    elif full_groups(groups) >= config.trainer.tasks_per_step:
        report(warning("trainer", "none runs, and a step could be made", "start it with `lightning-proxy train`"))
    else:
        report(ok("trainer", "none runs on this machine; `lightning-proxy train` starts one"))
    return what_is_missing(groups, config.trainer)


def trainer_runs(store: StoreConfig) -> bool:
    """Return whether a trainer on this machine holds the lock of the store's file."""
    path = None if store.is_postgres else store.path.resolve()
    if path is None or not Path(f"{path}-trainer").exists():
        return False
    with lock_file(path, "trainer") as is_free:
        return not is_free
