"""Agent Lightning's `operation`: records a tool, a retriever or a step of the agent as an action."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from ..emit import emit_action

Function = Callable[..., Any]
Attributes = Mapping[str, Any]


def operation(
    function: Function | None = None, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> Any:
    """Record an action, by `@operation`, `@operation(name=…)` or `with operation(name=…) as op:`."""
    found = Operation(name, attributes, propagate)
    return found if function is None else found(function)


class Operation:
    """An action that is recorded when it ends. `attributes` are kept with its arguments."""

    def __init__(self, name: str | None, attributes: Attributes, propagate: bool = True) -> None:
        self._name, self._attributes, self._propagate = name, attributes, propagate
        self._input: dict[str, Any] = {}
        self._output: Any = None

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        self._input |= {"args": list(args)} if args else {}
        self._input |= kwargs

    def set_output(self, output: Any) -> None:
        self._output = output

    def __enter__(self) -> Operation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._emit(self._input, self._output, error)

    def __call__(self, function: Function) -> Function:
        name = self._name or function.__name__
        signature = inspect.signature(function)

        def begun(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
            mine = Operation(name, self._attributes, self._propagate)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            mine.set_input(**bound.arguments)
            return mine

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def recorded_async(*args: Any, **kwargs: Any) -> Any:
                mine = begun(args, kwargs)
                try:
                    result = await function(*args, **kwargs)
                except Exception as error:
                    await asyncio.to_thread(mine._emit, mine._input, None, error)
                    raise
                await asyncio.to_thread(mine._emit, mine._input, result, None)
                return result

            return recorded_async

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with begun(args, kwargs) as mine:
                result = function(*args, **kwargs)
                mine.set_output(result)
            return result

        return recorded

    def _emit(self, given: Attributes, result: Any, error: BaseException | None) -> None:
        if not self._propagate:
            return
        arguments = {**given, **({"attributes": self._attributes} if self._attributes else {})}
        result = result if error is None else f"{type(error).__name__}: {error}"
        emit_action(self._name or "operation", plain(arguments), plain(result), is_error=error is not None)


def plain(value: Any) -> Any:
    """The value as JSON. What JSON cannot hold becomes text."""
    try:
        return json.loads(json.dumps(value, default=repr, allow_nan=False))
    except ValueError:  # NaN or infinity, or a value that contains itself
        return repr(value)
