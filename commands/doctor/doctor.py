"""`doctor`: checks every link, from the configuration to the next step, and says what to fix.

A check has a name, a probe that returns what it found, and a fix for when the probe fails.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import aiohttp
from rich.console import Console
from rich.table import Table

from ...core.config.address import shown, without_secrets
from ...core.config.file import load_config
from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...core.config.upstreams import UpstreamConfig, below
from ...core.errors import ConfigError, LightningError
from ...core.groups import Grouping
from ...core.http import through
from ...proxy.gateway.exact import RENDER
from ...serving.mode import publish_mode
from ...serving.operator import key_file, operator_headers
from ...store.opening import first_value, opened
from ...store.sqlite.database import ROOM, has_room
from ...store.store import Store
from ...store.versions import DECIDED
from ...trainer.collect.groups import full_groups, what_is_missing
from ..api_client import ApiClient, ApiError, ProxyNotThere
from ..formats import plain, print_json
from ..put_back import put_back_left
from ..signals import run_until_signal
from ..vllm import other_port

TIMEOUT_S = 120.0  # the first answer of a fresh vLLM is slow
REACH_S = 5.0
NEWEST = 200  # rollouts that are looked at for their rewards
STARTING = (
    "start vLLM with `lightning-proxy vllm`; if it is starting, wait until it prints `Application startup complete` "
    "(with `up`: in lightning-logs/vllm.log); or correct upstreams.base_url"
)
NO_REWARDS = (
    "POST /reward with each rollout's id when the rollout is done, or let a function or a judge score it "
    "(docs/rewards.md)"
)
OTHER_STORE = "answers, but its store is not this configuration's"
ELSEWHERE = "run doctor where the proxy was started, or with `--config` and the proxy's file"
REFUSED = (401, 403)
RESTART = "start the server with `lightning-proxy vllm`"
QUESTION = [{"role": "user", "content": "What is two plus two?"}]
ANSWER = "The answer is four."
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHAT, LOAD, UNLOAD = "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# An adapter without weights: vLLM reads this file, then says that the tensors are missing.
ABOUT = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "bias": "none"}
Outcome = Literal["ok", "warning", "failed"]
STYLE = {"ok": "green", "warning": "yellow", "failed": "bold red"}
# The exceptions from reading an answer that does not have the expected shape.
OTHER_SHAPE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `fix` says what to do if the outcome is not ok."""

    name: str
    outcome: Outcome
    found: str
    fix: str | None = None


class Finding(Exception):
    """Raised by a probe that fails, with what it found. `fix`, if given, replaces the check's own advice."""

    outcome: Outcome = "failed"

    def __init__(self, found: str, fix: str | None = None) -> None:
        super().__init__(found)
        self.fix = fix


class Doubt(Finding):
    """A finding that is only a warning."""

    outcome = "warning"


class Broken(Exception):
    """A check failed, and later checks would be meaningless."""


class Report:
    """Runs checks, and prints each result, or all as JSON at the end. With `stops`, a failed check raises Broken."""

    def __init__(self, *, as_json: bool, stops: bool = False) -> None:
        self.checks: list[Check] = []
        self._as_json, self._stops = as_json, stops

    async def check(self, name: str, probe: Awaitable[str], fix: str) -> Check:
        """Run a probe and report what it returns as ok, a Doubt as a warning, and other expected errors as failures."""
        outcome: Outcome = "failed"
        mend: str | None = fix
        try:
            outcome, found, mend = "ok", await probe, None
        except Finding as finding:
            outcome, found, mend = finding.outcome, str(finding), finding.fix or fix
        except LightningError as error:
            found = error.message
        except (aiohttp.ClientError, TimeoutError) as error:
            found = without_secrets(str(error)) or "no answer in time"
        except OTHER_SHAPE:
            found = "an answer does not have the expected shape"
        self.add(name, outcome, found, mend)
        return self.checks[-1]

    def add(self, name: str, outcome: Outcome, found: str, fix: str | None = None) -> None:
        self.checks.append(Check(name, outcome, found, fix))
        if not self._as_json:
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True, min_width=7)
            table.add_column(no_wrap=True, min_width=16)
            table.add_column(overflow="fold")
            table.add_row(plain(outcome, STYLE[outcome]), plain(name), plain(found))
            if fix:
                table.add_row("", "", plain(f"→ {fix}"))
            Console(highlight=False).print(table)
        if self._stops and outcome == "failed":
            raise Broken

    def end(self) -> bool:
        """Print the JSON if requested, and return whether no check failed."""
        if self._as_json:
            print_json([asdict(check) for check in self.checks])
        return all(check.outcome != "failed" for check in self.checks)


