"""`export`: writes transitions, conversations or trajectories of the store to a file. The proxy need not run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

from rich.console import Console

from ...core.config.root import Config
from ...core.config.section import feature_sections
from ...core.config.server import StoreConfig
from ...core.errors import ConfigError, LightningError, NotFound
from ...core.json_text import dumps, fields_of
from ...core.records import Event, Mode, ModelCall, Reward, Rollout, RolloutStatus
from ...proxy.api.views import call_fields, transitions
from ...store.database import Row
from ...store.opening import opened
from ...store.sqlite.file import IdleFile, is_in_use, make_private
from ...store.store import Store
from ..formats import progress_bar
from ..show.find import since_of
from ..signals import run_until_signal
from .conversations import conversations, trajectories

Kind = Literal["transitions", "sft", "atif"]
PAGE = 100
ODD = "a rollout that cannot be written"
ALL = "all"
# Of the rollouts to imitate, unless others are asked for: none that is held out, still running, or discarded.
IMITATED_MODE = "train"
IMITATED = ("completed", "failed")

ROW_GROUP = 256
FORMATS = ("jsonl", "parquet")
TEXTS = ("rollout_id", "task_id", "mode", "status", "kind", "agent", "call_id", "untrainable_reason")
NUMBERS = (
    "rollout_reward", "reward", "call_reward", "temperature", "return", "advantage", "started_at", "latency_ms",
)  # fmt: skip
WHOLE_NUMBERS = ("t", "policy_version", "step")
# What features say of each call.
CALL_FIELDS = tuple(name for feature in feature_sections().values() for name in feature.names_of_call_fields)
# Their shape differs from row to row, so Parquet holds them as JSON text.
JSON_COLUMNS = {
    "transitions": ("state", "action", "next_state", "rewards", "usage", "metadata", *CALL_FIELDS),
    "sft": ("messages", "tools"),
}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rollouts are exported. `since` is Unix time; a rollout without a reward fails any `min_reward`.

    `statuses`: any of these; empty for all.
    """

    mode: str | None = None
    statuses: tuple[str, ...] = ()
    task_id: str | None = None
    min_reward: float | None = None
    since: float | None = None

    @property
    def filters(self) -> dict[str, str]:
        status = self.statuses[0] if len(self.statuses) == 1 else None
        wanted = {"mode": self.mode, "status": status, "task_id": self.task_id}
        return {name: value for name, value in wanted.items() if value is not None}

    def counts(self, mode: str, status: str) -> bool:
        """Return whether rollouts of this mode and status are wanted."""
        return self.mode in (None, mode) and (not self.statuses or status in self.statuses)

    def takes(self, rollout: Rollout) -> bool:
        rewarded = self.min_reward is None or (rollout.reward is not None and rollout.reward >= self.min_reward)
        recent = self.since is None or rollout.created_at >= self.since
        return rewarded and recent and self.counts(rollout.mode, rollout.status)


@dataclass(slots=True)
class Written:
    """How many rows were written, and how many conversations were left out, by reason."""

    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def export_command(config: Config, target: Path, format: str | None, kind: str, filters: dict[str, Any]) -> None:
    """Run `export`. Raises ConfigError for a wrong option, LightningError if it fails."""
    if kind not in get_args(Kind):
        raise ConfigError(f"--kind is {', '.join(get_args(Kind))}; got {kind!r}")
    for name, values in (("mode", get_args(Mode)), ("status", get_args(RolloutStatus))):
        if filters[name] not in (None, ALL, *values):
            raise ConfigError(f"--{name} is {', '.join(values)} or {ALL}, got {filters[name]!r}")
    if (found := file_format(target, format)) != "jsonl" and kind == "atif":
        raise ConfigError("--kind atif is written as JSON Lines only")
    work = export(config.store, target, found, cast(Kind, kind), _selection(kind, filters))
    written = run_until_signal(work)
    lines = [f"{written.rows} {kind} rows to {target}"]
    lines += [f"conversations left out: {n}, {reason}" for reason, n in written.left_out.most_common()]
    Console(stderr=True).print("\n".join(lines), markup=False, soft_wrap=True)


def _selection(kind: str, filters: dict[str, Any]) -> Selection:
    mode, status = filters["mode"], filters["status"]
    if kind == "sft":
        mode, status = mode or IMITATED_MODE, status or IMITATED
    statuses = (status,) if isinstance(status, str) else status or ()
    return Selection(
        mode=None if mode == ALL else mode,
        statuses=() if status == ALL else statuses,
        task_id=filters["task_id"],
        min_reward=filters["min_reward"],
        since=since_of(filters["since"]),
    )


