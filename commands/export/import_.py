"""`import`: records conversations from elsewhere, as rollouts of another model. The proxy need not be running."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import typer

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
from ..files import lines
from ..formats import progress_bar
from ..signals import run_until_signal

Json = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST = sys.float_info.max
UPSTREAM = SOURCE = "import"


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    """One line or row of the file. `answers` are the indices of the assistant messages whose `weight` is not 0."""

    name: RolloutName
    model: str
    messages: list[Json]
    tools: list[Json]
    answers: list[int]
    reward: float | None
    failed: bool


def import_command(config: Config, file: Path, model: str, reward: float) -> None:
    """Run `import`. If a line is not a conversation, raise ConfigError and import nothing.

    A conversation that was imported before stays unchanged; an interrupted import is continued.
    """
    if not math.isfinite(reward):
        raise ConfigError(f"--reward must be a finite number, got {reward}")
    count = 0
    for count, conversation in enumerate(conversations(file, model, reward), 1):  # all, before the first is recorded
        if conversation.reward is not None:
            try:
                config.rewards.require(conversation.reward, f"{file}, conversation {count}: reward")
            except Unprocessable as error:
                raise ConfigError(error.message) from None

    async def record() -> int:
        redactor = Redactor(config.recording.redact, config.keys())
        async with opened(config.store) as database:
            store = Store(database)
            async with Recorder(store, merged=False, redactor=redactor) as recorder:
                with progress_bar() as progress:
                    read = progress.track(conversations(file, model, reward), count, description="conversations")
                    return sum([await _record(store, recorder, conversation) for conversation in read])

    recorded = run_until_signal(record())
    known = f", {count - recorded} were already in the store" if recorded < count else ""
    typer.echo(f"{recorded} rollouts imported from {file}{known}", err=True)


def conversations(file: Path, model: str, reward: float) -> Iterator[ImportedConversation]:
    """Yield the file's conversations. Raise ConfigError at a line that is not one."""
    for number, line in lines(file):
        try:
            yield _read(line, model, reward)
        except (InvalidRequest, ValueError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
        except Exception as error:  # a file of others may have anything at any place
            what = f"it is not a conversation ({type(error).__name__} {str(error)[:200]})"
            raise ConfigError(f"{file}, line {number}: {what}") from None


def _read(line: str, model: str, reward: float) -> ImportedConversation:
    """Read a line. Raise ValueError or InvalidRequest if it is not a conversation."""
    row = loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError("it is not an object with a list of `messages`")
    messages = [_message(message, i) for i, message in enumerate(row["messages"], 1)]
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and row["messages"][i].get("weight") != 0]
    if not answers or answers[0] == 0:
        raise ValueError("it needs an assistant message with `weight` not 0, but not as the first message")
    mode = row.get("mode") or "train"
    if mode not in get_args(Mode):
        raise ValueError(f"`mode` must be train or eval, got {str(mode)[:50]!r}")
    task = None if row.get("task_id") in (None, "") else check_id(str(row["task_id"]), "task_id")
    # The same line is the same rollout, however often it is imported.
    same = dumps([messages, row.get("tools"), row.get("task_id")])
    digest = hashlib.sha256(same.encode()).hexdigest()[:32]
    failed = row.get("status") == "failed"
    if (given := row.get("reward")) is None:
        given = None if failed else reward  # nobody has judged what failed
    elif isinstance(given, bool) or not isinstance(given, int | float) or not -MOST <= given <= MOST:
        raise ValueError(f"`reward` is not a finite number: {str(given)[:50]}")
    return ImportedConversation(
        name=RolloutName(f"import-{digest}", task, mode=cast(Mode, mode)),
        model=str(row.get("model") or model),
        messages=messages,
        tools=dicts(row.get("tools")),
        answers=answers,
        reward=None if given is None else float(given),
        failed=failed,
    )


def _message(message: Any, place: int) -> Json:
    """Return the message in chat's form. Raise ValueError if it is not a message."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"message {place}: `role` must be one of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str | list | None):
        raise ValueError(f"message {place}: `content` must be a string, a list or null")
    kept = {name: value for name, value in message.items() if name not in ("weight", "tool_calls")}
    made = []
    for i, call in enumerate(message.get("tool_calls") or ()):
        if not isinstance(call, dict) or not isinstance(name := (call.get("function") or {}).get("name"), str):
            raise ValueError(f"message {place}: `tool_calls` must be calls of named functions")
        arguments = call["function"].get("arguments")
        text = arguments if isinstance(arguments, str) else dumps(arguments or {})
        function = {"name": name, "arguments": text}
        made.append({"id": str(call.get("id") or f"call_{place}_{i}"), "type": "function", "function": function})
    return kept | ({"tool_calls": made} if made else {})


async def _record(store: Store, recorder: Recorder, conversation: ImportedConversation) -> bool:
    """Record a call for each answer and end the rollout. If it has already ended, record nothing and return False.

    Calls that an interrupted import has recorded are skipped.
    """
    rollout_id = conversation.name.rollout_id
    try:
        if (await store.rollouts.get(rollout_id)).status != "running":
            return False
    except NotFound:
        pass
    for place in conversation.answers:
        start, end = _call(conversation, place)
        status = await store.calls.status(rollout_id, end.call_id)
        if status is None:
            await recorder.start(start)
        elif status == "incomplete":
            recorder.resume(start)
        else:
            continue
        await recorder.end(end)
    if conversation.failed:
        await store.rollouts.end(rollout_id, "failed", "it had failed when it was imported")
    if conversation.reward is not None:
        reward = Reward(rollout_id, conversation.reward, source=SOURCE, final=not conversation.failed)
        await store.rewards.post([reward])
    return True


def _call(conversation: ImportedConversation, place: int) -> tuple[CallStart, CallEnd]:
    message, name, model = conversation.messages[place], conversation.name, conversation.model
    call_id = f"{name.rollout_id}-{place}"
    request = {"model": model, "messages": conversation.messages[:place]}
    if conversation.tools:
        request["tools"] = conversation.tools
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
    answer = {"object": "chat.completion", "model": model, "choices": [choice]}
    start = CallStart(
        call_id, name, "chat/completions", model, None, request, time.time(), upstream=UPSTREAM, pins=False
    )
    end = CallEnd(
        call_id, name.rollout_id, "ok", answer, None, tool_calls=tool_calls(answer), untrainable_reason=NOT_THE_POLICY,
        model=model, imported=True,
    )  # fmt: skip
    return start, end
