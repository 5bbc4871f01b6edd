"""`import`: records conversations of others, as rollouts that another model answered. The proxy need not run."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console

from ...core.config.root import Config
from ...core.errors import ConfigError, InvalidRequest, NotFound, Unprocessable
from ...core.json_text import dumps, loads
from ...core.records import CallEnd, CallStart, Mode, Reward, RolloutName, check_id
from ...core.redact import Redactor
from ...core.tokens import NOT_THE_POLICY
from ...core.tools import dicts, tool_calls
from ...proxy.gateway.recorder import Recorder
from ...store.opening import opened
from ...store.store import Store
from ..formats import progress_bar
from ..signals import run_until_signal
from .conversations import conversation_of, is_trajectory

Json = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MOST = sys.float_info.max
UPSTREAM = SOURCE = "import"


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    """One line. `answers`: the places of the assistant's messages."""

    name: RolloutName
    model: str
    messages: list[Json]
    tools: list[Json]
    answers: list[int]
    reward: float | None
    failed: bool


@dataclass(slots=True)
class ImportCounts:
    """How many rollouts were recorded, and how many were there already."""

    rollouts: int = 0
    known: int = 0


def import_command(config: Config, file: Path, model: str, reward: float) -> None:
    """Run `import`. Raises ConfigError, and imports nothing, if a line is no conversation."""
    if not math.isfinite(reward):
        raise ConfigError(f"--reward must be a finite number, got {reward}")
    lines = 0
    for lines, one in enumerate(conversations(file, model, reward), 1):  # all, before the first is recorded
        if one.reward is not None:
            try:
                config.rewards.require(one.reward, f"{file}, conversation {lines}: reward")
            except Unprocessable as error:
                raise ConfigError(error.message) from None
    brought = run_until_signal(import_file(config, file, model, reward, lines))
    known = f", {brought.known} were there already" if brought.known else ""
    Console(stderr=True).print(f"{brought.rollouts} rollouts from {file}{known}", markup=False, soft_wrap=True)


async def import_file(config: Config, file: Path, model: str, reward: float, lines: int) -> ImportCounts:
    """Record the file's conversations. One that is in the store already is left as it is."""
    brought = ImportCounts()
    redactor = Redactor(config.recording.redact, config.keys())
    async with opened(config.store) as database:
        store = Store(database)
        async with Recorder(store, merged=False, redactor=redactor) as recorder:
            with progress_bar() as progress:
                for one in progress.track(conversations(file, model, reward), lines, description="conversations"):
                    if await _is_known(store, one):
                        brought.known += 1
                        continue
                    await _record(store, recorder, one)
                    await _end(store, one)
                    brought.rollouts += 1
    return brought


def conversations(file: Path, model: str, reward: float) -> Iterator[ImportedConversation]:
    """Yield the file's conversations; ConfigError with the line's number for one that is none."""
    try:
        with file.open(encoding="utf-8") as opened_file:
            one = file.suffix == ".json"  # a trajectory, over several lines
            for number, line in enumerate([opened_file.read().replace("\n", " ")] if one else opened_file, 1):
                if text := line.strip("\ufeff \t\r\n"):  # a byte-order mark begins files that were saved on Windows
                    try:
                        yield _read(text, model, reward)
                    except (InvalidRequest, ValueError) as error:
                        raise ConfigError(f"{file}, line {number}: {error}") from None
                    except Exception as error:  # a file of others may have anything at any place
                        what = f"it is no conversation: {type(error).__name__} {str(error)[:200]}"
                        raise ConfigError(f"{file}, line {number}: {what}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is no text in UTF-8") from None


def _read(line: str, model: str, reward: float) -> ImportedConversation:
    """Read a line; ValueError or InvalidRequest if it is no conversation."""
    row = loads(line)
    if is_trajectory(row):
        row = conversation_of(row)
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError("it is no object with `messages`")
    messages = _with_tools([_message(message, i) for i, message in enumerate(row["messages"], 1)])
    tools = dicts(row.get("tools")) or [{"type": "function", "function": one} for one in dicts(row.get("functions"))]
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and row["messages"][i].get("weight") != 0]
    if not answers or answers[0] == 0:
        raise ValueError("no message of the assistant answers another one")
    mode = row.get("mode") or "train"
    if mode not in get_args(Mode):
        raise ValueError(f"`mode` is train or eval, got {str(mode)[:50]!r}")
    task = None if row.get("task_id") in (None, "") else check_id(str(row["task_id"]), "task_id")
    # The same line is the same rollout, however often it is imported.
    same = dumps([messages, row.get("tools", row.get("functions")), row.get("task_id")])
    digest = hashlib.sha256(same.encode()).hexdigest()[:32]
    return ImportedConversation(
        name=RolloutName(f"import-{digest}", task, mode=cast(Mode, mode)),
        model=str(row.get("model") or model),
        messages=messages,
        tools=tools,
        answers=answers,
        reward=_reward(row, reward),
        failed=row.get("status") == "failed",
    )


