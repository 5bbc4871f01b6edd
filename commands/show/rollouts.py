"""`rollouts list|show|tail|delete` and `reward`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from ...proxy.config.file import load_config

if TYPE_CHECKING:
    from ..api_client import ApiClient

app = typer.Typer(no_args_is_help=True, help="Show rollouts, or delete them.")

Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
TAIL_POLL_S = 1.0
TAIL_PAGE = 200
NEWEST = 1000
REFUSED = (400, 404, 405, 409)  # refusals that concern one rollout only
_NO_PATH = ("", ".", "..")  # with one of these a path would name another route


@app.command("list")
def list_rollouts(
    context: typer.Context,
    status: Annotated[str | None, typer.Option(help="only running, completed, failed or discarded ones")] = None,
    task: Annotated[str | None, typer.Option(help="only those of this task id")] = None,
    agent: Annotated[str | None, typer.Option(help="only those of this agent")] = None,
    mode: Annotated[str | None, typer.Option(help="only those of this mode: train or eval")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="at most so many")] = 20,
    as_json: Json = False,
) -> None:
    """List rollouts, newest first."""
    from rich.console import Console

    from ..api_client import ask
    from ..formats import print_json
    from .rollout_view import rollouts_table

    filters = {"status": status, "task_id": task, "agent": agent, "mode": mode, "limit": limit}
    page = ask(load_config(context.obj), lambda api: api.rollouts(**filters))
    if as_json:
        print_json(page)
    else:
        console = Console()
        console.print(rollouts_table(page["data"], time.time(), console.width))


@app.command()
def delete(
    context: typer.Context,
    rollout_ids: Annotated[list[str], typer.Argument(help="ids of ended rollouts")],
) -> None:
    """Delete rollouts and all their records for good. The exit code is 1 if one was refused."""
    from ..api_client import ApiError, ask

    refused: list[ApiError] = []

    async def delete_all(api: ApiClient) -> None:
        for rollout_id in rollout_ids:
            try:
                await api.delete_rollout(quote(rollout_id, safe=""))
            except ApiError as error:
                if error.status_code not in REFUSED:
                    raise
                refused.append(error)

    ask(load_config(context.obj), delete_all)
    if deleted := len(rollout_ids) - len(refused):
        typer.echo(f"deleted {deleted} rollout{'s' * (deleted != 1)}")
    for error in refused:
        typer.echo(f"lightning-proxy: {error.message}", err=True)
    if refused:
        raise typer.Exit(1)


@app.command()
def show(
    context: typer.Context,
    rollout_id: Annotated[str, typer.Argument(help="an id, or its beginning")],
    full: Annotated[bool, typer.Option("--full", help="show long texts whole")] = False,
    as_json: Json = False,
) -> None:
    """Show one rollout: its conversation, calls and rewards."""
    from rich.console import Console

    from ..api_client import ask
    from ..formats import print_json
    from .rollout_view import rollout_detail

    rollout = ask(load_config(context.obj), lambda api: find(api, rollout_id))
    if as_json:
        print_json(rollout)
    else:
        Console(highlight=False).print(rollout_detail(rollout, full))


@app.command()
def tail(context: typer.Context, as_json: Json = False) -> None:
    """Follow rollouts as they change, until Ctrl-C."""
    from rich.console import Console

    from ..api_client import ask
    from ..formats import print_json
    from ..signals import Interrupted
    from .rollout_view import rollout_line

    console = Console(highlight=False)

    async def follow(api: ApiClient) -> None:
        known: dict[str, dict[str, Any]] | None = None
        while True:
            page = (await api.rollouts(limit=TAIL_PAGE))["data"]
            for rollout in changed(page, known):
                print_json(rollout) if as_json else console.print(rollout_line(rollout), soft_wrap=True)
            known = {rollout["rollout_id"]: rollout for rollout in page}
            await asyncio.sleep(TAIL_POLL_S)

    try:
        ask(load_config(context.obj), follow)
    except Interrupted:
        raise typer.Exit(0) from None


async def find(api: ApiClient, rollout_id: str) -> dict[str, Any]:
    """Return the rollout with this id, or else the only one of the newest whose id begins with it."""
    from ...proxy.errors import NotFound
    from ..api_client import ApiError

    if rollout_id not in _NO_PATH:
        try:
            return await api.rollout(quote(rollout_id, safe=""))
        except ApiError as error:
            if error.status_code not in (400, 404):
                raise
    start = rollout_id.removesuffix("…")
    known = [rollout["rollout_id"] for rollout in (await api.rollouts(limit=NEWEST))["data"]]
    found = [name for name in known if start and name.startswith(start)]
    if len(found) != 1:
        raise NotFound(f"no rollout {rollout_id!r}; {len(found)} of the newest {NEWEST} have an id that begins with it")
    return await api.rollout(found[0])


def changed(page: list[dict[str, Any]], known: dict[str, dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the rollouts that are new or changed, oldest first. The first time, the newest ten."""
    if known is None:
        return page[:10][::-1]
    return [rollout for rollout in reversed(page) if known.get(rollout["rollout_id"]) != rollout]


def reward(
    context: typer.Context,
    rollout_id: Annotated[str, typer.Argument(help="the rollout's id")],
    value: Annotated[float, typer.Argument(help="any finite number")],
    call: Annotated[str | None, typer.Option(help="reward this call, not the whole rollout")] = None,
    name: Annotated[str, typer.Option(help="the reward's name; the newest value of a name counts")] = "reward",
    comment: Annotated[str | None, typer.Option(help="a note for people")] = None,
    source: Annotated[str, typer.Option(help="who gives it")] = "cli",
    final: Annotated[bool | None, typer.Option("--final/--no-final", help="end the rollout, or leave it open")] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="offer it to the trainer again")] = False,
    as_json: Json = False,
) -> None:
    """Post a reward for a rollout, or for one of its calls."""
    import math

    from ...proxy.errors import ConfigError
    from ..api_client import ask
    from ..formats import print_json

    if not math.isfinite(value):
        raise ConfigError(f"the reward must be a finite number, got {value}")
    body = {"rollout_id": rollout_id, "reward": value, "call_id": call, "name": name, "comment": comment}
    body |= {"source": source, "final": final, "retrain": retrain}
    answer = ask(load_config(context.obj), lambda api: api.request("POST", "/reward", body))
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"reward {answer['reward_id']} recorded for rollout {answer['rollout_id']}")
