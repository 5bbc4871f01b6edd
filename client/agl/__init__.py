"""Runs agents written for Agent Lightning 0.2 and 0.3, with `from lightning_proxy.client import agl`.

That line takes the place of `import agentlightning as agl`. Of its spans, rewards become rewards, operations become
actions and all others notes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Real
from types import TracebackType
from typing import Any

from .. import scope
from ..errors import NoRollout
from ..program import task
from ..scope import Rollout, current, emit_action, emit_note

__all__ = [
    "LLM",
    "LitAgent",
    "PromptTemplate",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "reward",
    "rollout",
]

Function = Callable[..., Any]
Attributes = Mapping[str, Any]


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Attributes | None = None,
    propagate: bool = True,
) -> None:
    """Reward the rollout. The newest reward counts. Of several dimensions, the primary one is named `reward`.

    Within a rollout's scope, such as an `@rollout` function, the end of the scope completes the rollout.
    """
    values = _dimensions(reward, primary_key)
    if not propagate:
        return
    comment = None if not attributes else json.dumps(plain(attributes))
    here = current()
    others = [pair for pair in values.items() if pair[0] != "reward"]
    for name, value in others:
        here.reward(value, name=name, final=False, comment=comment, source="agl")
    here.reward(values["reward"], final=not scope.is_entered(), comment=comment, source="agl")


def _dimensions(reward: float | Mapping[str, float], primary_key: str | None) -> dict[str, float]:
    if not isinstance(reward, Mapping):
        if not isinstance(reward, Real):
            raise TypeError(f"Reward must be a number, got: {type(reward)}")
        return {"reward": float(reward)}
    for name, value in reward.items():
        if not isinstance(value, Real):
            raise ValueError(f"Reward value must be a number, got: {type(value)} for key {name}")
    if primary_key is None or primary_key not in reward:
        raise ValueError(f"primary_key must be one of {list(reward)}, got: {primary_key!r}")
    others = {name: float(value) for name, value in reward.items() if name != primary_key}
    return others | {"reward": float(reward[primary_key])}


def emit_message(message: str, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Keep a text with the rollout."""
    if not isinstance(message, str):
        raise TypeError(f"Message must be a string, got: {type(message)}.")
    _note("message", message, attributes, propagate)


