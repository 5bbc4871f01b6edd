"""The groups in which `--help` lists the commands. Each command names its group where it is added."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

START, SYSTEM, WORK, RECORD = "First steps", "The system", "Work and rewards", "What was recorded and learnt"
GROUPS = (START, SYSTEM, WORK, RECORD)
WHOLE = 1000  # characters: a command's first sentence is wrapped, not cut


class Commands(TyperGroup):
    """Lists its commands in groups. Shows our own errors as one line and ends with their exit code."""

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
