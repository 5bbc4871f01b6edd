"""Reads the configuration for a command that runs. `--help` and completion import these modules and need none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from ..core.config.root import Config


def configuration(context: typer.Context, overrides: dict[str, Any] | None = None) -> Config:
    """Return the configuration that `--config` names, with the command's options over it."""
    from ..core.config.file import load_config

    return load_config(context.obj, overrides)


def config_file(given: Path | None) -> Path | None:
    """Return the configuration's file: what `--config` names, else ./config.yaml if it is there."""
    here = Path("config.yaml")
    return given or (here if here.is_file() else None)
