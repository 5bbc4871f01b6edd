"""Makes a process fit for others' code: without the user's variables, and with children that end when it does.

In a kind's environment, importing this does it. So `--preload` imports it before the kind's package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

KEPT = {
    *("PATH", "LANG", "TZ", "SHELL", "TERM", "NO_PROXY", "no_proxy", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("LIGHTNING_TASK", "LIGHTNING_ROLLOUT_ID", "LIGHTNING_URL"),
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
}
# Nothing is fetched that the command line did not name.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}


PR_SET_PDEATHSIG = 1  # of Linux


def alone() -> None:
    """Remove all variables but those above, the user's keys among them."""
    for name in os.environ.keys() - KEPT:
        if not name.startswith("LC_"):
            del os.environ[name]
    os.environ.update(OFFLINE)


def end_children_too() -> None:
    """Have the kernel end each child with this process. `run` ends its group; others start sessions of their own."""
    popen: Any = subprocess.Popen
    prctl, begin = ctypes.CDLL(None).prctl, popen.__init__

    def init(self: Any, *args: Any, preexec_fn: Callable[[], Any] | None = None, **options: Any) -> None:
        def first() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if preexec_fn is not None:
                preexec_fn()

        begin(self, *args, preexec_fn=first, **options)

    popen.__init__ = init


if ".venv-environments" in sys.prefix:
    alone()
    if sys.platform == "linux":
        end_children_too()
