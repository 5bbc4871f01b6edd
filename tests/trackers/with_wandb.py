# /// script
# dependencies = ["wandb==0.31.0"]
# ///
"""W&B offline (`WANDB_MODE`, `WANDB_DIR`): each start writes a file of its own, all with the run's id."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

from support.tracked import LOSS, Kept, main

# The log format of LevelDB, behind 7 bytes of W&B's own: blocks of records, each behind a checksum, its length and
# whether it is whole (1), or the first (2), a middle (3) or the last (4) part of one.
BLOCK, OWN_HEADER, HEADER = 32 * 1024, 7, 7


def read() -> Kept:
    kept: Kept = defaultdict(list)
    for path in sorted(Path(os.environ["WANDB_DIR"]).glob("wandb/offline-run-*/*.wandb")):
        for record in _records(path.read_bytes()):
            if record.HasField("history"):
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                if LOSS in row:
                    kept[path.stem.removeprefix("run-")].append((row["_step"], row[LOSS]))
    return kept


def _records(data: bytes) -> Iterator[Record]:
    at, parts = OWN_HEADER, b""
    while at + HEADER < len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


if __name__ == "__main__":
    main("wandb", read)
