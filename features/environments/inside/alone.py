"""Makes a process fit for others' code: without the user's variables, in a folder of its own, under a guard.

As a script it stands for the kind's Python, for packages may look at the variables that their process began with.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from functools import partial

KEPT = {
    *("PATH", "LANG", "TZ", "SHELL", "TERM", "NO_PROXY", "no_proxy", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("SSL_CERT_FILE", "DOCKER_HOST"),
}
# The rollout's own. Where there is none, as in a list of environments, they would be the user's.
ROLLOUT = "LIGHTNING_ROLLOUT_ID"
OF_ROLLOUT = {
    *(ROLLOUT, "LIGHTNING_TASK", "LIGHTNING_TASK_FILE", "LIGHTNING_URL"),
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
}
# Nothing is fetched that the command line did not name; and a generator that goes through a set does so as before.
SET = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}
GRACE_S = 1.0  # to end, before all is killed; `run` waits longer


def alone() -> None:
    """Remove all variables but those above, the user's keys among them."""
    kept = KEPT | OF_ROLLOUT if ROLLOUT in os.environ else KEPT
    for name in os.environ.keys() - kept:
        if not name.startswith("LC_"):
            del os.environ[name]
    os.environ.update(SET)


def watched(seconds: float, late: str) -> None:
    """Return in a child, in an empty folder. This process ends it after this time, at a signal, or with its own parent.

    It also ends all that was started there, and removes the folder. `late` says what took longer than `seconds`.
    """
    from ....core.guard import PR_SET_PDEATHSIG, PRCTL, guard

    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
    folder = tempfile.mkdtemp(prefix="lightning-environment-")
    guard(partial(_ended, folder, f"{late} took longer than {seconds:g} s"), None, GRACE_S, seconds)
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = None
    os.chdir(folder)


def _ended(folder: str, late: str, code: int | None) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    if code is None:
        print(late, file=sys.stderr, flush=True)
        return 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    alone()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
