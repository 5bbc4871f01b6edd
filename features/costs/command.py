"""The `costs` command: tokens and USD of calls by a way of grouping them, and the seconds of training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ...commands.api_client import ApiClient, look
from ...commands.formats import count, number, plain, print_json
from ...commands.show.find import since_of
from ...core.config.root import Config
from ...core.errors import ConfigError

WAYS = ("day", "model", "key", "task", "rollout", "mode")
STEP = "step"
SECONDS = ("collect_s", "guide_s", "step_s", "checkpoint_s", "publish_s")  # of the machine; not `wait_s`
TEACHER = "teacher_tokens"
Json = Mapping[str, Any]


def costs_command(config: Config, by: str, since: str | None, limit: int, *, as_json: bool) -> None:
    """Print the costs. Raise ConfigError for an unknown way of grouping."""
    if by not in (*WAYS, STEP):
        raise ConfigError(f"--by is {', '.join(WAYS)} or {STEP}, got {by!r}")
    if by == STEP:
        steps = look(config, lambda api: api.request("GET", "/policy/steps", params={"limit": str(limit)}))["data"]
        found = [{"step": step["step"], **seconds_of(step["metrics"])} for step in steps]
        print_json({"by": by, "data": found}) if as_json else Console(highlight=False).print(steps_table(found))
        return
    begin = since_of(since)
    params = {"by": by, "limit": str(limit)} | ({} if begin is None else {"since": str(begin)})

    async def read(api: ApiClient) -> dict[str, Any]:
        status = await api.request("GET", "/status")
        return await api.request("GET", "/costs", params=params) | {"rewarders": status.get("spent", [])}

    costs = look(config, read)
    if as_json:
        print_json(costs)
    else:
        console = Console(highlight=False)
        console.print(costs_table(costs))
        for line in notes(costs):
            console.print(plain(line, "dim"))


def costs_table(costs: Json) -> Table:
    """Return a line for each part, the total, and what rewarders spent."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column(costs["by"], overflow="fold")
    for name in ("calls", "input", "cached", "output", "reasoning", "USD"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in costs["data"]:
        table.add_row(plain(part["name"] or "-"), *_cells(part))
    table.add_row("all calls", *_cells(costs["total"]), style="bold")
    for spent in costs["rewarders"]:
        usd = number(spent["usd"], 4) if spent["usd"] else "-"
        table.add_row(plain(f"rewarder {spent['name']}"), "", count(spent["tokens"]), "", "", "", usd)
    return table


def _cells(part: Json) -> Sequence[str]:
    tokens = (part[f"{name}_tokens"] for name in ("input", "cached", "output", "reasoning"))
    unpriced = part["unpriced"] + part["unknown"]
    return count(part["calls"]), *map(count, tokens), number(part["usd"], 4) + ("+?" if unpriced else "")


def notes(costs: Json) -> list[str]:
    """Return what is not in the numbers."""
    total, lines = costs["total"], []
    if total["unpriced"]:
        lines.append(f"{count(total['unpriced'])} calls of models without a price: give one in `prices`")
    if total["unknown"]:
        lines.append(f"{count(total['unknown'])} answers did not say what they used: streams do with stream_options")
    if not costs["complete"]:
        lines.append("older calls are left out: only the newest are looked at")
    return lines


def seconds_of(metrics: Json) -> dict[str, float]:
    """Return the seconds of the machine that a step took, by what for, its wait, and a teacher's tokens."""
    parts = {
        name: metrics[name] for name in (*SECONDS, "wait_s", TEACHER) if isinstance(metrics.get(name), int | float)
    }
    return {"machine_s": sum(parts.get(name, 0.0) for name in SECONDS), **parts}


def steps_table(steps: Sequence[Json]) -> Table:
    """Return a line for each step, newest first."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    names, teacher = ("machine_s", *SECONDS, "wait_s"), any(TEACHER in step for step in steps)
    for name in ("step", *(name.removesuffix("_s") + " s" for name in names), *["teacher's tokens"] * teacher):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        tokens = [count(step.get(TEACHER, 0))] * teacher
        table.add_row(str(step["step"]), *(number(step.get(name)) for name in names), *tokens)
    return table
