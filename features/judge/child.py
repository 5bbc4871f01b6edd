"""Runs a user's reward function (`child.py FILE NAME`). It prints a line once loaded, then an answer per rollout."""

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
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "lightning_reward_function"  # so that the file hides no installed package, whatever its name


def main(file: str, name: str) -> None:
    """Load the function, then answer one rollout after another until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is for the log
    rollouts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    function: Any = None
    while True:
        try:
            if function is None:
                function, given = loaded(file, name), None
                threading.Thread(target=_read, args=(rollouts,), daemon=True).start()
            else:
                given = function(json.loads(rollouts.get()))
            answer: Any = {"values": named(asyncio.run(given) if inspect.iscoroutine(given) else given, name)}
        except BaseException as error:
            answer = {"error": error_line(error, file)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if function is None:
            return


def loaded(file: str, name: str) -> Any:
    """Return the function. Raises LookupError if it does not exist, or what its file raises."""
    sys.path[0] = str(Path(file).parent)  # where its imports look
    module = sys.modules[MODULE] = ModuleType(MODULE)
    module.__file__ = file
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)
    function = getattr(module, name, None)
    if not callable(function):
        raise LookupError(f"the file has no function {name}")
    return function


def named(answer: Any, name: str) -> dict[str, float]:
    """Return a function's answer (a number, a dict or None) as rewards by name. Raises TypeError for anything else."""
    rewards = answer if isinstance(answer, dict) else {} if answer is None else {name: answer}
    found = {}
    for key, given in rewards.items():
        # A scalar of NumPy or torch, which `==` returns there.
        is_scalar = getattr(given, "shape", None) == () and hasattr(given, "item")
        value = given.item() if is_scalar else given
        if not isinstance(key, str) or not 0 < len(key) <= 200:
            raise TypeError(f"{key!r} is not a reward name: a string of 1 to 200 characters is needed")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise TypeError(f"reward {key!r}: {value!r:.80} is not a finite number; return one, a dict of them or None")
        found[key] = float(value)
    return found


def error_line(error: BaseException, file: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({Path(file).name}:{lines[-1]})" if lines else ""
    message = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"


def _read(rollouts: queue.SimpleQueue[bytes]) -> None:
    """Queue the lines of standard input. When it ends, end this process at once, even if the function is running."""
    for line in sys.stdin.buffer:
        rollouts.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
