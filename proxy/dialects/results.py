"""Matches the tool results in a request to tool calls, by id and by place in the conversation. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.records import ToolCall, ToolResult
from ...core.tools import calls_in, conversation, is_answer, results_in, written_results
from .atoms import digest, item_atoms, same_arguments

Json = dict[str, Any]


def places_of(request: Json, before: Sequence[bytes] = (), known: int = 0) -> list[bytes]:
    """Return a digest of the conversation before each message, and one of the whole conversation.

    `before`: the places of a request with the same first `known` messages. Results and the model's texts are ignored,
    because some clients drop the text next to a call, shorten results, or send them late.
    """
    place = _after(b"", {"role": "system", "content": request.get("system", request.get("instructions"))})
    if isinstance(text := request.get("input"), str):
        place = _after(place, text)
    places = [*before[: known + 1]] if before and before[0] == place else [place]
    for item in conversation(request)[len(places) - 1 :]:
        places.append(_after(places[-1], item))
    return places


def _after(place: bytes, item: Any) -> bytes:
    for atom in item_atoms(item):
        if atom.kind == "call" or (atom.kind == "text" and atom.who != "assistant"):
            place = digest("", place, *atom.key[1:])
    return place


def after_call(place: bytes, name: str, arguments: str) -> bytes:
    """Return the place after a tool call, ignoring its id, because some clients write a new one."""
    return digest("", place, name, same_arguments(arguments))


class Brought(NamedTuple):
    """A result in a request, with what identifies the recorded call that it belongs to.

    `call`: that call, if the request repeats it. `place`: the place of the call, or else of the result. `answer`: the
    id of the response with the call, or of the call's item. `is_old`: an earlier request may have brought the result.
    """

    result: ToolResult
    call: ToolCall | None
    place: bytes
    answer: Any = None
    is_old: bool = False


@dataclass(slots=True)
class _Resent:
    """A call that a request repeats, or refers to by an item's id. The answer with the call begins at item `turn`."""

    turn: int
    call: ToolCall | None
    place: bytes
    item_id: str | None
    done: bool = False


def results(request: Json, places: Sequence[bytes], known: int) -> Iterator[Brought]:
    """Yield the results in the messages after the first `known`.

    A result belongs to the call with the same id that the request repeats before it. A result without an id belongs to
    the newest answer's first call that lacks a result. Example, where the model counts ids from 0 in every answer:

        recorded   user: go                       answer: call f(1), id f:0; call f(2), id f:0
        recorded   user: stop                     answer: call f(1), id f:0
        sent       user: go · call f(1), id f:0 · call f(2), id f:0 · result a, id f:0 · result b, id f:0

    Result a belongs to the call f(1) after "go", not to the one after "stop"; result b belongs to f(2).
    """
    items, previous = conversation(request), request.get("previous_response_id")
    newest_answer = next((i for i in range(len(items) - 1, -1, -1) if is_answer(items[i])), -1)
    waiting = defaultdict[str | None, deque[_Resent]](deque)  # by id, of the newest answer that has it; None: any
    answered, turn, after_calls = set[str | None](), 0, -1
    for i in range(_first_call(items, known), len(items)):
        for call, place, item_id in _resent(items[i], places[i]):
            turn, after_calls = turn if i <= after_calls else i, i + 1
            resent = _Resent(turn, call, place, item_id)
            for key in (None, (call and call.id) or ""):
                if waiting[key] and waiting[key][-1].turn != turn:
                    waiting[key].clear()
                waiting[key].append(resent)
        for result in results_in(items[i]):
            called, is_old = result.tool_call_id, not known or i < newest_answer
            if found := _first(waiting[called]) or _first(waiting[""]):
                found.done = True
                answered.add(called)
                brought = Brought(result, found.call, found.place, found.item_id, is_old)
            elif called is None or called in answered:
                continue
            else:
                brought = Brought(result, None, places[i], previous, is_old)
            if i >= known:
                yield brought
    before = max(known - 1, 0)
    for i, result in written_results(items[before:]):
        yield Brought(result, None, places[before + i])


def _first(calls: deque[_Resent]) -> _Resent | None:
    """Return the first call that has no result yet."""
    while calls and calls[0].done:
        calls.popleft()
    return calls[0] if calls else None


def _resent(item: Any, place: bytes) -> Iterator[tuple[ToolCall | None, bytes, str | None]]:
    """An item's calls, as (call, place, None), or the call that it refers to by id, as (None, place, item id)."""
    for call in calls_in(item):
        yield call, place, None
        place = after_call(place, call.name, call.arguments)
    referred = item.get("id") if isinstance(item, dict) and item.get("type") == "item_reference" else None
    if isinstance(referred, str) and not referred.startswith(("msg_", "rs_")):
        yield None, place, referred


def _first_call(items: Sequence[Any], known: int) -> int:
    """The index to begin at: 0 if a new result may belong to a call in an earlier item, else `known`."""
    wanted, made = set[str | None](), set[str | None]()
    for item in items[known:]:
        wanted |= {result.tool_call_id for result in results_in(item)} - made
        made |= {each for call in calls_in(item) for each in (call.id, None)}
    return 0 if wanted or (known and any(calls_in(items[known - 1]))) else known
