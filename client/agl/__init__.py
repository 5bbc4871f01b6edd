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
from ..emit import emit_note
from ..errors import NoRollout
from ..program import task
from ..scope import Rollout, current
from .operation import operation, plain

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
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def rewarded_later(*args: Any, **kwargs: Any) -> Any:
            value = await function(*args, **kwargs)
            await asyncio.to_thread(emit_reward, value)
            return value

        return rewarded_later

    @functools.wraps(function)
    def rewarded(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        emit_reward(value)
        return value

    return rewarded


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
        """Run the task in LIGHTNING_TASK, as a program under `lightning-proxy run … -- python agent.py`."""
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
