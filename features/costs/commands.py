"""`costs`: tokens and USD of calls by a way of grouping them, and the seconds of training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...commands.command_line import RECORD, configuration
from ...commands.command_line import Json as AsJson
from ...commands.formats import count, number, plain, print_json, print_view, table

if TYPE_CHECKING:
    from rich.table import Table

    from ...commands.api_client import ApiClient

WAYS = ("day", "model", "key", "task", "rollout", "mode", "step")
SECONDS = ("collect_s", "guide_s", "step_s", "checkpoint_s", "publish_s")  # of the machine; not `wait_s`
TEACHER = "teacher_tokens"
AMOUNTS = ("input", "cached", "output", "reasoning")
Json = Mapping[str, Any]


def costs(
    context: typer.Context,
    by: Annotated[str, typer.Option(help="day, model, key, task, rollout, mode or step")] = "day",
    since: Annotated[
        str | None, typer.Option(help="only calls since 2026-01-31, 2026-01-31T12:00, 90m, 12h or 7d")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="the most lines")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what calls used and cost, what rewarders spent, or (--by step) the seconds of training steps."""
    from ...commands.api_client import look
    from ...commands.show.find import since_of
    from ...core.errors import ConfigError

    if by not in WAYS:
        raise ConfigError(f"--by is {', '.join(WAYS[:-1])} or {WAYS[-1]}, got {by!r}")
    begin = since_of(since)
    params = {"by": by, "limit": str(limit)} | ({} if begin is None else {"since": str(begin)})

    async def read(api: ApiClient) -> dict[str, Any]:
        if by == "step":
            steps = (await api.request("GET", "/policy/steps", params={"limit": str(limit)}))["data"]
            return {"by": by, "data": [{"step": step["step"], **seconds_of(step["metrics"])} for step in steps]}
        status = await api.request("GET", "/status")
        return await api.request("GET", "/costs", params=params) | {"rewarders": status.get("spent", [])}

    found = look(configuration(context), read)
    if as_json:
        print_json(found)
    elif by == "step":
        print_view(steps_table(found["data"]))
    else:
        print_view(costs_table(found), *(plain(line, "dim") for line in notes(found)))


def costs_table(costs: Json) -> Table:
    """Return a line for each part, the total, and what rewarders spent."""
    shown = table(costs["by"], right=("calls", *AMOUNTS, "USD"), padding=(0, 1))
    shown.columns[0].overflow, shown.columns[0].no_wrap = "fold", False
    for part in costs["data"]:
        shown.add_row(plain(part["name"] or "-"), *_cells(part))
    shown.add_row("all calls", *_cells(costs["total"]), style="bold")
    for spent in costs["rewarders"]:
        usd = number(spent["usd"], 4) if spent["usd"] else "-"
        shown.add_row(plain(f"rewarder {spent['name']}"), "", count(spent["tokens"]), "", "", "", usd)
    return shown


def _cells(part: Json) -> Sequence[str]:
    not_known = part["unpriced"] + part["unknown"]
    tokens = (count(part[f"{name}_tokens"]) for name in AMOUNTS)
    return count(part["calls"]), *tokens, number(part["usd"], 4) + ("+?" if not_known else "")


def notes(costs: Json) -> list[str]:
    """Return what is not in the numbers."""
    total, lines = costs["total"], []
    if total["unpriced"]:
        lines.append(f"{count(total['unpriced'])} calls of models without a price: give one in `prices`")
    if total["unknown"]:
        lines.append(f"{count(total['unknown'])} answers did not say what they used: streams do with stream_options")
    return lines


def seconds_of(metrics: Json) -> dict[str, float]:
    """Return the seconds of the machine that a step took, by what for, its wait, and a teacher's tokens."""
    names = [name for name in (*SECONDS, "wait_s", TEACHER) if isinstance(metrics.get(name), int | float)]
    return {"machine_s": sum(metrics[name] for name in names if name in SECONDS)} | {n: metrics[n] for n in names}


def steps_table(steps: Sequence[Json]) -> Table:
    """Return a line for each step, newest first."""
    names, teacher = ("machine_s", *SECONDS, "wait_s"), any(TEACHER in step for step in steps)
    heads = ("step", *(name.removesuffix("_s") + " s" for name in names), *["teacher's tokens"] * teacher)
    shown = table(right=heads, padding=(0, 1))
    for step in steps:
        tokens = [count(step.get(TEACHER, 0))] * teacher
        shown.add_row(str(step["step"]), *(number(step.get(name)) for name in names), *tokens)
    return shown


def add_to(commands: typer.Typer) -> None:
    """Add `costs` to the commands."""
    commands.command(rich_help_panel=RECORD)(costs)
