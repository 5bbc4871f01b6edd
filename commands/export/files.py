"""Writes the files of `export`, row by row: JSON Lines and Parquet."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, Protocol

from ...core.errors import ConfigError, LightningError
from ...core.json_text import dumps
from ...core.on_board import modules
from ...store.sqlite.file import make_private

ROW_GROUP = 256
FORMATS = ("jsonl", "parquet")
TEXTS = ("rollout_id", "task_id", "mode", "status", "kind", "agent", "call_id", "untrainable_reason")
NUMBERS = (
    "rollout_reward", "reward", "call_reward", "temperature", "return", "advantage", "started_at", "latency_ms",
)  # fmt: skip
WHOLE_NUMBERS = ("t", "policy_version", "step")
# What side rooms say of each call.
BESIDE_CALLS = tuple(name for module in modules("calls") for name in module.NAMES)
# Their shape differs from row to row, so Parquet holds them as JSON text.
JSON_COLUMNS = {
    "transitions": ("state", "action", "next_state", "rewards", "usage", "metadata", *BESIDE_CALLS),
    "sft": ("messages", "tools"),
}


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