def doctor(path: Path | None, *, as_json: bool) -> bool:
    """Print every check and return whether none failed."""
    report = Report(as_json=as_json)
    run_until_signal(run_checks(path, report))
    return report.end()


async def run_checks(path: Path | None, report: Report) -> None:
    """Run all checks, except those that depend on a failed one."""
    try:
        config = load_config(path)
    except ConfigError as error:
        report.add("configuration", "failed", error.message, "correct the configuration and run doctor again")
        return
    report.add("configuration", "ok", str(path) if path else "defaults and environment")
    mend = "start the server, or set store.url" if config.store.is_postgres else "make it writable, or set store.url"
    await report.check("store", probe_store(config.store), mend)
    try:
        await put_back_left(config, partial(report.add, "learn", "ok"))
    except ConfigError:
        report.add("learn", "ok", "a trainer or a `doctor --learn` is running")
    async with open_session() as session, ApiClient.of(config) as api:
        await check_running(config, session, api, report)


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=REACH_S))


async def check_running(config: Config, session: aiohttp.ClientSession, api: ApiClient, report: Report) -> None:
    """Check the proxy, the model servers, the rewards and the trainer."""
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
        await report.check("trainer", probe_trainer(config), "start a trainer with `lightning-proxy train`")
        await report.check("next step", probe_step(config), "see the store's check above")


async def probe_store(config: StoreConfig) -> str:
    """Check that the store can be written or created, and that there is room on the disk of an SQLite store."""
    if config.is_postgres:
        await _require_writable(config)
        return f"{config.where}, writable"
    path = config.path.absolute()
    directory, is_there = next(parent for parent in path.parents if parent.exists()), path.exists()
    can_write = directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
    if not is_there and not can_write:
        raise Finding(f"{path} cannot be created: {directory} cannot be written to", "set store.url to another place")
    free = shutil.disk_usage(directory).free
    if free < ROOM or (can_write and not has_room(directory)):
        raise Finding(f"the disk that holds {directory} is full", "free space: calls and rewards are refused with 503")
    if is_there:
        await _require_writable(config)
    found = "writable" if is_there else "not there yet: the first start creates it"
    return f"{path}, {found}, {free / 2**30:.0f} GiB free"


async def _require_writable(config: StoreConfig) -> None:
    async with opened(config, to_write=False):
        pass  # one of another schema is not changed by looking
    async with opened(config) as database:
        await database.require_writable()


async def probe_proxy(api: ApiClient, store: StoreConfig) -> str:
    """Check that the proxy answers and accepts our key, and that the configured store is not missing."""
    try:
        policy = await api.policy()
    except ProxyNotThere:
        start = "start the proxy with `lightning-proxy serve`; `up` starts it once vLLM answers"
        elsewhere = "" if store.may_be_there else f"; if it is already running, {ELSEWHERE}"
        raise Finding(f"nothing answers at {api.url}", f"{start}{elsewhere}") from None
    if not store.may_be_there:
        raise Finding(f"{api.url} {OTHER_STORE}: there is no {store.where}", ELSEWHERE)
    return f"{api.url}, policy version {policy['live_version']} live"


async def check_servers(
    config: Config, session: aiohttp.ClientSession, upstream: UpstreamConfig, report: Report
) -> bool:
    """Check that each of an upstream's servers answers. Return whether the first does, or True for litellm."""
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
        return f"{shown(url)} needs a key: the agents' own keys are passed on"
    if status >= 400:
        raise Finding(f"{shown(url)}/models answers with HTTP {status}", "correct the upstream's base_url or api_key")
    return shown(url)


