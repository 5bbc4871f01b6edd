"""Plugs environments in: `environments`, and `--environment` for every command that needs tasks and a program."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ...commands.command_line import WORK, configuration

Given = dict[str, Any]
KEYWORD = inspect.Parameter.KEYWORD_ONLY
OPTIONS = {
    "environment": Annotated[
        str | None,
        typer.Option("--environment", metavar="KIND:NAME", help="others' tasks, in place of files and a program"),
    ],
    "environment_args": Annotated[
        str | None,
        typer.Option("--environment-args", metavar="JSON", help="tasks, split, seed and more, see docs/eval.md"),
    ],
}


def environments(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="which environments to list")] = None,
    install: Annotated[bool, typer.Option("--install", help="make .venv-environments/KIND")] = False,
    further: Annotated[
        list[str] | None, typer.Option("--with", metavar="PACKAGE", help="with --install: a further package for pip")
    ] = None,
) -> None:
    """List environments that others wrote, a line each, or install a kind; without KIND, the kinds."""
    from ...core.errors import ConfigError
    from .source import KINDS, KindsEnvironment

    if (install and kind is None) or (further and not install):
        raise ConfigError("--install needs a KIND, and --with needs --install")
    if kind is None:
        for one in map(KindsEnvironment, KINDS):
            typer.echo(f"{one.kind:16} {'installed' if one.is_there else 'not installed'}: {', '.join(one.requires)}")
    elif install:
        KindsEnvironment(kind).make(further or ())
    else:
        typer.echo("\n".join(KindsEnvironment(kind).ask("names")))


def add_to(commands: typer.Typer) -> None:
    """Add `environments`, and the two options to commands that were added before."""
    for command in commands.registered_commands:
        assert command.callback is not None
        parameters = inspect.signature(command.callback).parameters
        needs_both = all(
            one in parameters and parameters[one].default is inspect.Parameter.empty for one in ("tasks", "command")
        )
        name = command.name or command.callback.__name__
        if needs_both or name == "experiment":
            command.callback = _with_options(name, command.callback)
    commands.command(rich_help_panel=WORK)(environments)


def _with_options(name: str, callback: Callable[..., None]) -> Callable[..., None]:
    """Return the command `name` with both options."""

    @wraps(callback)
    def command(environment: str | None, environment_args: str | None, **given: Any) -> None:
        callback(**given | _stand_in(name, environment or "", environment_args, given))

    hints = get_type_hints(callback, include_extras=True)
    parameters = {
        name: inspect.Parameter(name, KEYWORD, annotation=hints[name], default=one.default)
        for name, one in inspect.signature(callback).parameters.items()
    } | {name: inspect.Parameter(name, KEYWORD, annotation=hint, default=None) for name, hint in OPTIONS.items()}
    if "tasks" in parameters:
        parameters["tasks"] = parameters["tasks"].replace(annotation=_optional(hints["tasks"]), default=None)
        parameters["command"] = parameters["command"].replace(default=[])
    command.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return command


def _optional(hint: Any) -> Any:
    return Annotated[hint.__origin__ | None, *hint.__metadata__]


def _stand_in(name: str, environment: str, arguments: str | None, given: Given) -> Given:
    """Return the arguments of the command `name` that stand for an environment. Refuse half of both."""
    from ...core.errors import ConfigError
    from .source import experiment_of, source_of

    if not environment:
        if name != "experiment" and (arguments or not given["tasks"] or not given["command"]):
            raise ConfigError(f"{name} needs --tasks FILE and a program after `--`, or --environment KIND:NAME")
        return {}
    config = configuration(given["context"])
    if name == "experiment":
        file: Path = given["file"]
        directory = given["directory"] or Path("lightning-experiments") / file.stem
        return {"file": experiment_of(file, environment, arguments, config.policy.alias), "directory": directory}
    if given["tasks"] or given["command"]:
        raise ConfigError("--environment stands in place of --tasks and of the program after `--`: give one")
    split = "held_out" if name == "eval" else "train"
    source = source_of(environment, arguments, {"split": split, "model": config.policy.alias})
    preload = given["preload"] or (",".join(source.preload) if config.run.executor == "local" else "")
    return {"tasks": source.tasks, "command": source.command, "preload": preload}
