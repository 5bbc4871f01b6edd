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
from typing import Any

from .. import scope
from ..program import NoRollout, task
from ..scope import Rollout, current, emit_action, emit_note

__all__ = [
    "LLM", "LitAgent", "PromptTemplate", "emit_annotation", "emit_exception", "emit_message", "emit_object",
    "emit_reward", "llm_rollout", "operation", "prompt_rollout", "rollout",
]  # fmt: skip

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
    values = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
    primary = primary_key if isinstance(reward, Mapping) else "reward"
    if primary not in values:
        raise ValueError(f"primary_key must be one of {list(values)}, got: {primary_key!r}")
    for name, value in values.items():
        if not isinstance(value, Real):
            raise TypeError(f"the reward {name} must be a number, got: {type(value)}")
    if not propagate:
        return
    here, comment = current(), json.dumps(plain(attributes)) if attributes else None
    main = values.pop(primary)
    for name, value in values.items():
        here.reward(value, name=name, final=False, comment=comment, source="agl")
    here.reward(main, final=not scope.is_entered(), comment=comment, source="agl")


def emit_message(message: str, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Keep a text with the rollout."""
    _note("message", message, attributes, propagate)


def emit_object(object: Any, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Keep any JSON with the rollout."""
    _note("object", object, attributes, propagate)


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> None:
    """Keep names and their values with the rollout."""
    _note("annotation", annotation, None, propagate)


def emit_exception(exception: BaseException, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Keep an exception and its traceback with the rollout."""
    details = {
        "exception.type": type(exception).__name__,
        "exception.message": str(exception),
        "exception.stacktrace": "".join(traceback.format_exception(exception)),
    }
    _note("exception", details, attributes, propagate)


def _note(name: str, value: Any, attributes: Attributes | None, propagate: bool) -> None:
    if propagate:
        emit_note(plain({"value": value, "attributes": attributes} if attributes else value), name=name)


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
        self.is_async = inspect.iscoroutinefunction(function)
        functools.update_wrapper(self, function)

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


def rollout(function: Function | None = None, **_: Any) -> Any:
    """`@rollout`, `@llm_rollout`, `@llm_rollout(…)` and `@prompt_rollout` make a function an agent."""
    return LitAgent if function is None else LitAgent(function)


llm_rollout = prompt_rollout = rollout


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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._propagate:
            return
        arguments = self._input | ({"attributes": self._attributes} if self._attributes else {})
        result = self._output if error is None else f"{type(error).__name__}: {error}"
        emit_action(self._name or "operation", plain(arguments), plain(result), is_error=error is not None)

    def __call__(self, function: Function) -> Function:
        signature = inspect.signature(function)

        def begun(args: Any, kwargs: Any) -> Operation:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            one = Operation(self._name or function.__name__, self._attributes, self._propagate)
            one._input = dict(bound.arguments)
            return one

        @functools.wraps(function)
        def now(*args: Any, **kwargs: Any) -> Any:
            with begun(args, kwargs) as one:
                one.set_output(result := function(*args, **kwargs))
            return result

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            one = begun(args, kwargs)
            try:
                one.set_output(result := await function(*args, **kwargs))
            except Exception as error:
                await asyncio.to_thread(one.__exit__, None, error, None)
                raise
            await asyncio.to_thread(one.__exit__, None, None, None)
            return result

        return later if inspect.iscoroutinefunction(function) else now


def plain(value: Any) -> Any:
    """The value as JSON. What JSON cannot hold becomes text."""
    try:
        return json.loads(json.dumps(value, default=repr, allow_nan=False))
    except ValueError:  # NaN or infinity, or a value that contains itself
        return repr(value)
