"""The command `costs`: shows tokens and USD of calls, in groups, and what rewarders spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...commands.command_line import RECORD, configuration
from ...commands.command_line import Json as AsJson
from ...commands.formats import count, number, plain, print_json, print_view, table

if TYPE_CHECKING:
    from rich.table import Table

    from ...commands.api_client import ApiClient

AMOUNTS = ("input", "cached", "output", "reasoning")
By = Literal["day", "model", "key", "task", "rollout", "mode"]
Json = Mapping[str, Any]


def costs(
    context: typer.Context,
    by: Annotated[By, typer.Option(help="what to group by")] = "day",
    since: Annotated[
        str | None, typer.Option(help="only calls since 2026-01-31, 2026-01-31T12:00, 90m, 12h or 7d")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="the maximum number of lines")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what calls used and cost, and what rewarders spent."""
    from ...commands.api_client import look
    from ...commands.show.find import since_of

    begin = since_of(since)
    params = {"by": by, "limit": str(limit)} | ({} if begin is None else {"since": str(begin)})

    async def read(api: ApiClient) -> dict[str, Any]:
        status = await api.request("GET", "/status")
        return await api.request("GET", "/costs", params=params) | {"rewarders": status.get("spent", [])}

    found = look(configuration(context), read)
    if as_json:
        print_json(found)
    else:
        print_view(costs_table(found), *(plain(line, "dim") for line in notes(found["total"])))


def costs_table(costs: Json) -> Table:
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


def notes(total: Json) -> list[str]:
    """Return notes about what the numbers leave out."""
    lines = {
        "unpriced": "calls of models without a price: add them to `prices`",
        "unknown": "answers did not report all of their usage: most streams do with stream_options.include_usage",
    }
    return [f"{count(total[name])} {line}" for name, line in lines.items() if total[name]]


def add_to(commands: typer.Typer) -> None:
    commands.command(rich_help_panel=RECORD)(costs)
