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
StandIn = Callable[[str, str | None, Given], Given]
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
    """List environments that others wrote, a line each; without KIND, the kinds."""
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
        name = command.name or command.callback.__name__
        parameters = inspect.signature(command.callback).parameters
        if "command" in parameters and "tasks" in parameters and parameters["tasks"].default is inspect.Parameter.empty:
            command.callback = _with_options(command.callback, _checked(name))
        elif name == "experiment":
            command.callback = _with_options(command.callback, _experiment)
    commands.command(rich_help_panel=WORK)(environments)


def _with_options(callback: Callable[..., None], stand_in: StandIn) -> Callable[..., None]:
    """Return the command with both options. `stand_in` returns the arguments that stand for them."""

    @wraps(callback)
    def command(environment: str | None, environment_args: str | None, **given: Any) -> None:
        callback(**given | stand_in(environment or "", environment_args, given))

    hints = get_type_hints(callback, include_extras=True)
    parameters = [
        inspect.Parameter(name, KEYWORD, annotation=hints[name], default=one.default)
        for name, one in inspect.signature(callback).parameters.items()
    ]
    for n, one in enumerate(parameters):
        if one.name == "tasks":
            parameters[n] = one.replace(annotation=_optional(one.annotation), default=None)
        elif one.name == "command":
            parameters[n] = one.replace(default=[])
    parameters += [inspect.Parameter(name, KEYWORD, annotation=one, default=None) for name, one in OPTIONS.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _optional(hint: Any) -> Any:
    return Annotated[hint.__origin__ | None, *hint.__metadata__]


def _checked(name: str) -> StandIn:
    """Return the stand-in of the command `name`. It refuses half of both."""

    def stand_in(environment: str, arguments: str | None, given: Given) -> Given:
        from ...core.errors import ConfigError
        from .source import source_of

        if environment and (given["tasks"] or given["command"]):
            raise ConfigError("--environment stands in place of --tasks and of the program after `--`: give one")
        if not environment and (arguments or not given["tasks"] or not given["command"]):
            raise ConfigError(f"{name} needs --tasks FILE and a program after `--`, or --environment KIND:NAME")
        if not environment:
            return {}
        config = configuration(given["context"])
        split = "held_out" if name == "eval" else "train"
        source = source_of(environment, arguments, {"split": split, "model": config.policy.alias})
        preload = given["preload"] or (",".join(source.preload) if config.run.executor == "local" else "")
        return {"tasks": source.tasks, "command": source.command, "preload": preload}

    return stand_in


def _experiment(environment: str, arguments: str | None, given: Given) -> Given:
    """Write the experiment's file anew, with the tasks of both splits and the program."""
    if not environment:
        return {}
    from .source import experiment_of

    alias = configuration(given["context"]).policy.alias
    file: Path = given["file"]
    directory = given["directory"] or Path("lightning-experiments") / file.stem
    return {"file": experiment_of(file, environment, arguments, alias), "directory": directory}
