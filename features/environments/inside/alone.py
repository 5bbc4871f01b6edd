"""Prepares a process for third-party code. Run as a script, it clears variables and starts the kind's Python."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEPT = {
    *("PATH", "LANG", "TZ", "SHELL", "TERM", "NO_PROXY", "no_proxy", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("SSL_CERT_FILE", "DOCKER_HOST"),
}
# The rollout's own. Without a rollout, as when environments are listed, they would be the user's.
ROLLOUT, TASK_FILE = "LIGHTNING_ROLLOUT_ID", "LIGHTNING_TASK_FILE"
OF_ROLLOUT = {
    *(ROLLOUT, TASK_FILE, "LIGHTNING_TASK", "LIGHTNING_URL"),
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
}
# Nothing is fetched that the command line did not name; and sets have the same order in every process.
SET = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}


def alone() -> None:
    """Keep only allowed environment variables, so that third-party code sees none of the user's keys. Add SET."""
    kept = KEPT | OF_ROLLOUT if ROLLOUT in os.environ else KEPT
    for name in os.environ.keys() - kept:
        if not name.startswith("LC_"):
            del os.environ[name]
    os.environ.update(SET)


@contextmanager
def own_folder() -> Iterator[None]:
    """Run the block in a new folder, which is also its HOME. In a rollout, the folder lies beside the task file."""
    task = os.environ.get(TASK_FILE)
    place = task and Path(task).parent
    with tempfile.TemporaryDirectory("-environment", dir=place, ignore_cleanup_errors=True) as folder:
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        os.chdir(folder)
        yield


if __name__ == "__main__":
    alone()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
