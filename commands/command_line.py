"""What commands share: `--help` in groups, common options, errors, the configuration, and what features add."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..core.features import modules

if TYPE_CHECKING:
    from ..core.config.root import Config
    from .api_client import OpenRollout

START, SYSTEM, WORK, RECORD = "First steps", "The system", "Work and rewards", "What was recorded and learnt"
GROUPS = (START, SYSTEM, WORK, RECORD)
WHOLE = 1000  # characters: a command's first sentence is wrapped, not cut

Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
# Of the commands that run an agent program over tasks.
Command = Annotated[list[str], typer.Argument(help="the agent program, after `--`")]
Tasks = Annotated[Path, typer.Option(metavar="FILE", help="a JSON Lines or Parquet file, one task per line or row")]
Concurrency = Annotated[int, typer.Option(metavar="N", min=1, help="how many programs run at once")]
Preload = Annotated[str, typer.Option(help="modules to import once for all runs of `python script.py …`")]
Outputs = Annotated[Path | None, typer.Option("--logs", help="directory for each program's output")]
# vLLM's and Ray's usage statistics, and what huggingface_hub, transformers and TRL report.
# litellm's is an attribute: core/prices.py.
OFF = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class Commands(TyperGroup):
    """Lists the commands in groups, and turns an error of ours into a one-line message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        from ..core.errors import LightningError

        try:
            return super().invoke(ctx)
        except LightningError as error:
            typer.echo(f"lightning-proxy: {error.message}", err=True)
            raise typer.Exit(error.exit_code) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        lines: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for name, command in self.commands.items():
            group = getattr(command, "rich_help_panel", None) or "Commands"
            lines.setdefault(group, []).append((name.ljust(width), command.get_short_help_str(WHOLE)))
        for group, of_group in lines.items():
            if of_group:
                with formatter.section(group):
                    formatter.write_dl(of_group)


def configuration(context: typer.Context, overrides: dict[str, Any] | None = None) -> Config:
    from ..core.config.file import load_config

    return load_config(context.obj, overrides)


def config_file(given: Path | None) -> Path | None:
    """Return the configuration file: the one that `--config` names, else ./config.yaml if it exists."""
    here = Path("config.yaml")
    return given or (here if here.is_file() else None)


def variables(proxy_url: str, rollout: OpenRollout) -> dict[str, str]:
    """Return the environment variables that features add for a program that works on a rollout."""
    found: dict[str, str] = {}
    for of_feature in brought("variables"):
        found |= of_feature(proxy_url, rollout)
    return found


def brought(name: str) -> list[Callable[..., Any]]:
    return [getattr(module, name) for module in modules("commands") if hasattr(module, name)]


def telemetry_off() -> dict[str, str]:
    """Return the variables, except those already set, that keep libraries imported later from sending telemetry."""
    return {name: value for name, value in OFF.items() if name not in os.environ}
