"""Takes the variables out of a process that others' code has no business with. In a kind's environment, importing does.

So `--preload` imports it before the kind's package.
"""

from __future__ import annotations

import os
import sys

KEPT = {
    *("PATH", "LANG", "TZ", "SHELL", "TERM", "NO_PROXY", "no_proxy", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("LIGHTNING_TASK", "LIGHTNING_ROLLOUT_ID", "LIGHTNING_URL"),
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
}
# Nothing is fetched that the command line did not name.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}


def alone() -> None:
    """Remove all other variables, the user's keys among them."""
    for name in os.environ.keys() - KEPT:
        if not name.startswith("LC_"):
            del os.environ[name]
    os.environ.update(OFFLINE)


if ".venv-environments" in sys.prefix:
    alone()