async def probe_mode(config: Config, api: ApiClient) -> str:
    """Check that proxy, store and this configuration publish in the same mode."""
    mode, kept, policy = publish_mode(config), first_value(config.store, DECIDED), await api.policy()
    others = {"the running proxy": policy["publish"], "the store": kept}
    if wrong := [f"{name} has {other}" for name, other in others.items() if other not in (None, mode)]:
        raise Finding(f"policy.publish is {mode} here, but {' and '.join(wrong)}")
    return mode


async def probe_alias(config: Config, session: aiohttp.ClientSession, api: ApiClient) -> str:
    """Check that a call for the policy alias is answered and trainable, then discard and try to delete its rollout."""
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
        left = f"; rollout {rollout} stays: only an admin key can delete it"
    if answer.status != 200:
        raise Finding(f"model {alias!r} answers with HTTP {answer.status}: {text[:200]}", "look at the upstream's log")
    if not call["trainable"]:
        raise Finding(f"calls to {alias!r} cannot be trained on: {call['untrainable_reason']}", "see the checks above")
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
        idle = f"{NO_REWARDS}; rollouts.end_after_idle_s ends rollouts that stay idle"
        raise Doubt(f"none of the newest {len(called)} training rollouts has ended", idle)
    found = f"{rewarded} of the newest {len(ended)} ended training rollouts have a reward"
    if rewarded == 0:
        posted = [reward for one in ended[:3] for reward in (await api.rollout(one["rollout_id"]))["rewards"]]
        names = ", ".join(sorted({reward["name"] for reward in posted}))
        fix = f"the rollouts have rewards named {names}: give these names weights in trainer.reward_weights"
        raise Finding(found, fix if names else None)
    if rewarded < len(ended) / 2:
        raise Doubt(found)
    if all(r["task_id"] is None for r in ended):
        raise Doubt(f"{found}, but none has a task id", "send X-Task-Id: only rollouts of the same task are compared")
    return found


async def waiting_groups(config: Config) -> Any:
    async with opened(config.store, to_write=False) as database:
        return await Store(database).waiting.groups(grouping=Grouping.of(config.trainer))


async def probe_trainer(config: Config) -> str:
    """Warn if enough rollouts wait for a step but no trainer is running."""
    if config.store.is_postgres or Path(f"{config.store.path.resolve()}-trainer").exists():
        async with opened(config.store, to_write=False) as database, database.lock("trainer") as is_free:
            if not is_free:
                return "a trainer is running on this store"
    if full_groups(await waiting_groups(config)) >= config.trainer.tasks_per_step:
        raise Doubt("no trainer is running, though enough rollouts wait for a step")
    return "no trainer is running on this store; `lightning-proxy train` starts one"


async def probe_step(config: Config) -> str:
    """Return what the next step waits for."""
    return what_is_missing(await waiting_groups(config), config.trainer)