def emit_object(object: Any, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Keep any JSON with the rollout."""
    try:
        json.dumps(object)
    except (TypeError, ValueError):
        raise RuntimeError(f"Object must be JSON serializable, got: {type(object)}.") from None
    _note("object", object, attributes, propagate)


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> None:
    """Keep names and their values with the rollout."""
    _note("annotation", dict(annotation), None, propagate)


def emit_exception(exception: BaseException, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Keep an exception and its traceback with the rollout."""
    if not isinstance(exception, BaseException):
        raise TypeError(f"Expected a BaseException instance, got: {type(exception)}.")
    details = {
        "exception.type": type(exception).__name__,
        "exception.message": str(exception),
        "exception.stacktrace": "".join(traceback.format_exception(exception)),
    }
    _note("exception", details, attributes, propagate)


def _note(name: str, value: Any, attributes: Attributes | None, propagate: bool) -> None:
    if propagate:
        emit_note(plain({"value": value, "attributes": attributes} if attributes else value), name=name)


def reward(function: Function) -> Function:
    """Emit what the function returns as a reward (`emit_reward` is the newer way)."""

    def done(args: Any, kwargs: Any, value: Any, error: BaseException | None) -> None:
        if error is None:
            emit_reward(value)

    return _around(function, done)


def _around(function: Function, done: Function) -> Function:
    """The function, which tells `done` its arguments, and its result or its error."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            try:
                result = await function(*args, **kwargs)
            except Exception as error:
                await asyncio.to_thread(done, args, kwargs, None, error)
                raise
            await asyncio.to_thread(done, args, kwargs, result, None)
            return result

        return later

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            done(args, kwargs, None, error)
            raise
        done(args, kwargs, result, None)
        return result

    return now


@dataclass(frozen=True, slots=True)
class LLM:
    """The endpoint of the agent's model."""

    endpoint: str
    model: str = "policy"
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = field(default_factory=dict)

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        return self.endpoint


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text with places for values, as Python's `str.format` has them."""

    template: str
    engine: str = "f-string"

    def format(self, **values: Any) -> str:
        """Return the text with its values. NotImplementedError for another engine than f-string."""
        if self.engine != "f-string":
            raise NotImplementedError(f"a template of the engine {self.engine!r} cannot be filled in here")
        return self.template.format(**values)


class LitAgent:
    """A function of a task and of `llm`, `prompt_template` or both, and of `rollout` if it likes.

    Each call of it is a rollout. A number that it returns is the rollout's reward; an exception fails it. The prompt
    template is the proxy's prompt of that name.
    """

    def __init__(self, function: Function) -> None:
        names = list(inspect.signature(function).parameters)
        if names[:1] != ["task"] or not {"llm", "prompt_template"} & {*names}:
            raise NotImplementedError(
                f"{getattr(function, '__name__', function)}({', '.join(names)}): only functions of task and of llm, "
                "prompt_template or both, and of rollout, can be run"
            )
        self._function, self._wanted = function, {*names}
        functools.update_wrapper(self, function)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def __call__(self, task: Any, llm: LLM | None = None, rollout: Rollout | None = None) -> Any:
        """Run it in the open scope, or in a new one. Arguments that are not given are made."""
        return self._run_async(task, llm, rollout) if self.is_async else self._run(task, llm, rollout)

    def main(self) -> None:
        """Run the task in LIGHTNING_TASK, as a program under `lightning-proxy run --tasks FILE -- python agent.py`."""
        try:
            given = task()
        except NoRollout as error:
            raise SystemExit(str(error)) from None
        found = self(given)
        if self.is_async:
            asyncio.run(found)

    def _run(self, task: Any, llm: LLM | None, rollout: Rollout | None) -> Any:
        with _scope() as here:
            result = self._function(task, **self._resources(here, llm, rollout))
            _reward(here, result)
            return result

    async def _run_async(self, task: Any, llm: LLM | None, rollout: Rollout | None) -> Any:
        async with _scope() as here:
            result = await self._function(task, **self._resources(here, llm, rollout))
            await asyncio.to_thread(_reward, here, result)
            return result

    def _resources(self, here: Rollout, llm: LLM | None, rollout: Rollout | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if "llm" in self._wanted:
            found["llm"] = llm or LLM(here.base_url, api_key=here.environ["OPENAI_API_KEY"])
        if "prompt_template" in self._wanted:
            found["prompt_template"] = PromptTemplate(here.prompt("prompt_template"))
        return found | ({"rollout": rollout or here} if "rollout" in self._wanted else {})


def _scope() -> Any:
    """The open scope, which somebody else ends, or a new one."""
    return nullcontext(current()) if scope.is_entered() else scope.rollout()


def _reward(here: Rollout, result: Any) -> None:
    if isinstance(result, Real):
        here.reward(float(result), source="agl")


def rollout(function: Function) -> LitAgent:
    """`@rollout`: make a function an agent."""
    return LitAgent(function)


def llm_rollout(function: Function | None = None, *, strip_proxy: bool = True) -> Any:
    """`@llm_rollout` or `@llm_rollout(…)`: the same as `@rollout`."""
    return LitAgent if function is None else LitAgent(function)


def prompt_rollout(function: Function | None = None) -> Any:
    """`@prompt_rollout`: the same as `@rollout`."""
    return LitAgent if function is None else LitAgent(function)


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
        name, signature = self._name or function.__name__, inspect.signature(function)

        def done(args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            Operation(name, self._attributes, self._propagate)._emit(bound.arguments, result, error)

        return _around(function, done)

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
