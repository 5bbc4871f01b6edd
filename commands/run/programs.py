"""Runs agent programs on this machine, each in a process of its own, forked from a server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...client.program import variables
from ...core import guard
from ...core.config.file import inherited
from ...core.config.run import is_script, require_program
from ...core.errors import ConfigError
from .output import Keeping
from .served import ServedRunner

SERVER = Path(__file__).with_name("fork_server.py")


class LocalRunner(ServedRunner):
    """Starts the command anew for each run; or, with `modules`, forks `python script.py …` once they are imported.

    ConfigError if there is no such program, or no such script.
    """

    def __init__(
        self,
        command: Sequence[str],
        modules: Sequence[str] = (),
        keeping: Keeping | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not command:
            raise ConfigError("run: no command given; put it after `--`")
        require_program(command)
        if modules and not is_script(command):
            raise ConfigError(f"--preload needs a command of the form `python script.py …`, got: {' '.join(command)}")
        python, warm = [sys.executable, "-I", "-S"], list[str]()
        if modules:
            python, warm = [command[0]], [command[1], *modules]
        super().__init__([*python, str(SERVER), guard.__file__, *warm], say, keeping)
        self._command, self._modules = tuple(command), tuple(modules)
        self.name = "preload server" if modules else "fork server"

    @property
    def cannot_start(self) -> str:
        if not self._modules:
            return super().cannot_start
        return f"--preload: {self._command[0]} cannot import {', '.join(self._modules)}"

    def _request(self, env: Mapping[str, str], log: Path) -> dict[str, Any]:
        found = variables(env, inherited(), log.with_name("task.json"))
        return {"argv": self._command, "cwd": str(Path.cwd()), "env": found, "log": str(log)}
