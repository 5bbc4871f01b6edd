"""`rollouts list|show|diff|tail|end|delete` and `reward`."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...core.errors import ConfigError, InvalidRequest, LightningError, NotFound
from ..command_line import Commands, Json, configuration
from ..formats import print_json, print_view

if TYPE_CHECKING:
    from ..api_client import ApiClient

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Show, compare, end and delete rollouts.")

TAIL_POLL_S = 1.0
TAIL_PAGE = 200
REFUSED = (400, 404, 405, 409)  # refusals that concern one rollout only
RolloutStatus = Literal["running", "completed", "failed", "discarded"]
WIDE = 10_000


@app.command("list")
def list_rollouts(
    context: typer.Context,
    status: Annotated[RolloutStatus | None, typer.Option(help="only rollouts of this status")] = None,
    task: Annotated[str | None, typer.Option(help="only rollouts of this task id")] = None,
    agent: Annotated[str | None, typer.Option(help="only rollouts of this agent")] = None,
    mode: Annotated[Literal["train", "eval"] | None, typer.Option(help="only rollouts of this mode")] = None,
    min_reward: Annotated[float | None, typer.Option(help="only rollouts with at least this reward")] = None,
    max_reward: Annotated[float | None, typer.Option(help="only rollouts with at most this reward")] = None,
    since: Annotated[
        str | None, typer.Option(help="only rollouts opened since 2026-01-31, 2026-01-31T12:00, 90m, 12h or 7d")
    ] = None,
    step: Annotated[int | None, typer.Option(help="only rollouts that this training step took")] = None,
    grep: Annotated[str | None, typer.Option(help="only rollouts with this text in a request or an answer")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="at most N")] = 20,
    as_json: Json = False,
) -> None:
    """List rollouts, newest first. A pipe gets full ids."""
    from rich.console import Console

    from ..api_client import look
    from .find import collect, since_of
    from .rollout_view import rollouts_table

    filters = {
        "status": status, "task_id": task, "agent": agent, "mode": mode, "step": step,
        "min_reward": min_reward, "max_reward": max_reward, "since": since_of(since), "text": grep,
    }  # fmt: skip
    found, more = look(configuration(context), lambda api: collect(api, filters, limit))
    if as_json:
        return print_json({"data": found, "next_cursor": more})
    width = console.width if (console := Console()).is_terminal else None
    return Console(width=width or WIDE).print(rollouts_table(found, time.time(), width))


Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="ids, or their beginnings")]
Id = Annotated[str, typer.Argument(metavar="ID", help="an id, or its beginning")]


@app.command()
def delete(context: typer.Context, rollout_ids: Ids) -> None:
    """Permanently delete ended rollouts and all their records. The exit code is 1 if one was refused."""
    _each(context, rollout_ids, "deleted", lambda api, one: api.delete_rollout(one))


@app.command()
def end(
    context: typer.Context,
    rollout_ids: Ids,
    status: Annotated[Literal["completed", "failed", "discarded"], typer.Option(help="how it ended")] = "completed",
    reason: Annotated[str | None, typer.Option(help="why it ended, for people")] = None,
) -> None:
    """End running rollouts; no reward is posted. The exit code is 1 if one was refused."""
    _each(context, rollout_ids, "ended", lambda api, one: api.end_rollout(one, status, reason))


def _each(
    context: typer.Context, given: list[str], done: str, work: Callable[[ApiClient, str], Awaitable[None]]
) -> None:
    """Apply a change to each of these rollouts. A refusal does not stop the others."""
    from ..api_client import ApiError, ask
    from .find import with_id

    refused: list[LightningError] = []

    async def all_of_them(api: ApiClient) -> None:
        for one in given:
            try:
                await with_id(api, one, partial(work, api), changes=True)
            except (ApiError, InvalidRequest, NotFound) as error:
                if isinstance(error, ApiError) and error.status_code not in REFUSED:
                    raise
                refused.append(error)

    ask(configuration(context), all_of_them)
    if number := len(given) - len(refused):
        typer.echo(f"{done} {number} rollout{'s' * (number != 1)}")
    for error in refused:
        typer.echo(f"lightning-proxy: {error.message}", err=True)
    if refused:
        raise typer.Exit(1)


@app.command()
def show(
    context: typer.Context,
    rollout_id: Id,
    as_json: Json = False,
) -> None:
    """Show one rollout: its conversation, calls and rewards. A pipe gets long texts in full."""
    from rich.console import Console

    from ..api_client import look
    from .find import find
    from .rollout_view import rollout_detail

    rollout = look(configuration(context), lambda api: find(api, rollout_id))
    print_json(rollout) if as_json else print_view(rollout_detail(rollout, full=not Console().is_terminal))


@app.command()
def diff(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="an id, or its beginning")],
    b: Annotated[str, typer.Argument(metavar="B", help="another id, or its beginning")],
) -> None:
    """Compare two rollouts: the lines of `rollouts show` that differ."""
    from ..api_client import look
    from .find import find
    from .rollout_view import rollout_diff

    async def both(api: ApiClient) -> list[dict[str, Any]]:
        return [await find(api, one) for one in (a, b)]

    print_view(rollout_diff(*look(configuration(context), both)))


@app.command()
def tail(context: typer.Context, as_json: Json = False) -> None:
    """Follow rollouts as they change, until Ctrl-C."""
    from asyncio import sleep

    from ..api_client import ask
    from ..signals import Interrupted
    from .rollout_view import rollout_line

    async def follow(api: ApiClient) -> None:
        shown = (await api.rollouts(limit=TAIL_PAGE))["data"][10:]  # the newest ten are told at first
        while True:
            page = (await api.rollouts(limit=TAIL_PAGE))["data"]
            for rollout in reversed(page):
                if rollout not in shown:
                    print_json(rollout) if as_json else print_view(rollout_line(rollout), soft_wrap=True)
            shown = page
            await sleep(TAIL_POLL_S)

    try:
        ask(configuration(context), follow)
    except Interrupted:
        raise typer.Exit(0) from None


def reward(
    context: typer.Context,
    rollout_id: Id,
    value: Annotated[float, typer.Argument(metavar="VALUE", help="any finite number")],
    call: Annotated[str | None, typer.Option(help="reward this call, not the rollout")] = None,
    name: Annotated[str, typer.Option(help="the reward's name; the newest value of a name counts")] = "reward",
    comment: Annotated[str | None, typer.Option(help="a note for people")] = None,
    final: Annotated[bool | None, typer.Option("--final/--no-final", help="end the rollout, or leave it open")] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="offer the rollout to the trainer again")] = False,
    as_json: Json = False,
) -> None:
    """Post a reward for a rollout, or for one of its calls."""
    from ..api_client import ask
    from .find import with_id

    if not math.isfinite(value):
        raise ConfigError(f"the reward must be a finite number, got {value}")
    body = {"reward": value, "call_id": call, "name": name, "comment": comment, "source": "cli", "final": final}
    body["retrain"] = retrain

    def post(api: ApiClient) -> Awaitable[Any]:
        return with_id(
            api, rollout_id, lambda one: api.request("POST", "/reward", body | {"rollout_id": one}), changes=True
        )

    answer = ask(configuration(context), post)
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"reward {answer['reward_id']} recorded for rollout {answer['rollout_id']}")
