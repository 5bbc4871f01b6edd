"""Runs a user's reward function in a process of its own: `child.py FILE NAME`.

It reads rollouts from standard input and writes answers to standard output, a JSON line each. First it writes the
version of the file it has loaded. It uses only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
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

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    source = Path(file).read_bytes()
    try:
        function = load(source, file, name)
    except BaseException as error:
        say({"error": error_line(error, file)})
        return
    from_record = getattr(function, "from_record", False) is True
    say({"version": hashlib.sha256(source).hexdigest()[:12], "from_record": from_record})
    rollouts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(rollouts,), daemon=True).start()
    while True:
        rollout = rollouts.get()
        try:
            say({"values": named(_answer(function, json.loads(rollout)), name)})
        except BaseException as error:
            say({"error": error_line(error, file)})


def load(source: bytes, file: str, name: str) -> Callable[[dict[str, Any]], Any]:
    """Run the file and return its function. Its imports find what lies beside it."""
    sys.path[0] = str(Path(file).parent)
    module = ModuleType(MODULE)
    module.__file__ = file
    sys.modules[MODULE] = module
    exec(compile(source, file, "exec"), module.__dict__)
    function = getattr(module, name, None)
    if not callable(function):
        raise LookupError(f"there is no function {name} in it")
    return function


def named(answer: Any, name: str) -> dict[str, float]:
    """Return the rewards in an answer by name: a number has the function's name. Raise TypeError."""
    if answer is None:
        return {}
    rewards = answer if isinstance(answer, dict) else {name: answer}
    rewards = {key: _plain(value) for key, value in rewards.items()}
    for key, value in rewards.items():
        if not isinstance(key, str) or not 0 < len(key) <= 200:
            raise TypeError(f"{key!r} is no name of a reward: 1 to 200 characters are needed")
        if not isinstance(value, numbers.Real) or value != value or abs(float(value)) == float("inf"):
            raise TypeError(f"{value!r:.100} is no reward: a finite number, a dict of numbers or None is needed")
    return {key: float(value) for key, value in rewards.items()}


def _plain(value: Any) -> Any:
    """A scalar of NumPy or torch, such as what `==` gives there, as Python's own."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def error_line(error: BaseException, file: str) -> str:
    """Return an error in one line, with the line of the file that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({Path(file).name}:{lines[-1]})" if lines else ""
    message = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"


def _answer(function: Callable[[dict[str, Any]], Any], rollout: dict[str, Any]) -> Any:
    answer = function(rollout)
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


def _read(rollouts: queue.SimpleQueue[bytes]) -> None:
    """Pass lines on. At their end the proxy is gone, and this process ends too, also within a slow function."""
    for line in sys.stdin.buffer:
        rollouts.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
