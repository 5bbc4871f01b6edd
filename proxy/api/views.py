"""Turns records into the control API's JSON, where its fields differ from the record's. Pure.

`transitions` makes a rollout the transitions of a Markov decision process; `among_decisions` leaves out calls that are
no decisions, and moves text that others share with them. `words_view` has the first words of question and answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise
from typing import Any

from ...core.config.section import feature_sections
from ...core.json_text import loads_or_none
from ...core.records import Event, ModelCall, PolicyVersion, Reward, Rollout, ToolCall, Transition
from ...core.tools import dicts
from ...store.reports import CallWithCredit, Summary, Words
from ...store.requests import begun
from ..dialects.transcript import called, text
from .answers import Call

_OF_CALL = tuple(field.name for field in fields(Call) if field.name != "choices")

# What of a request the model is shown, in any of the recorded APIs.
_SHOWN = ("system", "instructions", "messages", "prompt", "input", "previous_response_id", "tools")

Of = dict[str, Any] | None

WORDS = 200  # characters


def record_view(record: Any) -> dict[str, Any]:
    """Return a record's fields by name. Unlike `asdict` it copies nothing in them: they may be megabytes."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def rollout_detail(
    rollout: Rollout, calls: Sequence[ModelCall], rewards: Sequence[Reward], events: Sequence[Event] = ()
) -> dict[str, Any]:
    """Return a rollout with its calls and events in order and every reward ever posted for it."""
    return record_view(rollout) | {
        "call_count": rollout.calls,
        "calls": [call_view(call) | more for call, more in zip(calls, call_fields(calls), strict=True)],
        "events": [record_view(event) for event in events],
        "rewards": [reward_view(reward) for reward in rewards],
    }


def call_fields(calls: Sequence[ModelCall]) -> list[dict[str, Any]]:
    """Return what features say of each of a rollout's calls, which are all of it, in order."""
    found: list[dict[str, Any]] = [{} for _ in calls]
    for feature in feature_sections().values():
        for fields_of_call, more in zip(found, feature.call_fields(calls), strict=True):
            fields_of_call.update(more)
    return found


def call_view(call: ModelCall) -> dict[str, Any]:
    """Return a call without its rollout. It has `choices` only if there are several."""
    view = {name: getattr(call, name) for name in _OF_CALL}
    view["tool_calls"] = [asdict(tool) for tool in call.tool_calls]
    if len(call.choices) > 1:
        view["choices"] = [asdict(choice) for choice in call.choices]
    return view


def reward_view(reward: Reward) -> dict[str, Any]:
    """Return a reward as JSON; its value has the name `reward`."""
    view = record_view(reward)
    view["reward"] = view.pop("value")
    del view["retrain"]
    return view


def credit_view(call: CallWithCredit) -> dict[str, Any]:
    """Return how a call was trained as JSON; its return has the name `return`."""
    view = record_view(call)
    view["return"] = view.pop("returned")
    return view


def version_view(version: PolicyVersion, live: int, obstacle: str | None = None) -> dict[str, Any]:
    """Return a policy version, whether it is the live one, and whether it can be made live: if not, the `obstacle`."""
    facts = {"live": version.version == live, "promotable": obstacle is None, "obstacle": obstacle}
    return record_view(version) | facts


def transitions(rollout: Rollout, calls: Sequence[ModelCall], events: Sequence[Event] = ()) -> list[Transition]:
    """Return one transition for each call, and one for each tool call whose result came back.

    A state is what the model was shown, an action its entire answer. The last call's transition carries the rollout's
    own reward. A request that the client sent again counts once: as the last of its calls. An action that the agent
    posted is a tool transition without a call; its state is the one that the same agent posted last.

    Of short calls (`ModelCall.request_of`) the states are short, too.
    """
    answered = among_decisions(calls)
    following = {call.call_id: after for call, after in pairwise(answered)}
    made: list[Transition] = []
    states: dict[str | None, Any] = {}
    steps: list[Event | ModelCall] = [*events, *answered]
    for step in sorted(steps, key=lambda step: (step.seq, isinstance(step, ModelCall))):
        if isinstance(step, ModelCall):
            made += _call_transitions(len(made), step, following.get(step.call_id), rollout)
        elif step.kind == "state":
            states[step.agent] = step.value
        elif step.kind == "action":
            made.append(_action_transition(len(made), step, states.get(step.agent)))
    if made and rollout.status != "running":
        made[-1] = replace(made[-1], done=True)
    return made


def _call_transitions(t: int, call: ModelCall, after: ModelCall | None, rollout: Rollout) -> list[Transition]:
    reward = (call.reward or 0.0) + (0.0 if after else rollout.own_reward or 0.0)
    action = {"message": message_of(call), "token_ids": call.response_token_ids, "finish_reason": call.finish_reason}
    following = _state(after) if after else None
    own = Transition(t, "llm", call.agent, call.call_id, _state(call), action, reward, following, False)
    with_results = [tool for tool in call.tool_calls if tool.result is not None]
    return [own, *(_tool_transition(t + 1 + i, call, tool) for i, tool in enumerate(with_results))]


