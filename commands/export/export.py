"""`export`: writes transitions or conversations of the store to a file or a pipe. The proxy need not be running."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import typer

from ...core.config.root import Config
from ...core.config.section import feature_sections
from ...core.errors import ConfigError, LightningError, NotFound
from ...core.json_text import dumps, fields_of
from ...core.records import Event, ModelCall, Reward, Rollout, RolloutStatus
from ...core.redact import REASON as REDACTED
from ...proxy.api.views import call_fields, call_view, transitions
from ...proxy.dialects.transcript import beginnings, chat_turns
from ...store.database import Row
from ...store.opening import opened
from ...store.sqlite.file import IdleFile, is_in_use, make_private
from ...store.store import Store
from ..files import is_stream, pyarrow, written
from ..formats import progress_bar
from ..show.find import since_of
from ..signals import run_until_signal

Json = dict[str, Any]

FORMATS = ("jsonl", "parquet")
ALL = "all"
IMITATED = ("completed", "failed")  # unless others are asked for: none that is still running, or discarded
PAGE = 100
ROW_GROUP = 256  # rows of Parquet that are held in memory
ODD = "the rollout cannot be written"
REJECTED = "another attempt was used in place of its last answer"
SEVERAL = "several answers: it is not known which one earned the reward"

# What features say of each call.
CALL_FIELDS = tuple(name for feature in feature_sections().values() for name in feature.names_of_call_fields)
OF_ROLLOUT = ("rollout_id", "task_id", "mode", "status")
OF_CALL = ("temperature", "untrainable_reason", "started_at", "latency_ms", "usage")
OF_REWARD = ("call_id", "name", "reward", "source")
TOKENS = ("prompt_token_ids", "response_token_ids", "logprobs")
OF_CREDIT = ("return", "advantage", "step")
# The columns of Parquet by their type. Objects differ in shape from row to row, and are JSON text there.
COLUMNS: dict[str, dict[str, Sequence[str]]] = {
    "transitions": {
        "json": ("state", "action", "next_state", "rewards", "usage", "metadata", *CALL_FIELDS),
        "string": (*OF_ROLLOUT, "kind", "agent", "call_id", "untrainable_reason"),
        "float64": ("rollout_reward", "reward", "call_reward", "temperature", *OF_CREDIT[:2], *OF_CALL[2:4]),
        "int32": ("t", "policy_version", "step"),
        "bool": ("done",),
        "list_int32": TOKENS[:2],
        "list_float32": TOKENS[2:],
    },
    "sft": {"json": ("messages", "tools"), "string": (*OF_ROLLOUT, "agent", "model"), "float64": ("reward",)},
}


def export_command(config: Config, target: Path, kind: str, **filters: Any) -> None:
    """Run `export`. Raises ConfigError for a wrong option, and LightningError if the export fails.

    `filters` are those of the control API, except that `since` is a text as on the command line.
    """
    format = "jsonl" if is_stream(target) else target.suffix.removeprefix(".")
    if format not in FORMATS:
        raise ConfigError(f"the file must end in .jsonl or .parquet, got {target.name!r}")
    if not config.store.may_be_there:
        raise LightningError(f"there is no store at {config.store.where} (store.url)")
    statuses = IMITATED if kind == "sft" and filters["status"] is None else get_args(RolloutStatus)
    if kind == "sft":
        filters["mode"] = filters["mode"] or "train"
    filters["since"] = since_of(filters["since"])
    filters = {name: value for name, value in filters.items() if value not in (None, ALL)}
    left_out: Counter[str] = Counter()

    async def run() -> int:
        path = None if config.store.is_postgres else config.store.path
        rows = 0
        with written(target) as file, _parquet(file, kind) if format == "parquet" else _json_lines(file) as write:
            idle = None if path is None or is_in_use(path) else IdleFile(path)
            async with opened(config.store, to_write=False) as database:
                store = Store(database)
                async for rollout in _rollouts(store, filters):
                    for row in await _rows(store, rollout, kind, left_out) if rollout.status in statuses else ():
                        write(row)
                        rows += 1
            if idle is not None and idle.is_written():
                raise LightningError(f"{path} was written to during the export, so rows may be wrong: export again")
        return rows

    typer.echo(f"{run_until_signal(run())} {kind} rows written to {target}", err=True)
    for reason, n in left_out.most_common():
        typer.echo(f"{n} not exported: {reason}", err=True)


async def _rollouts(store: Store, filters: Json) -> AsyncIterator[Rollout]:
    """The matching rollouts, newest first, with a progress bar."""
    total = None if filters else sum((await store.rollouts.counts()).values())
    with progress_bar() as progress:
        bar = progress.add_task("rollouts", total=total)
        cursor, is_over = None, False
        while not is_over:
            page, cursor = await store.rollouts.page(filters, PAGE, cursor)
            is_over = cursor is None
            for rollout in page:
                progress.advance(bar)
                yield rollout


async def _rows(store: Store, rollout: Rollout, kind: str, left_out: Counter[str]) -> list[Json]:
    """Return the rollout's rows; none if it has been deleted, or if it cannot be written, which `left_out` counts."""
    name = rollout.rollout_id
    try:
        calls = await store.calls.of(name, short=kind == "sft")
        if kind == "sft":
            return list(conversations(rollout, calls, left_out))
        events, rewards = await store.events.of(name), await store.rewards.of(name)
        return list(_transitions(rollout, calls, events, rewards, await store.credit.of(name)))
    except NotFound:
        return []
    except LightningError:
        raise
    except Exception as error:  # the record may hold whatever agents and upstreams have written
        left_out[f"{ODD} ({type(error).__name__}: {error})"] += 1
        return []


