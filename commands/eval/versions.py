"""`policy compare`: two versions by the rollouts that were recorded, with the statistics of `eval`."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from ...core.config.root import Config
from ...core.errors import LightningError
from ..api_client import ApiClient, ask
from ..formats import count, number, print_json
from ..show.find import checked
from .stats import compare

SEED = 0  # of bootstrap and permutations, so that the same rollouts always give the same numbers
METRICS = {"mean": "reward", "tokens": "tokens", "latency_ms": "latency, ms"}


def show_comparison(config: Config, a: int, b: int, mode: str | None, *, as_json: bool) -> None:
    """Print how far version `b` is above `a`. LightningError where they have nothing in common."""
    checked(mode, None)
    params = {"a": str(a), "b": str(b), "costs": "true"} | ({} if mode is None else {"mode": mode})

    async def read(api: ApiClient) -> tuple[dict[str, Any], dict[str, Any]]:
        return await api.request("GET", "/policy/compare", params=params), await api.request("GET", "/policy/versions")

    found, versions = ask(config, read)
    require_rollouts(found)
    found["metrics"] = {name: metric for name in METRICS if (metric := compared(found["data"], name)) is not None}
    if as_json:
        print_json(found)
        return
    sides = [
        f"{count(sum(task[side]['rollouts'] for task in found['data']))} of version {found[side]}" for side in "ab"
    ]
    console = Console(highlight=False)
    console.print(f"{found['mode']} rollouts of {found['tasks']} common tasks: {' and '.join(sides)}")
    console.print(comparison_table(found))
    rewards = {one["version"]: one["rewards"].get(found["mode"]) for one in versions["data"]}
    if any(rewards[found[side]]["mean"] != found[f"mean_{side}"] for side in "ab"):
        both = " and ".join(f"{_shown(rewards[found[side]]['mean'])} of version {found[side]}" for side in "ab")
        console.print(f"the reward over all tasks, not only common ones: {both}")


def require_rollouts(found: dict[str, Any]) -> None:
    """Raise LightningError if a version has no rollouts to compare, or none of a common task."""
    models = f"{found['a']},{found['b']}"
    mend = f"`lightning-proxy eval --tasks FILE --models {models} -- COMMAND` gives both the same tasks"
    for side in "ab":
        if not found[f"rollouts_{side}"]:
            raise LightningError(
                f"policy version {found[side]} has no rewarded {found['mode']} rollouts of a task; {mend}"
            )
    if not found["tasks"]:
        raise LightningError(f"policy versions {models} have no task in common in mode {found['mode']}; {mend}")


def compared(tasks: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Compare one number of both versions over the tasks where both have it; None without any."""
    pairs = [(task["a"][name], task["b"][name]) for task in tasks]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return None
    of_a, of_b = zip(*known, strict=True)
    return {"a": fmean(of_a), "b": fmean(of_b), **asdict(compare(of_b, of_a, SEED))}


def comparison_table(found: dict[str, Any]) -> Table:
    """Return a table of one line per metric."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    heads = (f"version {found['a']}", f"version {found['b']}", f"above {found['a']}", "95 %", "p", "tasks")
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, metric in found["metrics"].items():
        low, high = (_shown(metric["interval"][end]) for end in ("low", "high"))
        numbers = [_shown(metric[side]) for side in ("a", "b", "difference")]
        table.add_row(METRICS[name], *numbers, f"{low} to {high}", f"{metric['p']:.4f}", str(metric["tasks"]))
    return table


def _shown(value: float) -> str:
    return number(value) if abs(value) < 1000 else count(value)
