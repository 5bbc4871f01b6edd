"""Kinds of environments with a played package in place of the real one, made without pip."""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Mapping

from lightning_proxy.commands.environments.install import KindsEnvironment


def played_kind(kind: str, modules: Mapping[str, str]) -> None:
    """Make `.venv-environments/KIND` in the working directory. `modules`: the files of the played package."""
    made = KindsEnvironment(kind)
    venv.create(made.directory, symlinks=True)
    (packages,) = made.directory.glob("lib/python*/site-packages")
    for name, text in modules.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))  # openai and tenacity
    made.finish()