def conversations(rollout: Rollout, calls: Sequence[ModelCall], left_out: Counter[str]) -> Iterator[Json]:
    """Yield a row for each conversation of a rollout. A conversation ends where no later call continues or repeats it.

    Conversations that cannot be exported are counted in `left_out`, by reason.
    """
    turns = [
        (call, turn, fields)
        for call, turn, fields in zip(calls, chat_turns([*map(call_view, calls)]), call_fields(calls), strict=True)
        if call.is_decision and call.response is not None
    ]
    latest, lasts = dict[int, int](), list[int]()
    for i, (_, turn, _) in enumerate(turns):
        digests = [*beginnings(turn.messages)]
        latest |= dict.fromkeys(digests, i)
        lasts.append(digests[-1])
    for i, (call, turn, fields) in enumerate(turns):
        if not turn.answer or latest[lasts[i]] != i:
            continue
        unreadable = REDACTED if call.untrainable_reason == REDACTED else turn.unreadable
        if reason := unreadable or (REJECTED if fields.get("rejected") else None):
            left_out[reason] += 1
            continue
        facts = {name: getattr(rollout, name) for name in (*OF_ROLLOUT, "reward")}
        yield {
            "messages": turn.messages, "tools": turn.tools or None, **facts, "agent": call.agent, "model": call.model,
        }  # fmt: skip


def _transitions(
    rollout: Rollout, calls: list[ModelCall], events: Sequence[Event], rewards: Sequence[Reward], credit: Sequence[Row]
) -> Iterator[Json]:
    """Yield a row for each transition. The first row has the rollout's rewards: the newest of each name and call."""
    newest = {(r.call_id, r.name): r for r in rewards}.values()
    by_id = {call.call_id: call for call in calls}
    credits = {row["call_id"]: row for row in credit}
    of_features = dict(zip(by_id, call_fields(calls), strict=True))
    for transition in transitions(rollout, calls, events):
        call = by_id[transition.call_id] if transition.call_id is not None else None
        sampled = call if transition.kind == "llm" else None
        row = {
            **{name: getattr(rollout, name) for name in OF_ROLLOUT},
            "rollout_reward": rollout.reward,
            "policy_version": call.policy_version if call else None,
            **{name: _without_ids(value) for name, value in fields_of(transition).items()},
            **{name: getattr(sampled, name, ()) for name in TOKENS},
            **{name: getattr(sampled, name, None) for name in OF_CALL},
            **dict.fromkeys(("call_reward", *OF_CREDIT, *CALL_FIELDS, "rewards")),
            "metadata": rollout.metadata,
        }
        if sampled is not None:
            trained = credits.get(sampled.call_id, {})
            row["call_reward"] = sampled.reward
            row |= {name: trained[name] for name in OF_CREDIT if trained} | of_features[sampled.call_id]
            if len(sampled.choices) > 1:
                row["untrainable_reason"] = SEVERAL
        if transition.t == 0:
            row["rewards"] = [{name: getattr(r, name) for name in OF_REWARD} for r in newest]
        yield row


def _without_ids(value: Any) -> Any:
    """Drop the token ids of a state or action: they have their own columns."""
    if not isinstance(value, dict):
        return value
    return {name: part for name, part in value.items() if name not in ("prompt_token_ids", "token_ids")}


@contextmanager
def _json_lines(path: Path) -> Iterator[Callable[[Json], None]]:
    """Yield a function that writes a row as one line of JSON."""
    if is_private := str(path) != "-":
        make_private(path)
    file: AbstractContextManager[Any] = path.open("w", encoding="utf-8") if is_private else nullcontext(sys.stdout)
    with file as opened_file:
        yield lambda row: opened_file.write(dumps(row) + "\n")
        opened_file.flush()


@contextmanager
def _parquet(path: Path, kind: str) -> Iterator[Callable[[Json], None]]:
    """Yield a function that writes a row. It keeps one group of rows in memory."""
    pa = pyarrow()
    make_private(path)
    # The types that Hugging Face's `datasets` reads the columns as: JSON becomes objects.
    schema, features, rows = [], Json(), list[Json]()
    for alias, names in COLUMNS[kind].items():
        of = alias.removeprefix("list_")
        kept = pa.json_() if alias == "json" else pa.type_for_alias(of)
        feature = {"_type": "Json"} if alias == "json" else {"dtype": of, "_type": "Value"}
        is_list = of != alias
        schema += [(name, pa.list_(kept) if is_list else kept) for name in names]
        features |= dict.fromkeys(names, {"feature": feature, "_type": "List"} if is_list else feature)
    typed = pa.schema(schema).with_metadata({"huggingface": dumps({"info": {"features": features}})})
    with pa.parquet.ParquetWriter(path, typed) as file:

        def flush() -> None:
            file.write_table(pa.Table.from_pylist(rows, schema=typed))
            rows.clear()

        def write(row: Json) -> None:
            texts = {name: dumps(row[name]) for name in COLUMNS[kind]["json"] if row.get(name) is not None}
            rows.append(row | texts)
            if len(rows) >= ROW_GROUP:
                flush()

        yield write
        if rows:
            flush()
