"""Creates the store of a `train --offline` run, as a snapshot of another store or from an export."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...commands.files import lines, written
from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...core.errors import ConfigError, InvalidRequest
from ...core.records import CallEnd, CallStart, Choice, Reward, RolloutName, check_id
from ...core.tools import tool_calls
from ...proxy.gateway.recorder import Recorder
from ...store.opening import opened
from ...store.sqlite.file import copy_store, is_sqlite, new_store
from ...store.store import Store

log = logging.getLogger(__name__)

SOURCE_FILE = "source.json"
STORE_FILE = "store.db"
NEEDED = ("rollout_id", "task_id", "mode", "status", "rewards", "t", "kind", "call_id", "prompt_token_ids",
          "response_token_ids", "logprobs", "policy_version")  # fmt: skip
ENDED = ("completed", "failed", "discarded")


async def prepare(source: Path, directory: Path) -> StoreConfig:
    """Return the store in `directory`, made from `source` if missing. Raises ConfigError if either cannot be used."""
    source, target = source.expanduser().absolute(), directory / STORE_FILE
    note = directory / SOURCE_FILE
    if note.is_file() and target.is_file():
        made = json.loads(note.read_text())["source"]
        if str(source) != made:
            raise ConfigError(f"{directory} holds a run on {made}, not on {source}: name another directory (--dir)")
        log.info(
            "the run in %s keeps the data that it began with; name another directory (--dir) for newer data", directory
        )
        return StoreConfig(url=f"sqlite:///{target}")
    if (directory / "checkpoints").is_dir():
        raise ConfigError(f"{directory} holds the checkpoints of another trainer: name another directory (--dir)")
    if not source.is_file():
        raise ConfigError(f"there is nothing to train on at {source}: name a store or an export (--data)")
    directory.mkdir(parents=True, exist_ok=True)
    with new_store(target) as path:
        config = StoreConfig(url=f"sqlite:///{path}")
        if is_sqlite(source):
            copy_store(source, path)
            async with opened(config) as database:
                await Store(database).steps.forget_all()
        else:
            await _import(source, config)
    with written(note) as part:
        part.write_text(json.dumps({"source": str(source)}))
    return StoreConfig(url=f"sqlite:///{target}")


def check_store(config: Config) -> None:
    """Raise ConfigError if `policy.directory` holds an offline run and `store.url` is not that run's store."""
    directory, own = config.policy.directory, config.policy.directory / STORE_FILE
    if (directory / SOURCE_FILE).is_file() and (
        config.store.is_postgres or config.store.path.expanduser().resolve() != own.resolve()
    ):
        raise ConfigError(
            f"{directory} holds an offline run: set store.url to sqlite:///{own} to continue from it, "
            "or policy.directory to another directory"
        )


async def _import(source: Path, config: StoreConfig) -> None:
    versions: set[int] = set()
    async with opened(config) as database:
        store = Store(database)
        async with Recorder(store, merged=False) as recorder:
            for rollout_id, group in groupby(_rows(source), key=itemgetter("rollout_id")):
                rows = list(group)
                first, calls = rows[0], [row for row in rows if row["kind"] == "llm"]
                if first["mode"] != "train" or first["status"] not in ENDED:
                    continue
                for at, row in enumerate(calls):
                    await _import_call(recorder, row, float(at))
                known = {None, *(row["call_id"] for row in calls)}
                rewards = [
                    Reward(rollout_id, r["reward"], r["call_id"], r["name"], r.get("source"), final=False)
                    for r in first["rewards"] or []
                    if r["call_id"] in known
                ]
                if rewards:
                    await store.rewards.post(rewards, None, b"")
                await store.rollouts.end(rollout_id, first["status"], None)
                versions |= {row["policy_version"] for row in rows} - {None}
        await store.versions.reserve(versions)


async def _import_call(recorder: Recorder, row: dict[str, Any], at: float) -> None:
    request, action = row.get("state") or {}, row.get("action") or {}
    if row.get("temperature") is not None:
        request = request | {"temperature": row["temperature"]}
    name = RolloutName(row["rollout_id"], row["task_id"], row.get("agent"))
    await recorder.start(CallStart(row["call_id"], name, "chat/completions", None, row["policy_version"], request, at))
    prompt, ids, logprobs = (tuple(row[of] or ()) for of in ("prompt_token_ids", "response_token_ids", "logprobs"))
    reason = row.get("untrainable_reason")
    if reason is None and not (prompt and ids and len(ids) == len(logprobs)):
        reason = "no token ids or log-probabilities in the export"
    message, finish = action.get("message"), action.get("finish_reason")
    answer = message  # of Responses or Messages: `transitions.message_of` takes it whole
    if not isinstance(message, dict) or (message.get("object") != "response" and message.get("type") != "message"):
        what = "text" if isinstance(message, str) else "message"
        answer = {"choices": [{"index": 0, what: message, "finish_reason": finish}]}
    choices = (Choice(0, ids, logprobs, finish),) if len(ids) == len(logprobs) else ()
    await recorder.end(
        CallEnd(row["call_id"], row["rollout_id"], "ok", answer, 200, prompt, choices,
                tool_calls=tool_calls(answer), untrainable_reason=reason)
    )  # fmt: skip


def _rows(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an export of transitions. Raises ConfigError for any other file."""
    number = 0
    for number, line in lines(source):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{source}, line {number} is not JSON: {error}") from None
        missing = [name for name in NEEDED if name not in row] if isinstance(row, dict) else ["fields"]
        if missing:
            raise ConfigError(
                f"{source}, line {number} has no {missing[0]}; only a store, or an export with --kind transitions, can "
                "be trained on"
            )
        try:
            check_id(row["rollout_id"], "rollout_id")
        except InvalidRequest as error:
            raise ConfigError(f"{source}, line {number}: {error.message}") from None
        yield row
    if number == 0:
        raise ConfigError(f"{source} is empty: there is nothing to train on")
