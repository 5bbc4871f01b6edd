"""`policy list|promote|rollback`: shows policy versions and chooses the one that is served."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..load import configuration

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, help="Show policy versions and choose the live one.")

Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


@app.command("list")
def list_versions(context: typer.Context, as_json: Json = False) -> None:
    """List the policy versions, oldest first. Those that are `ready` can be promoted.

    Below: the test that is under way, and how the last one was decided (policy.promotion: gated).
    """
    from rich.console import Console

    from ..api_client import ask
    from ..formats import print_json
    from .promotion import tests_view

    answer = ask(configuration(context), lambda api: api.request("GET", "/policy/versions"))
    if as_json:
        print_json(answer)
    else:
        console = Console(highlight=False)
        console.print(versions_table(answer["data"]), *tests_view(answer["data"]), sep="\n")


@app.command()
def promote(
    context: typer.Context, version: Annotated[int, typer.Argument(metavar="N")], as_json: Json = False
) -> None:
    """Make a version live. The trainer continues from it."""
    _change(context, "/policy/promote", {"version": version}, as_json)


@app.command()
def rollback(context: typer.Context, as_json: Json = False) -> None:
    """Go back to the newest usable version that is older than the live one."""
    _change(context, "/policy/rollback", None, as_json)


def versions_table(versions: list[dict[str, Any]]) -> Table:
    """Return a table with one line per version; a star marks the live one."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("version", "", "status", "step", "published", "reward", "when"):
        table.add_column(name, justify="right" if name in ("version", "step") else "left", no_wrap=True)
    for v in versions:
        mean = v["metrics"].get("reward_mean")
        status = v["status"] if v["live"] or v["status"] != "ready" else _readiness(v["obstacle"])
        cells = (str(v["version"]), "*" if v["live"] else "", status, "-" if v["step"] is None else str(v["step"]))
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(v["live_at"] or v["created_at"]))
        reward = "-" if mean is None else f"{mean:.3f}"
        published = ("base model", reward, "-") if v["version"] == 0 else (v["publish"] or "-", reward, when)
        table.add_row(*cells, *published)
    return table


def _readiness(obstacle: str | None) -> str:
    """The present status of a version that was live once: `ready` to be promoted, or not."""
    return "ready" if obstacle is None else "files gone" if "gone" in obstacle else "other mode"


def _change(context: typer.Context, path: str, body: dict[str, int] | None, as_json: bool) -> None:
    from ..api_client import ask
    from ..formats import print_json

    version = ask(configuration(context), lambda api: api.request("POST", path, body))
    if as_json:
        print_json(version)
    else:
        typer.echo(f"policy version {version['version']} is live")