def _action_transition(t: int, event: Event, state: Any) -> Transition:
    action = {"id": None, "name": event.name, "arguments": event.arguments}
    observation = {"result": event.result, "is_error": event.is_error}
    return Transition(t, "tool", event.agent, None, state, action, 0.0, observation, False)


def message_of(call: ModelCall) -> Any:
    """Return the answer: the first choice's message (chat), its text (completions), or another API's response."""
    return answer_in(call.response)


def answer_in(response: Any) -> Any:
    """Return what `message_of` returns, of a response."""
    fields = response if isinstance(response, dict) else {}
    first = next(iter(dicts(fields.get("choices"))), {})
    return first.get("message", first.get("text", response))


def _state(call: ModelCall) -> dict[str, Any]:
    shown = {key: call.request[key] for key in _SHOWN if key in call.request}
    shared = {key: n for key, n in (call.request_of or {}).items() if key in ("call_id", *_SHOWN)}
    state = shown | {"prompt_token_ids": call.prompt_token_ids}
    state |= {"request_of": shared} if len(shared) > 1 else {}
    return state | ({"prompt_of": call.prompt_of} if call.prompt_of else {})


def _tool_transition(t: int, call: ModelCall, tool: ToolCall) -> Transition:
    action = {"id": tool.id, "name": tool.name, "arguments": tool.arguments}
    observation = {"result": tool.result, "is_error": tool.is_error}
    return Transition(t, "tool", call.agent, call.call_id, message_of(call), action, 0.0, observation, False)


def among_decisions(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls that are decisions. Short ones share nothing but with each other then."""
    left_out = {call.call_id: call for call in calls if not call.is_decision}
    return [_shortened(call, left_out) for call in calls if call.is_decision]


def _shortened(call: ModelCall, left_out: dict[str, ModelCall]) -> ModelCall:
    while call.request_of and (parent := left_out.get(call.request_of["call_id"])):
        request, request_of = _request(call, parent)
        call = replace(call, request=request, request_of=request_of)
    while call.prompt_of and (parent := left_out.get(call.prompt_of["call_id"])):
        prompt, prompt_of = _prompt(call, call.prompt_of["tokens"], parent)
        call = replace(call, prompt_token_ids=prompt, prompt_of=prompt_of)
    return call


def _request(call: ModelCall, parent: ModelCall) -> tuple[dict[str, Any], Of]:
    """The request as its difference from the request that its parent is stored against."""
    request, before, shared = dict(call.request), parent.request_of or {}, {}
    for name, count in (call.request_of or {}).items():
        if name == "call_id":
            continue
        most = before.get(name, 0)
        if count > most:
            request[name] = begun(parent.request[name], count - most, call.request[name])
        if most:
            shared[name] = min(count, most)
    return request, {"call_id": before["call_id"], **shared} if shared else None


def _prompt(call: ModelCall, count: int, parent: ModelCall) -> tuple[tuple[int, ...], Of]:
    most = parent.prompt_of["tokens"] if parent.prompt_of else 0
    prompt = parent.row_token_ids[: max(0, count - most)] + call.prompt_token_ids
    return prompt, parent.prompt_of and parent.prompt_of | {"tokens": min(count, most)}


def words_view(summary: Summary | None) -> dict[str, Any]:
    """Return the fields that a rollout has in a list with `words`."""
    if summary is None:
        return dict.fromkeys(("question", "answer", "model", "key", "latency_ms", "last_call"))
    return {
        **summary.words._asdict(),
        "model": summary.model,
        "key": summary.key_name,
        "latency_ms": summary.latency_ms,
        "last_call": summary.last_call,
    }


def words_in(request: str | None, response: str | None) -> Words:
    """Return the first words of a first request and a last answer, which are JSON as it is stored."""
    stored = loads_or_none(request) if request else None
    asked = stored.get("new") if isinstance(stored, dict) else None
    return Words(_first_words(_question(asked)), _first_words(_answer(loads_or_none(response))))


def _question(request: Any) -> str:
    """The text of the last user's message of a request of any API."""
    if not isinstance(request, dict):
        return ""
    asked = next((request[name] for name in ("messages", "input", "prompt") if request.get(name)), "")
    if isinstance(asked, str):
        return asked
    messages = dicts(asked)
    users = [message for message in messages if message.get("role") == "user"]
    return text((users or messages or [{}])[-1])


def _answer(response: Any) -> str:
    """The text of an answer of any API, or the tools that it calls."""
    found = answer_in(response)
    if isinstance(found, str):
        return found
    messages = dicts(found.get("output")) or [found] if isinstance(found, dict) else []
    said = "\n".join(filter(None, map(text, messages)))
    tools = [one for message in messages for one in (*called(message), *_calls(message))]
    return said if not tools else f"{said} {', '.join(str(tool.get('name')) for tool in tools)}(…)"


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of Messages and Responses."""
    kinds = ("tool_use", "function_call")
    parts = [message, *dicts(message.get("content"))]
    return [part for part in parts if part.get("type") in kinds]


def _first_words(words: str) -> str | None:
    return " ".join(words[: 4 * WORDS].split())[:WORDS] or None
