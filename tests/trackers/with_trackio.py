# /// script
# dependencies = ["trackio==0.43.0"]
# ///
"""trackio, which keeps its runs in files (`TRACKIO_DIR`)."""

from trackio.sqlite_storage import SQLiteStorage

from lightning_proxy.trainer.report.trackers import PROJECT
from support.tracked import LOSS, Kept, main


def read() -> Kept:
    return {
        run: [(row["step"], row[LOSS]) for row in SQLiteStorage.get_logs(PROJECT, run) if LOSS in row]
        for run in SQLiteStorage.get_runs(PROJECT)
    }


if __name__ == "__main__":
    main("trackio", read)
