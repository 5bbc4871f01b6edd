"""What a program that works on a rollout finds in its environment. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import NoRollout

NAMES = ("NO_PROXY", "no_proxy")  # some programs read the one, some the other
ADDRESSES = ("LIGHTNING_URL", "OPENAI_BASE_URL")
TASK, TASK_FILE = "LIGHTNING_TASK", "LIGHTNING_TASK_FILE"
# Of another rollout, if they are inherited. A token would go beside the rollout's ANTHROPIC_API_KEY.
STALE = {"LIGHTNING_ROLLOUT_ID", TASK, TASK_FILE, "ANTHROPIC_AUTH_TOKEN"}
# Linux starts no program with a longer variable, or with more of all, which `ulimit -s` may lower.
LONGEST, MOST = 128 * 1024, 6 * 1024**2


def task() -> Any:
    """Return the task that `lightning-proxy run` started this program for, as JSON. Raise NoRollout."""
    if TASK in os.environ:
        return json.loads(os.environ[TASK])
    if TASK_FILE in os.environ:
        return json.loads(Path(os.environ[TASK_FILE]).read_text(encoding="utf-8"))
    raise NoRollout(f"there is no {TASK}: start this program by `lightning-proxy run --tasks FILE -- PROGRAM`")


def variables(env: Mapping[str, str], there: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return all variables of a program: those that are `there`, and ours. The task goes to `file`.

    Its variable is left out if the kernel would start no program with it.
    """
    found = {name: value for name, value in there.items() if name not in STALE} | reached_directly(env, there)
    if TASK not in found:
        return found
    file.write_text(found[TASK], encoding="utf-8")
    found[TASK_FILE] = str(file)
    sizes = {name: len(os.fsencode(name)) + len(os.fsencode(value)) + 2 for name, value in found.items()}
    all_of_it = sum(sizes.values()) + 8 * len(sizes)  # with pointers; as much is left for arguments
    if sizes[TASK] > LONGEST or 2 * all_of_it > min(os.sysconf("SC_ARG_MAX"), MOST):
        del found[TASK]
    return found


def reached_directly(env: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Return a program's variables with the hosts of the proxy's addresses in NO_PROXY, beside those that are there."""
    hosts = {one: None for name in ADDRESSES if name in env for one in _spellings(urlsplit(env[name]).hostname or "")}
    return {**env, **{name: _with(there.get(name) or there.get(other, ""), hosts) for name, other in _PAIRS}}


_PAIRS = (NAMES, NAMES[::-1])


def _with(listed: str, hosts: Mapping[str, None]) -> str:
    kept = [one.strip() for one in listed.split(",") if one.strip()]
    return listed if "*" in kept else ",".join([*kept, *(host for host in hosts if host not in kept)])


def _spellings(host: str) -> list[str]:
    """An address of IPv6 stands with and without brackets: programs differ in what they look for."""
    return [host, f"[{host}]"] if ":" in host else [host] if host else []
