"""`policy …`: shows, compares, promotes and exports policy versions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import ConfigError, LightningError
from ..command_line import Commands, Json, brought, configuration
from ..formats import count, number, print_json, print_view, table

if TYPE_CHECKING:
    from rich.table import Table

    from ..api_client import ApiClient

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Show, compare, promote and export policy versions.")

METRICS = {"mean": "reward", "tokens": "tokens", "latency_ms": "latency, ms"}


@app.command("list")
def list_versions(context: typer.Context, as_json: Json = False) -> None:
    """List the policy versions, oldest first. A version that is `ready` can be promoted.

    `reward` is the mean over tasks of the training rollouts that began with the version, and `held out` that of its
    rollouts in mode `eval`.

    Below the table, the best version is named, and the newest test of a version is described (promotion.mode: gated).
    """
    from ..api_client import look

    async def read(api: ApiClient) -> tuple[dict[str, Any], dict[str, Any]]:
        return await api.request("GET", "/policy/versions"), await api.policy()

    versions, policy = look(configuration(context), read)
    if as_json:
        return print_json(versions)
    below = (line for lines in brought("below_versions") for line in lines(policy, versions["data"]))
    return print_view(versions_table(versions["data"]), *below)


@app.command()
def promote(
    context: typer.Context,
    version: Annotated[str, typer.Argument(metavar="N", help="a version's number, or `best`")],
    as_json: Json = False,
) -> None:
    """Make a version live. The trainer continues from it."""

    async def change(api: ApiClient) -> dict[str, Any]:
        number = version
        if number == "best":
            if (best := (await api.policy()).get("best")) is None:
                raise LightningError("there is no best version yet: none can be served, or none has a reward")
            number = best["version"]
        return await api.request("POST", "/policy/promote", {"version": int(number)})

    if version != "best" and not version.isdecimal():
        raise ConfigError(f"expected a version number or `best`, got {version!r}")
    _change(context, change, as_json)


@app.command()
def rollback(context: typer.Context, as_json: Json = False) -> None:
    """Go back to the newest usable version that is older than the live one."""
    _change(context, lambda api: api.request("POST", "/policy/rollback"), as_json)


def _change(context: typer.Context, work: Callable[[ApiClient], Awaitable[dict[str, Any]]], as_json: bool) -> None:
    from ..api_client import ask

    version = ask(configuration(context), work)
    print_json(version) if as_json else typer.echo(f"policy version {version['version']} is live")


@app.command()
def compare(
    context: typer.Context,
    a: Annotated[int, typer.Argument(metavar="A", help="a version")],
    b: Annotated[int, typer.Argument(metavar="B", help="another version")],
    as_json: Json = False,
) -> None:
    """Compare version B with A by the rollouts that were recorded: rewards, tokens and latency, paired by task.

    Held-out rollouts are compared if both versions have some for a common task, else training rollouts.
    """
    from ...core.statistics import compare
    from ..api_client import ask

    path = f"/policy/compare?a={a}&b={b}&costs=true"
    found = ask(configuration(context), lambda api: api.request("GET", path))
    tasks, mode = found["data"], found["mode"]
    if not tasks:
        mend = f"`lightning-proxy eval --tasks FILE --models {a},{b} -- COMMAND` gives both the same tasks"
        raise LightningError(f"policy versions {a} and {b} have no common task with rewarded rollouts; {mend}")
    found["metrics"] = {}
    for name in METRICS:
        pairs = [(task["a"][name], task["b"][name]) for task in tasks]
        if pairs := [pair for pair in pairs if None not in pair]:
            theirs, ours = zip(*pairs, strict=True)
            found["metrics"][name] = {"a": fmean(theirs), "b": fmean(ours), **asdict(compare(ours, theirs))}
    if as_json:
        return print_json(found)
    shown = table("", right=(f"version {a}", f"version {b}", f"above {a}", "95 %", "p", "tasks"))
    for name, metric in found["metrics"].items():
        low, high = (_shown(metric["interval"][end]) for end in ("low", "high"))
        numbers = [_shown(metric[side]) for side in ("a", "b", "difference")]
        shown.add_row(METRICS[name], *numbers, f"{low} to {high}", f"{metric['p']:.4f}", str(metric["tasks"]))
    rollouts = [f"{count(sum(task[side]['rollouts'] for task in tasks))} of version {found[side]}" for side in "ab"]
    return print_view(f"{mode} rollouts of {found['tasks']} common tasks: {' and '.join(rollouts)}", shown)


def _shown(value: float) -> str:
    return number(value) if abs(value) < 1000 else count(value)


OBSTACLES = {"it has no files": "files gone", "it was published as": "other mode"}  # how serving/swap.py begins them


def versions_table(versions: list[dict[str, Any]]) -> Table:
    """Return a table with one line per version; a star marks the live one."""
    rows = []
    for v in versions:
        status = v["status"]
        if status == "ready" and not v["live"] and v["obstacle"] is not None:
            status = next((state for why, state in OBSTACLES.items() if v["obstacle"].startswith(why)), status)
        train, held_out = (_mean((v["rewards"].get(mode) or {}).get("mean")) for mode in ("train", "eval"))
        if (evaluation := v.get("evaluation")) and evaluation["ended_at"] is None:
            held_out = "begun"
        elif evaluation and held_out == "-":
            held_out = "failed" if evaluation["reward"] is None else _mean(evaluation["reward"])
        when = time.strftime("%m-%d %H:%M", time.localtime(v["live_at"] or v["created_at"]))
        made = (
            ("base model", None, None) if v["version"] == 0 else (v["publish"], "yes" if v["verified"] else "no", when)
        )
        rows.append((v["version"], "*" if v["live"] else "", status, v["step"], train, held_out, *made))
    names = ("version", "", "status", "step", "reward", "held out", "published", "verified", "when")
    shown = table(*names, rows=rows, padding=(0, 1))
    shown.columns[0].justify = shown.columns[3].justify = "right"
    return shown


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