async def export(store: StoreConfig, target: Path, format: str, kind: Kind, selection: Selection) -> Written:
    """Write the rows to `target` (`-`: standard output). A file is written atomically."""
    if not store.may_be_there:
        raise LightningError(f"there is no store at {store.where} (store.url)")
    in_place = str(target) == "-" or (target.exists() and not target.is_file())  # a pipe, a device
    writing = target if in_place else target.with_name(f".{target.name}.{os.getpid()}.part")
    writer: RowWriter | None = None
    try:
        writer = open_writer(writing, format, kind)
        path = None if store.is_postgres else store.path.expanduser()
        idle = None if path is None or is_in_use(path) else IdleFile(path)
        written = await _write_all(store, writer, kind, selection)
        if idle is not None and idle.is_written():
            raise LightningError(f"{path} is in use again, so what was read may be out of date: export again")
        writer.close()
        if not in_place:
            writing.replace(target)
    except BrokenPipeError:  # the reader has closed the pipe
        raise
    except OSError as error:
        raise LightningError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            if writer is not None:
                writer.close()
        if not in_place:
            with suppress(OSError):
                writing.unlink()
    return written


async def _write_all(config: StoreConfig, writer: RowWriter, kind: Kind, selection: Selection) -> Written:
    written = Written()
    async with opened(config, to_write=False) as database:
        store = Store(database)
        counts = await store.rollouts.counts()
        total = sum(n for kinds, n in counts.items() if selection.counts(*kinds))
        with progress_bar() as progress:
            bar = progress.add_task("rollouts", total=None if selection.task_id else total)
            async with aclosing(_rollouts(store, selection)) as rollouts:
                async for rollout in rollouts:
                    progress.advance(bar)
                    if not selection.takes(rollout):
                        continue
                    try:
                        rows = list(await _rows(store, rollout, kind, written.left_out))
                    except NotFound:  # deleted meanwhile, for its age perhaps
                        continue
                    except LightningError:
                        raise
                    except Exception as error:  # the record may hold whatever agents and upstreams have written
                        written.left_out[f"{ODD} ({type(error).__name__}: {error})"] += 1
                        continue
                    for row in rows:
                        writer.write(row)
                        written.rows += 1
    return written


async def _rollouts(store: Store, selection: Selection) -> AsyncGenerator[Rollout, None]:
    """Yield rollouts, newest first, with one page in memory at a time."""
    cursor: int | None = None
    while True:
        page, cursor = await store.rollouts.page(selection.filters, PAGE, cursor)
        for rollout in page:
            yield rollout
        if cursor is None:
            return


