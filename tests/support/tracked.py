"""A tiny policy trained in a tracker's own environment: what the programs in `tests/trackers` have in common.

`with_NAME.py DIRECTORY 1 2` trains steps 1 and 2, as one start of a trainer does, and writes [[step, loss], …] to
`DIRECTORY/found.json`; `with_NAME.py DIRECTORY` what the tracker has kept, by its runs: {"run": [[step, loss], …]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

Kept = dict[str, list[tuple[int, float]]]
FOUND = "found.json"
LOSS = "train/optimizer/loss"


def main(tracker: str, read: Callable[[], Kept]) -> None:
    directory, steps = Path(sys.argv[1]), [int(step) for step in sys.argv[2:]]
    (directory / FOUND).write_text(json.dumps(_train(tracker, directory, steps) if steps else read()))


def _train(tracker: str, directory: Path, steps: list[int]) -> list[tuple[int, float]]:
    from support.ranks import batch, make_model, trainer  # reading does not need torch

    if not (directory / "model").exists():
        make_model(directory / "model")
    learner, losses = trainer(directory, report_to=[tracker]), []
    for step in steps:
        metrics = learner.step(batch(step))
        learner.trackers.report(metrics)
        losses.append((step, metrics["loss"]))
    learner.trackers.close()
    return losses
