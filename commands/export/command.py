"""Commands `export`, `import` and `policy export`: take the record out, and conversations of others in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..command_line import configuration, task_ids, versions


def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="the file to write; `-` is standard output")],
    kind: Annotated[
        str, typer.Option(help="`transitions`, `sft`: conversations, or `atif`: Harbor's trajectories")
    ] = "transitions",
    format: Annotated[str | None, typer.Option(help="jsonl or parquet", show_default="by the file's suffix")] = None,
    mode: Annotated[
        str | None, typer.Option(help="only rollouts of this mode: train, eval or all", show_default="all; sft: train")
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            help="only running, completed, failed or discarded ones, or all",
            show_default="all; sft: completed and failed",
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="only rollouts of this task id", autocompletion=task_ids)] = None,
    min_reward: Annotated[float | None, typer.Option(help="only rollouts with at least this reward")] = None,
    since: Annotated[
        str | None, typer.Option(help="only rollouts opened since 2026-01-31, 2026-01-31T12:00, 90m, 12h or 7d")
    ] = None,
) -> None:
    """Write what was recorded as JSON Lines or Parquet. The proxy need not run."""
    from .export import export_command

    filters = {"mode": mode, "status": status, "task_id": task, "min_reward": min_reward, "since": since}
    export_command(configuration(context), file, format, kind, filters)


def import_(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="JSON Lines, a chat conversation or a trajectory per line; or a trajectory.json")
    ],
    model: Annotated[str, typer.Option(help="the model of lines without `model`")] = "imported",
    reward: Annotated[float, typer.Option(help="the reward of lines without `reward`")] = 1.0,
) -> None:
    """Record conversations of others, to imitate. The proxy need not run.

    `train --method sft` learns from them.
    """
    from .bring_in import import_command

    os.umask(0o077)  # what users said is the owner's alone
    import_command(configuration(context), file, model, reward)


def export_version(
    context: typer.Context,
    version: Annotated[int, typer.Argument(metavar="N", autocompletion=versions)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new directory")],
    form: Annotated[
        str | None,
        typer.Option("--as", help="adapter (PEFT), or merged: a full model", show_default="as it was published"),
    ] = None,
) -> None:
    """Write a version as a directory that PEFT, transformers and vLLM load. The proxy need not run."""
    from ..signals import run_until_signal
    from .policy import export_policy

    written = run_until_signal(export_policy(configuration(context), version, directory, form))
    what = "a LoRA adapter" if written == "adapter" else "a full model"
    typer.echo(f"policy version {version} is in {directory}: {what}, with a model card (README.md)")
