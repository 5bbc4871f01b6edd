"""`prompts list|show|add|promote|rollback`: the texts that replace an agent's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from ...commands.command_line import RECORD, Commands, Json, configuration

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Show and change the prompts that replace an agent's own.")


Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.command("list")
def list_prompts(context: typer.Context, as_json: Json = False) -> None:
    """List the prompts with their versions. A star marks the live one; rewards are means over a version's rollouts."""
    from ...commands.formats import number, plain, print_json, print_view, table

    answer = _ask(context, "GET", "/prompts")
    if as_json:
        return print_json(answer)
    if not answer["data"]:
        return typer.echo("no prompts yet: `lightning-proxy prompts add NAME FILE` adds the first one")
    shown = table("prompt", "version", "", "agent", "role", "train", "eval", expand=True)
    shown.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    for prompt in answer["data"]:
        agent, role = prompt["match"]["agent"] or "any", prompt["match"]["role"]
        for one in prompt["versions"]:
            rewards = [number(one["rewards"].get(mode, {}).get("mean")) for mode in ("train", "eval")]
            text = plain(" ".join(one["text"].split())[:200])
            live = "*" if one["live"] else ""
            shown.add_row(prompt["name"], str(one["version"]), live, agent, role, *rewards, text)
    return print_view(shown)


@app.command()
def show(
    context: typer.Context,
    name: Name,
    version: Annotated[int | None, typer.Option(metavar="N", help="a version", show_default="the live one")] = None,
) -> None:
    """Print only a prompt's text, for writing it to a file."""
    typer.echo(_ask(context, "GET", _path(name) + ("" if version is None else f"?version={version}"))["text"])


@app.command()
def add(
    context: typer.Context,
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the text, in UTF-8; `-` reads standard input")],
    agent: Annotated[
        str | None, typer.Option(help="the agent (X-Agent-Name) of the message", show_default="any")
    ] = None,
    role: Annotated[Literal["system", "user"] | None, typer.Option(help="the role of the message")] = None,
    comment: Annotated[str | None, typer.Option(help="why this version was made")] = None,
    promote: Annotated[bool, typer.Option("--promote", help="make it live")] = False,
) -> None:
    """Add a prompt, or a version of one. The first version should be the agent's own text; it is live at once."""
    from ...core.errors import LightningError

    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LightningError(f"{file} cannot be read: {error}") from None
    body: dict[str, Any] = {"name": name, "text": text, "comment": comment, "promote": promote}
    if agent is not None or role is not None:
        body["match"] = {"agent": agent, "role": role or "system"}
    prompt = _ask(context, "POST", "/prompts", body)
    live = "it is live" if prompt["version"] == prompt["live_version"] else f"{prompt['live_version']} is live"
    typer.echo(f"prompt {name} version {prompt['version']}; {live}")


@app.command()
def promote(context: typer.Context, name: Name, version: Annotated[int, typer.Argument(metavar="N")]) -> None:
    """Make a version live now. Rollouts that have begun keep theirs."""
    prompt = _ask(context, "POST", f"{_path(name)}/promote", {"version": version})
    typer.echo(f"prompt {name} version {prompt['live_version']} is live")


@app.command()
def rollback(context: typer.Context, name: Name) -> None:
    """Go back to the newest older version that was ever live."""
    prompt = _ask(context, "POST", f"{_path(name)}/rollback")
    typer.echo(f"prompt {name} version {prompt['live_version']} is live")


def _path(name: str) -> str:
    return f"/prompts/{quote(name, safe='')}"


def _ask(context: typer.Context, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    from ...commands.api_client import ask, look

    to = look if method == "GET" else ask  # if no proxy is running, its store answers
    return to(configuration(context), lambda api: api.request(method, path, body))


def add_to(commands: typer.Typer) -> None:
    commands.add_typer(app, name="prompts", rich_help_panel=RECORD)