def _reward(row: Json, otherwise: float) -> float | None:
    """The row's reward. One that failed gets none by default: nobody has judged it."""
    found = row.get("reward")
    if found is None:
        return None if row.get("status") == "failed" else otherwise
    if isinstance(found, bool) or not isinstance(found, int | float) or not -MOST <= found <= MOST:
        raise ValueError(f"`reward` is no finite number: {str(found)[:50]}")
    return float(found)


def _message(message: Any, place: int) -> Json:
    """A message as chat has it; ValueError if it is none."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"message {place} has no role among {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str | list | None):
        raise ValueError(f"message {place}: `content` is neither text nor a list")
    kept = {name: value for name, value in message.items() if name not in ("weight", "function_call")}
    calls = message.get("tool_calls")
    if not calls and (called := message.get("function_call")):
        calls = [{"function": called}]
    if not calls:
        return kept
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    ):
        raise ValueError(f"message {place}: `tool_calls` are no calls of functions")
    return kept | {"tool_calls": [_tool_call(call, place, i) for i, call in enumerate(calls)]}


def _tool_call(call: Json, place: int, i: int) -> Json:
    function = call["function"]
    if not isinstance(function.get("name"), str):
        raise ValueError(f"message {place}: a tool call has no name")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else dumps(arguments or {})
    made = {"name": function["name"], "arguments": text}
    return {"id": str(call.get("id") or f"call_{place}_{i}"), "type": "function", "function": made}


def _with_tools(messages: list[Json]) -> list[Json]:
    """Results of functions as results of tools: each of the first call of its name that has none yet."""
    found, open_calls = list[Json](), list[tuple[str, str]]()
    for message in messages:
        open_calls += [(call["function"]["name"], call["id"]) for call in message.get("tool_calls") or ()]
        if message["role"] != "function":
            found.append(message)
            continue
        alike = [call for call in open_calls if call[0] == message.get("name")] or open_calls
        answers = {"tool_call_id": alike[0][1]} if alike else {}
        open_calls = [call for call in open_calls if call not in alike[:1]]
        found.append({**message, "role": "tool", **answers})
    return found


async def _is_known(store: Store, one: ImportedConversation) -> bool:
    try:
        return (await store.rollouts.get(one.name.rollout_id)).status != "running"
    except NotFound:
        return False


async def _record(store: Store, recorder: Recorder, one: ImportedConversation) -> None:
    """Record a call for each answer, as if a model had been called; skip those of an import that broke off."""
    for place in one.answers:
        start, end = _call(one, place)
        match await store.calls.status(end.rollout_id, end.call_id):
            case None:
                await recorder.start(start)
            case "incomplete":
                recorder.resume(start)
            case _:
                continue
        await recorder.end(end)


def _call(one: ImportedConversation, place: int) -> tuple[CallStart, CallEnd]:
    message, rollout_id = one.messages[place], one.name.rollout_id
    call_id = f"{rollout_id}-{place}"
    request = {"model": one.model, "messages": one.messages[:place]} | ({"tools": one.tools} if one.tools else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
    answer = {"object": "chat.completion", "model": one.model, "choices": [choice]}
    start = CallStart(
        call_id, one.name, "chat/completions", one.model, None, request, time.time(), upstream=UPSTREAM, pins=False
    )
    end = CallEnd(
        call_id, rollout_id, "ok", answer, None, tool_calls=tool_calls(answer), untrainable_reason=NOT_THE_POLICY,
        model=one.model, imported=True,
    )  # fmt: skip
    return start, end


async def _end(store: Store, one: ImportedConversation) -> None:
    if one.failed:
        await store.rollouts.end(one.name.rollout_id, "failed", "it had failed when it was imported")
    if one.reward is not None:
        await store.rewards.post([Reward(one.name.rollout_id, one.reward, source=SOURCE, final=not one.failed)])