async def _rows(store: Store, rollout: Rollout, kind: Kind, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rollout's rows of this kind. Those that cannot be one are counted in `left_out`, by reason."""
    calls = await store.calls.of(rollout.rollout_id, short=kind == "sft")
    if kind == "sft":
        return conversations(rollout, calls, left_out)
    if kind == "atif":
        return trajectories(rollout, calls, left_out)
    events = await store.events.of(rollout.rollout_id)
    rewards = await store.rewards.of(rollout.rollout_id)
    return _transitions(rollout, calls, events, rewards, await store.credit.of(rollout.rollout_id))


def _transitions(
    rollout: Rollout, calls: list[ModelCall], events: Sequence[Event], rewards: Sequence[Reward], credit: Sequence[Row]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each transition. The first one holds the rollout's rewards, the newest of each name and call."""
    newest = {(r.call_id, r.name): r for r in rewards}.values()
    by_id = {call.call_id: call for call in calls}
    by_call = {row["call_id"]: row for row in credit}
    by_features = dict(zip(by_id, call_fields(calls), strict=True))
    for transition in transitions(rollout, calls, events):
        call = by_id[transition.call_id] if transition.call_id is not None else None
        sampled = call if transition.kind == "llm" else None
        trained = by_call.get(sampled.call_id) if sampled else None
        yield {
            "rollout_id": rollout.rollout_id,
            "task_id": rollout.task_id,
            "mode": rollout.mode,
            "status": rollout.status,
            "rollout_reward": rollout.reward,
            "policy_version": call.policy_version if call else None,
            **{name: _without_ids(value) for name, value in fields_of(transition).items()},
            "prompt_token_ids": sampled.prompt_token_ids if sampled else (),
            "response_token_ids": sampled.response_token_ids if sampled else (),
            "logprobs": sampled.logprobs if sampled else (),
            "temperature": sampled.temperature if sampled else None,
            "call_reward": sampled.reward if sampled else None,
            "untrainable_reason": _untrainable(sampled) if sampled else None,
            **{name: trained[name] if trained else None for name in ("return", "advantage", "step")},
            **(by_features[sampled.call_id] if sampled else dict.fromkeys(CALL_FIELDS)),
            "started_at": sampled.started_at if sampled else None,
            "latency_ms": sampled.latency_ms if sampled else None,
            "usage": sampled.usage if sampled else None,
            "metadata": rollout.metadata,
            "rewards": [_reward(r) for r in newest] if transition.t == 0 else None,
        }


def _reward(reward: Reward) -> dict[str, Any]:
    return {"call_id": reward.call_id, "name": reward.name, "reward": reward.reward, "source": reward.source}


def _untrainable(call: ModelCall) -> str | None:
    return (
        "several answers: it is not known which one earned the reward"
        if len(call.choices) > 1
        else call.untrainable_reason
    )


def _without_ids(value: Any) -> Any:
    """Drop the token ids of a state or action: they have columns of their own."""
    if not isinstance(value, dict):
        return value
    return {name: part for name, part in value.items() if name not in ("prompt_token_ids", "token_ids")}


class RowWriter(Protocol):
    """Writes rows; `close` may be called twice."""

    def write(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def file_format(path: Path, wanted: str | None) -> str:
    """Return `wanted`, or what the suffix says; ConfigError for anything but jsonl and parquet.

    A file must end in what it holds. Standard output, pipes and devices have no suffix.
    """
    if wanted not in (None, *FORMATS):
        raise ConfigError(f"--format is jsonl or parquet, got {wanted!r}")
    in_place = str(path) == "-" or (path.exists() and not path.is_file())
    found = wanted or ("jsonl" if in_place else path.suffix.removeprefix("."))
    if not in_place and (found not in FORMATS or path.suffix != f".{found}"):
        raise ConfigError(f"the file must end in {f'.{wanted}' if wanted else '.jsonl or .parquet'}, got {path.name!r}")
    if found == "parquet" and str(path) == "-":
        raise ConfigError("standard output takes --format jsonl only")
    return found


def open_writer(path: Path, format: str, kind: str) -> RowWriter:
    """Open a writer to a new file, or to standard output for `-`; OSError if it cannot be written."""
    if format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise LightningError("Parquet needs pyarrow: pip install 'lightning-proxy[parquet]'")
    if str(path) != "-":
        make_private(path)
    return ParquetRows(path, kind) if format == "parquet" else JsonLines(path)


class JsonLines:
    """Writes one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._own = str(path) != "-"
        self._file = path.open("w", encoding="utf-8") if self._own else sys.stdout

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(dumps(row) + "\n")

    def close(self) -> None:
        if self._own:
            self._file.close()
        else:
            self._file.flush()


class ParquetRows:
    """Writes row groups of a few hundred rows, and holds no more in memory."""

    def __init__(self, path: Path, kind: str) -> None:
        import pyarrow.parquet

        self._schema = _schema(kind)
        self._json = JSON_COLUMNS[kind]
        self._rows: list[dict[str, Any]] = []
        self._file = pyarrow.parquet.ParquetWriter(path, self._schema)

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row | {name: dumps(row[name]) for name in self._json if row.get(name) is not None})
        if len(self._rows) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        if self._file.is_open:
            self._flush()
            self._file.close()

    def _flush(self) -> None:
        import pyarrow

        if self._rows:
            self._file.write_table(pyarrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []


def _schema(kind: str) -> Any:
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    if kind == "sft":
        names = ("messages", "tools", "rollout_id", "task_id", "mode", "status", "agent", "model")
        types = {name: pa.json_() if name in JSON_COLUMNS[kind] else text for name in names}
        schema = pa.schema([*types.items(), ("reward", number)])
        return schema.with_metadata({"huggingface": dumps({"info": {"features": _features(schema)}})})
    fields = [(name, text) for name in (*TEXTS, *JSON_COLUMNS[kind])]
    fields += [*((name, number) for name in NUMBERS), *((name, pa.int32()) for name in WHOLE_NUMBERS)]
    ids = [(name, pa.list_(pa.int32())) for name in ("prompt_token_ids", "response_token_ids")]
    return pa.schema([*fields, ("done", pa.bool_()), *ids, ("logprobs", pa.list_(pa.float32()))])


def _features(schema: Any) -> dict[str, Any]:
    """The columns as Hugging Face's `datasets` types them: JSON becomes objects there."""
    types = {"string": "string", "double": "float64"}
    json = {"_type": "Json"}
    return {f.name: {"dtype": types[str(f.type)], "_type": "Value"} if str(f.type) in types else json for f in schema}
