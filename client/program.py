"""The environment variables of a program that works on a rollout, and the client's errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ADDRESSES = ("LIGHTNING_URL", "OPENAI_BASE_URL")
TASK, TASK_FILE = "LIGHTNING_TASK", "LIGHTNING_TASK_FILE"
# Of another rollout, if they are inherited. A token would be sent together with the rollout's ANTHROPIC_API_KEY.
STALE = {"LIGHTNING_ROLLOUT_ID", TASK, TASK_FILE, "ANTHROPIC_AUTH_TOKEN"}
# Linux refuses a longer variable, and more bytes in total, which `ulimit -s` may lower.
LONGEST, MOST = 128 * 1024, 6 * 1024**2


class ClientError(Exception):
    """The base class of the client's own errors."""


class NoRollout(ClientError, RuntimeError):
    """There is no rollout to emit to, or no task to return."""


class ProxyUnreachable(ClientError):
    """No proxy listens at the address, or the proxy failed for all of `patience_s` seconds."""


class Refused(ClientError):
    """The proxy answered with an error and recorded nothing. Sending the same request again would not help."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(f"the proxy answered {status}: {message}")
        self.status = status
        self.param = param


def task() -> Any:
    """Return the decoded task that `lightning-proxy run` started this program for. Raises NoRollout without one."""
    if TASK in os.environ:
        return json.loads(os.environ[TASK])
    if TASK_FILE in os.environ:
        return json.loads(Path(os.environ[TASK_FILE]).read_text(encoding="utf-8"))
    raise NoRollout(f"{TASK} is not set: start this program with `lightning-proxy run --tasks FILE -- PROGRAM`")


def names_of(url: str, base_url: str, api_key: str, rollout_id: str) -> dict[str, str]:
    """Return the variables by which a program's clients reach the model and name the rollout."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # what llama-index reads
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # Anthropic's client adds it
        "ANTHROPIC_API_KEY": api_key,
        "LIGHTNING_URL": url,
        "LIGHTNING_ROLLOUT_ID": rollout_id,
    }


def variables(env: Mapping[str, str], there: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return a program's variables: `env`, and those of `there` that do not belong to another rollout.

    A task is also written to `file`. LIGHTNING_TASK is left out if the kernel would refuse so much text.
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
    """Return `env`, with NO_PROXY and no_proxy set so that the program reaches our proxy directly."""
    hosts = [urlsplit(env[name]).hostname or "" for name in ADDRESSES if name in env]
    # An IPv6 address is added with and without brackets: programs differ in what they look for.
    added = [name for host in hosts if host for name in ([host, f"[{host}]"] if ":" in host else [host])]
    found = dict(env)
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):  # programs read either
        listed = there.get(name) or there.get(other, "")
        kept = [one.strip() for one in listed.split(",") if one.strip()]
        found[name] = listed if "*" in kept else ",".join(dict.fromkeys([*kept, *added]))
    return found
