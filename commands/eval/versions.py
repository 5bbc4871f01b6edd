"""`policy compare`: two versions by the rollouts that were recorded, with the statistics of `eval`."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from ...core.config.root import Config
from ...core.errors import LightningError
from ..api_client import ask
from ..formats import count, number, print_json, print_view, table
from .stats import compare

METRICS = {"mean": "reward", "tokens": "tokens", "latency_ms": "latency, ms"}

Json = dict[str, Any]


def show_comparison(config: Config, a: int, b: int, mode: str | None, *, as_json: bool) -> None:
    """Print how far version `b` is above `a`. LightningError where they have nothing in common."""
    params = {"a": str(a), "b": str(b), "costs": "true"} | ({} if mode is None else {"mode": mode})

    found = ask(config, lambda api: api.request("GET", "/policy/compare", params=params))
    mode, tasks = found["mode"], found["data"]
    mend = f"`lightning-proxy eval --tasks FILE --models {a},{b} -- COMMAND` gives both the same tasks"
    for side, version in (("a", a), ("b", b)):
        if not found[f"rollouts_{side}"]:
            raise LightningError(f"policy version {version} has no rewarded {mode} rollouts of a task; {mend}")
    if not found["tasks"]:
        raise LightningError(f"policy versions {a},{b} have no task in common in mode {mode}; {mend}")
    found["metrics"] = {name: metric for name in METRICS if (metric := _compared(tasks, name)) is not None}
    if as_json:
        print_json(found)
        return
    shown = table("", right=(f"version {a}", f"version {b}", f"above {a}", "95 %", "p", "tasks"))
    for name, metric in found["metrics"].items():
        low, high = (_shown(metric["interval"][end]) for end in ("low", "high"))
        numbers = [_shown(metric[side]) for side in ("a", "b", "difference")]
        shown.add_row(METRICS[name], *numbers, f"{low} to {high}", f"{metric['p']:.4f}", str(metric["tasks"]))
    rollouts = [f"{count(sum(task[side]['rollouts'] for task in tasks))} of version {found[side]}" for side in "ab"]
    print_view(f"{mode} rollouts of {found['tasks']} common tasks: {' and '.join(rollouts)}", shown)


def _compared(tasks: list[Json], name: str) -> Json | None:
    """Compare one number of both versions over the tasks where both have it; None without any."""
    pairs = [(task["a"][name], task["b"][name]) for task in tasks]
    ours, theirs = ([pair[i] for pair in pairs if None not in pair] for i in (1, 0))
    return {"a": fmean(theirs), "b": fmean(ours), **asdict(compare(ours, theirs))} if ours else None


def _shown(value: float) -> str:
    return number(value) if abs(value) < 1000 else count(value)
