"""Makes the store that `train --offline` trains on, once, from another store or from an export.

The original is only read. A store that is in use is copied as of one moment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...commands.files import lines
from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...core.errors import ConfigError, InvalidRequest
from ...core.records import CallEnd, CallStart, Choice, Reward, RolloutName, check_id
from ...core.tools import tool_calls
from ...proxy.gateway.recorder import Recorder
from ...store.opening import opened
from ...store.sqlite.file import copy_store, ended_after, is_sqlite, new_store
from ...store.store import Store

log = logging.getLogger(__name__)

SOURCE_FILE = "source.json"
STORE_FILE = "store.db"
NEEDED = ("rollout_id", "task_id", "mode", "status", "rewards", "t", "kind", "call_id", "prompt_token_ids",
          "response_token_ids", "logprobs", "policy_version")  # fmt: skip
ENDED = ("completed", "failed", "discarded")


async def prepare(source: Path, directory: Path) -> StoreConfig:
    """Return the store to train on in `directory`, made from `source` if missing. Warn if `source` has changed.

    Raises ConfigError if `source` cannot be read, or is not what the store was made from.
    """
    source, target = source.expanduser().absolute(), directory / STORE_FILE
    config = StoreConfig(url=f"sqlite:///{target}")
    note = directory / SOURCE_FILE
    if note.is_file() and target.is_file():
        made = json.loads(note.read_text())
        if str(source) != made["source"]:
            raise ConfigError(
                f"{directory} holds a run over {made['source']}, not over {source}: name another directory (--dir)"
            )
        _say_if_changed(source, made, directory)
        return config
    if (directory / "checkpoints").is_dir():
        raise ConfigError(f"{directory} holds the checkpoints of another trainer: name another directory (--dir)")
    if not source.is_file():
        raise ConfigError(f"there is nothing to train on at {source}: name a store or an export (--data)")
    directory.mkdir(parents=True, exist_ok=True)
    made = {"source": str(source), "made_at": time.time()}
    with new_store(target) as path:
        part = StoreConfig(url=f"sqlite:///{path}")
        if is_sqlite(source):
            copy_store(source, path)
            async with opened(part) as database:
                await Store(database).steps.forget_all()
            _, made["newest_end"] = ended_after(path, 0)
        else:
            made["digest"] = _digest(source)
            await _import(source, part)
    _write_note(note, made)
    return config


def check_store(config: Config) -> None:
    """Raise ConfigError if `policy.directory` holds an offline run of another store than the configured one.

    Each store counts its steps and versions by itself, so each would take the other's files for its own.
    """
    directory, own = config.policy.directory, config.policy.directory / STORE_FILE
    if (directory / SOURCE_FILE).is_file() and (
        config.store.is_postgres or config.store.path.expanduser().resolve() != own.resolve()
    ):
        raise ConfigError(
            f"{directory} holds an offline run: set store.url to sqlite:///{own} to continue from it, "
            "or policy.directory to another directory"
        )


def _write_note(path: Path, note: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(note))
    part.replace(path)


def _say_if_changed(source: Path, note: dict[str, Any], directory: Path) -> None:
    """Warn if there is more data now: a run keeps the data that it began with, so that it can be resumed exactly."""
    what = None
    with suppress(OSError, sqlite3.Error):  # the copy is all that is needed
        what = _change(source, note)
    if what is not None:
        log.warning(
            "%s since %s was made from %s; the run keeps the data that it began with: "
            "name another directory (--dir) to train on the new data too", what, directory, source,
        )  # fmt: skip


def _change(source: Path, note: dict[str, Any]) -> str | None:
    """How the data has changed since the note was written; None if it has not."""
    if "digest" in note and _digest(source) != note["digest"]:
        return "the export was written anew, with other content,"
    if "newest_end" in note and is_sqlite(source):
        more, _ = ended_after(source, note["newest_end"])
        return f"{more} more rollouts have ended" if more else None
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Exports -------------------------------------------------------------------------------------------------------------


async def _import(source: Path, config: StoreConfig) -> None:
    """Record the rollouts of an export of transitions, as far as it has them."""
    versions: set[int] = set()
    async with opened(config) as database:
        store = Store(database)
        async with Recorder(store, merged=False) as recorder:
            for rollout_id, group in groupby(_rows(source), key=itemgetter("rollout_id")):
                rows = list(group)
                if rows[0]["mode"] == "train" and rows[0]["status"] in ENDED:
                    await _import_rollout(store, recorder, check_id(rollout_id, "rollout_id"), rows)
                    versions |= {row["policy_version"] for row in rows} - {None}
        await Store(database).versions.reserve(versions)


async def _import_rollout(store: Store, recorder: Recorder, rollout_id: str, rows: list[dict[str, Any]]) -> None:
    name = RolloutName(rollout_id, rows[0]["task_id"])
    calls = [row for row in rows if row["kind"] == "llm"]
    for at, row in enumerate(calls):
        await _import_call(recorder, name, row, float(at))
    if rewards := _rewards(rollout_id, rows[0]["rewards"] or [], {None, *(row["call_id"] for row in calls)}):
        await store.rewards.post(rewards, None, b"")
    await store.rollouts.end(rollout_id, rows[0]["status"], None)


def _rewards(rollout_id: str, exported: list[dict[str, Any]], call_ids: set[str | None]) -> list[Reward]:
    """The rewards of the rollout (call id None) and of its calls, of every name."""
    return [
        Reward(rollout_id, r["reward"], r["call_id"], r["name"], r.get("source"), final=False)
        for r in exported
        if r["call_id"] in call_ids
    ]


async def _import_call(recorder: Recorder, name: RolloutName, row: dict[str, Any], at: float) -> None:
    shown, action = row.get("state") or {}, row.get("action") or {}
    request = shown if row.get("temperature") is None else shown | {"temperature": row["temperature"]}
    named = RolloutName(name.rollout_id, name.task_id, row.get("agent"))
    start = CallStart(row["call_id"], named, "chat/completions", None, row["policy_version"], request, at)
    prompt, ids, logprobs = (tuple(row[of] or ()) for of in ("prompt_token_ids", "response_token_ids", "logprobs"))
    reason = row.get("untrainable_reason")
    if reason is None and not (prompt and ids and len(ids) == len(logprobs)):
        reason = "no token ids or log-probabilities in the export"
    finish = action.get("finish_reason")
    answer = _answer(action.get("message"), finish)
    choices = (Choice(0, ids, logprobs, finish),) if len(ids) == len(logprobs) else ()
    await recorder.start(start)
    end = CallEnd(row["call_id"], name.rollout_id, "ok", answer, 200, prompt, choices,
                  tool_calls=tool_calls(answer), untrainable_reason=reason)  # fmt: skip
    await recorder.end(end)


def _answer(message: Any, finish: str | None) -> Any:
    """The answer that `transitions.message_of` took the message from."""
    if isinstance(message, dict) and (message.get("object") == "response" or message.get("type") == "message"):
        return message
    what = "text" if isinstance(message, str) else "message"
    return {"choices": [{"index": 0, what: message, "finish_reason": finish}]}


def _rows(source: Path) -> Iterator[dict[str, Any]]:
    """The rows of an export of transitions. Raises ConfigError with the number of a row that is none."""
    found = False
    for number, line in lines(source):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{source}, line {number} is no JSON: {error}") from None
        missing = [name for name in NEEDED if name not in row] if isinstance(row, dict) else ["an object"]
        if missing:
            raise ConfigError(
                f"{source}, row {number}: no {missing[0]}; what can be trained on is a store, or an export with "
                "--kind transitions"
            )
        found = True
        try:
            check_id(row["rollout_id"], "rollout_id")
        except InvalidRequest as error:
            raise ConfigError(f"{source}, row {number}: {error.message}") from None
        yield row
    if not found:
        raise ConfigError(f"{source} is empty: there is nothing to train on")