class VllmChecks:
    """The checks of the policy's vLLM. All but the one for the shared directory look only at the first server."""

    def __init__(self, config: Config, session: aiohttp.ClientSession, upstream: UpstreamConfig) -> None:
        self._config, self._session = config, session
        self._roots = [url.removesuffix("/v1") for url in upstream.published_to]
        self._headers = upstream.credentials | operator_headers(config.policy.directory)
        self._publish = publish_mode(config)
        self._model = ""

    async def run(self, report: Report) -> None:
        """Run all checks, or only the first if that fails."""
        first = await report.check("policy server", self._length(), RESTART)
        if first.outcome == "failed":
            return
        await report.check("tokens", self._tokens(), RESTART)
        await report.check("logprobs", self._logprobs(), RESTART)
        await report.check("sampling", self._sampling(), RESTART)
        await report.check("template", self._template(), RESTART)
        await report.check("tools", self._tools(), RESTART)
        await report.check("publishing", self._publishing(), RESTART)
        await report.check("operator", self._operator(), RESTART)
        if self._publish == "lora":
            await report.check("shared directory", self._shared(), RESTART)

    async def _length(self) -> str:
        """Find the base model, and check that samples may be as long as its context."""
        status, answer = await self._send("GET", "/v1/models")
        served = answer["data"] if status < 400 else ()
        base = next((model for model in served if model.get("parent") is None), None)
        if base is None:
            raise Finding(f"/v1/models lists no base model (HTTP {status})")
        self._model, length = base["id"], base.get("max_model_len")
        longest = self._config.trainer.max_sample_tokens
        if longest is not None and length is not None and length > longest:
            fix = f"raise trainer.max_sample_tokens to {length}, or set vllm.max_model_len"
            found = f"{self._model} has a context of {length} tokens, but samples over {longest} tokens are dropped"
            raise Doubt(found, fix)
        return f"{self._model} has a context of {length} tokens"

    async def _tokens(self) -> str:
        answer = await self._chat(max_tokens=4)
        choice = answer["choices"][0]
        # SGLang gives a prompt's ids in each choice.
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content") or []
        if not ids or not (answer.get("prompt_token_ids") or choice.get("prompt_token_ids")):
            raise Finding("the server returns no token ids", "use vLLM 0.10 or newer, for return_token_ids")
        if not len(ids) == len(logprobs) == (wanted := answer["usage"]["completion_tokens"]):
            raise Finding(f"{len(ids)} token ids and {len(logprobs)} log-probabilities came for {wanted} tokens")
        return "the server returns token ids and log-probabilities"

    async def _logprobs(self) -> str:
        """Check that log-probabilities are computed after temperature, whose halving then doubles their gaps."""
        tops = []
        for temperature in (1.0, 0.5):
            answer = await self._chat(max_tokens=1, temperature=temperature, top_logprobs=5)
            first = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            # Tokens that cannot be sampled are left out.
            tops.append({entry["token"]: entry["logprob"] for entry in first if entry["logprob"] > -1000})
        warm, cold = tops
        common = sorted(warm.keys() & cold.keys(), key=lambda token: warm[token])
        if len(common) < 2 or (gap := warm[common[-1]] - warm[common[0]]) < 0.1:
            raise Doubt("cannot tell whether log-probabilities are computed after temperature")
        if any(value > 0.001 for value in warm.values()):
            raise Finding("the server returns logits, not log-probabilities")
        if (cold[common[-1]] - cold[common[0]]) / gap < 1.5:
            fix = f"{RESTART}, or add --logprobs-mode processed_logprobs"
            raise Finding("log-probabilities are computed before temperature: tokens are sampled with others", fix)
        return "computed after temperature, as training needs them"

    async def _sampling(self) -> str:
        """Check the route that renders a request to tokens and sampling parameters."""
        status, _ = await self._post(RENDER, messages=QUESTION)
        if status >= 400:
            found = f"{RENDER} answers with HTTP {status}: calls with a grammar are not trained on"
            raise Doubt(f"{found}; policy.token_continuity cannot be exact", f"{RESTART}, or add --enable-scale-out")
        return "the server says how it samples"

    async def _template(self) -> str:
        """Check that a second turn's prompt begins with the first turn's prompt and the answer's tokens."""
        more = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And plus one?"}]
        asked = (
            {"messages": QUESTION, "add_generation_prompt": True},
            {"prompt": ANSWER, "add_special_tokens": False},
            {"messages": [*QUESTION, *more], "add_generation_prompt": True},
        )
        first, said, second = [list((await self._answer("/tokenize", **body))["tokens"]) for body in asked]
        if second[: len(first + said)] != first + said:
            fix = "for faster training, give vLLM a --chat-template that leaves earlier turns as they were"
            raise Doubt("a second turn changes the tokens before it: each call is trained on as its own row", fix)
        return "a second turn keeps the tokens of the first: a conversation is trained on as one row"

    async def _tools(self) -> str:
        status, answer = await self._post(CHAT, messages=QUESTION, tools=[TOOL], max_tokens=1)
        if status < 400:
            return "a request with tools is answered"
        found = f"a request with tools gets HTTP {status} ({str(answer)[:200]}); agents without tools can ignore this"
        fix = "for tools, add --enable-auto-tool-choice --tool-call-parser NAME to vllm.extra_args (docs/agents.md)"
        raise Doubt(found, fix)

    async def _publishing(self) -> str:
        """Check the routes that load new weights, and that we may use them."""
        lora = self._publish == "lora"
        for method, path in [("POST", LOAD)] if lora else [("GET", "/weight_info"), ("GET", "/is_paused")]:
            status, _ = await self._send(method, path, {} if lora else None)
            if status in REFUSED:
                key = key_file(self._config.policy.directory).absolute()
                fix = "run doctor where vLLM was started, or with the configuration that it was started with"
                raise Finding(f"the policy server does not accept the key in {key}", fix)
            # An adapter without a name is refused where adapters can be loaded, and not found where they cannot.
            if lora and status in (404, 405):
                fix = f"{RESTART}, or set VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
                raise Finding("policy.publish is lora, but the server cannot load adapters", fix)
            if not lora and status >= 400:
                fix = f"{RESTART}, or set VLLM_SERVER_DEV_MODE=1 on a server that only this machine reaches"
                raise Finding(f"policy.publish is merged, but {path} answers with HTTP {status}", fix)
        return f"{self._publish}: new weights can be loaded while the server runs"

    async def _operator(self) -> str:
        """Check that a web page could not use the routes that publishing needs."""
        method, path = ("POST", LOAD) if self._publish == "lora" else ("GET", "/is_paused")
        status, _ = await self._send(method, path, {}, {"Origin": "https://page.example"})
        if status in (*REFUSED, 404, 405):
            return "only this configuration's key can change the server's weights"
        found = "a web page, or any program that reaches this vLLM, can replace its weights"
        raise Doubt(found, f"{RESTART}, or add the operator guard (docs/security.md)")

    async def _shared(self) -> str:
        """Check that each server can read adapters from the directory for new weights."""
        directory = self._config.policy.directory
        fix = "share policy.directory with the server, under the same path (docs/running.md)"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(prefix="doctor-", dir=directory.absolute())
        except OSError as error:
            raise Finding(f"cannot write to {directory}: {error.strerror}", "correct policy.directory") from None
        with made as path:
            Path(path, "adapter_config.json").write_text(json.dumps(ABOUT))
            for root in self._roots:
                adapter = {"lora_name": "lightning-doctor"}
                status, answer = await self._send("POST", LOAD, adapter | {"lora_path": path}, root=root)
                if status < 400:
                    await self._send("POST", UNLOAD, adapter, root=root)
                elif status == 404 or "No adapter found" in str(answer):
                    raise Finding(f"{root} cannot read {directory.absolute()}, so it gets no new weights", fix)
                elif "contain tensors" not in str(answer):
                    found = f"cannot tell whether {root} can read {directory}: HTTP {status} {str(answer)[:200]}"
                    raise Doubt(found, fix)
        return f"{', '.join(self._roots)} reads adapters from {directory}"

    async def _chat(self, **more: Any) -> Any:
        plain = {"messages": QUESTION, "logprobs": True, "top_p": 1.0, "top_k": 0}
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return await self._answer(CHAT, **plain, **ids, **more)

    async def _answer(self, path: str, **body: Any) -> Any:
        status, answer = await self._post(path, **body)
        if status >= 400:
            raise Finding(f"{path} answers with HTTP {status}: {str(answer)[:200]}")
        return answer

    async def _post(self, path: str, **body: Any) -> tuple[int, Any]:
        return await self._send("POST", path, {"model": self._model, **body})

    async def _send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, root: str = ""
    ) -> tuple[int, Any]:
        """Send a request and return the answer's status and body. `headers` replace our keys; `root` names a server."""
        url, sent = (root or self._roots[0]) + path, self._headers if headers is None else headers
        async with self._session.request(method, url, json=body, headers=sent) as answer:
            is_json = "json" in answer.content_type
            return answer.status, await (answer.json() if is_json else answer.text())
