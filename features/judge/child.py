"""Runs a user's reward function in a process of its own: `child.py FILE NAME`.

It reads rollouts from standard input and writes answers to standard output, a JSON line each; the first one once the
file is loaded. It uses only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "lightning_reward_function"  # whatever the file is called, it hides no installed package


def main(file: str, name: str) -> None:
    """Load the function, then answer one rollout after the other until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is for the log

    def say(make: Callable[[], dict[str, float]]) -> bool:
        """Write the rewards, or the error in place of them; return whether there was none."""
        try:
            answer: dict[str, Any] = {"values": make()}
        except BaseException as error:
            answer = {"error": error_line(error, file)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        return "error" not in answer

    function: Any = None

    def load() -> dict[str, float]:
        nonlocal function
        sys.path[0] = str(Path(file).parent)  # where its imports look
        module = ModuleType(MODULE)
        module.__file__ = file
        sys.modules[MODULE] = module
        exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)
        function = getattr(module, name, None)
        if not callable(function):
            raise LookupError(f"there is no function {name} in it")
        return {}

    def reward() -> dict[str, float]:
        answer = function(json.loads(rollouts.get()))
        return named(asyncio.run(answer) if inspect.iscoroutine(answer) else answer, name)

    if say(load):
        rollouts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(rollouts,), daemon=True).start()
        while True:
            say(reward)


def named(answer: Any, name: str) -> dict[str, float]:
    """Return the rewards in an answer by name: a number has the function's name. Raise TypeError."""
    rewards = answer if isinstance(answer, dict) else {} if answer is None else {name: answer}
    found = {}
    for key, given in rewards.items():
        # Of NumPy or torch, as `==` gives there.
        is_scalar = getattr(given, "shape", None) == () and hasattr(given, "item")
        value = given.item() if is_scalar else given
        if not isinstance(key, str) or not 0 < len(key) <= 200:
            raise TypeError(f"{key!r} is not a reward name: 1 to 200 characters are needed")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise TypeError(f"{value!r:.100} is not a reward: a finite number, a dict of numbers or None is needed")
        found[key] = float(value)
    return found


def error_line(error: BaseException, file: str) -> str:
    """Return an error in one line, with the line of the file that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({Path(file).name}:{lines[-1]})" if lines else ""
    message = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"


def _read(rollouts: queue.SimpleQueue[bytes]) -> None:
    """Pass lines on. At their end the proxy is gone, and this process ends too, also within a slow function."""
    for line in sys.stdin.buffer:
        rollouts.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
