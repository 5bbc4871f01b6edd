"""Adds the command `environments`, and the option `--environment` to `run`, `eval`, `optimize` and `experiment`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ...commands.command_line import WORK, configuration

COMMANDS = ("run", "eval", "optimize", "experiment")  # which get both options
OPTIONS: dict[str, Any] = {
    "environment": Annotated[
        str | None,
        typer.Option("--environment", metavar="KIND:NAME", help="third-party tasks, instead of a file and a program"),
    ],
    "environment_args": Annotated[
        str | None,
        typer.Option("--environment-args", metavar="JSON", help="tasks, split, seed and more, see docs/eval.md"),
    ],
}


def environments(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="the kind to list or to install")] = None,
    install: Annotated[bool, typer.Option("--install", help="install it into .venv-environments/KIND")] = False,
    further: Annotated[
        list[str] | None, typer.Option("--with", metavar="PACKAGE", help="with --install: one more package")
    ] = None,
) -> None:
    """List the third-party environments of a kind, or install the kind. Without KIND, list the kinds."""
    from ...core.errors import ConfigError
    from .source import KINDS, KindsEnvironment

    if (install and kind is None) or (further and not install):
        raise ConfigError("--install needs a KIND, and --with needs --install")
    if kind is None:
        for one in map(KindsEnvironment, KINDS):
            typer.echo(f"{one.kind:16} {'installed' if one.is_there else 'not installed'}: {', '.join(one.requires)}")
    elif install:
        KindsEnvironment(kind).install(further or ())
    else:
        typer.echo("\n".join(KindsEnvironment(kind).ask("names")))


def add_to(commands: typer.Typer) -> None:
    """Add `environments`, and the two options to commands that were added before."""
    for command in commands.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        if name in COMMANDS:
            command.callback = _with_options(name, command.callback)
    commands.command(rich_help_panel=WORK)(environments)


def _with_options(name: str, callback: Callable[..., None]) -> Callable[..., None]:
    """Return the command `name` with both options. `--environment` replaces its tasks and program."""

    @wraps(callback)
    def command(environment: str | None, environment_args: str | None, **given: Any) -> None:
        callback(**given | _stand_in(name, environment or "", environment_args, given))

    hints = get_type_hints(callback, include_extras=True) | OPTIONS
    defaults = {one.name: one.default for one in inspect.signature(callback).parameters.values()}
    defaults |= dict.fromkeys(OPTIONS)
    if "tasks" in defaults:
        tasks = hints["tasks"]
        hints["tasks"] = Annotated[tasks.__origin__ | None, *tasks.__metadata__]
        defaults |= {"tasks": None, "command": []}
    command.__annotations__ = hints
    parameters = [
        inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, annotation=hints[one], default=default)
        for one, default in defaults.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _stand_in(name: str, environment: str, arguments: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return new values for the arguments that `environment` replaces. Raises ConfigError for wrong arguments."""
    from ...core.errors import ConfigError
    from .source import experiment_of, source_of

    if not environment:
        if name != "experiment" and (arguments or not given["tasks"] or not given["command"]):
            raise ConfigError(
                f"{name} needs --tasks FILE and a program after `--`, or --environment KIND:NAME; only the latter "
                "takes --environment-args"
            )
        return {}
    config = configuration(given["context"])
    if name == "experiment":
        file: Path = given["file"]
        directory = given["directory"] or Path("lightning-experiments") / file.stem
        return {"file": experiment_of(file, environment, arguments, config.policy.alias), "directory": directory}
    if given["tasks"] or given["command"]:
        raise ConfigError("--environment replaces --tasks and the program after `--`: give one or the other")
    split = "held_out" if name == "eval" else "train"
    source = source_of(environment, arguments, {"split": split, "model": config.policy.alias})
    found = {"tasks": source.tasks, "command": source.command}
    if "preload" in given:
        found["preload"] = given["preload"] or (",".join(source.preload) if config.run.executor == "local" else "")
    return found
