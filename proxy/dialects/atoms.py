"""Splits requests and answers into atoms that are the same however a client writes them.

Fields that clients drop, add or reformat when they send an answer back make no difference. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from ...core.tools import answered_call, call_arguments, call_name, called_tool, dicts, is_call

Json = dict[str, Any]

FENCE = "```"


class Atom(NamedTuple):
    """One text, call or result in a conversation. `kind` says which; `who` is a role or a tool call's id.

    `what`: the text, the call's arguments as JSON, or the text of the result. `name`: of the function that is called.
    """

    kind: str
    who: str
    what: str
    name: str = ""


def request_atoms(request: Json) -> list[Atom]:
    """Return the atoms of the conversation in a request of any recorded API."""
    atoms = []
    for name in ("system", "instructions"):
        atoms += _content("system", request.get(name))
    items = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(items, str):
        return [*atoms, *_content("user", items)]
    for item in items if isinstance(items, list) else ():
        atoms += item_atoms(item)
    return atoms


def answer_atoms(response: Json) -> Iterator[list[Atom]]:
    """Return, for each choice of an answer, the atoms that the agent may send back."""
    if isinstance(output := response.get("output"), list):
        yield [atom for item in output if isinstance(item, dict) for atom in item_atoms(item)]
    elif isinstance(response.get("content"), list):
        yield item_atoms({"role": "assistant", "content": response["content"]})
    else:
        choices = response.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            message = choice.get("message") if isinstance(choice, dict) else None
            if isinstance(message, dict):
                yield item_atoms({"role": "assistant"} | message)
            elif isinstance(choice, dict) and isinstance(text := choice.get("text"), str):
                yield _content("assistant", text)  # of completions: it comes back within the next prompt


def item_atoms(item: Any) -> list[Atom]:
    """Return the atoms of one message, or of one item of Responses."""
    if not isinstance(item, dict):
        return _content("user", item)
    kind = item.get("type")
    if is_call(item):
        return [Atom("call", _id(item.get("call_id")), call_arguments(item), call_name(item))]
    if isinstance(kind, str) and kind.endswith("_call_output"):
        return [Atom("result", _id(answered_call(item)), _text(item.get("output")))]
    if kind not in (None, "message"):
        return []  # reasoning, say: some clients send it back, others do not
    role = str(item.get("role"))
    if role == "tool":
        return [Atom("result", _id(item.get("tool_call_id")), _text(item.get("content")))]
    if role == "function":
        return [Atom("result", "", _text(item.get("content")))]
    called = item.get("function_call")  # of OpenAI's API before there were tools
    return [
        *_content("system" if role == "developer" else role, item.get("content")),
        *(_tool_call(_id(call.get("id")), called_tool(call)) for call in dicts(item.get("tool_calls"))),
        *([_tool_call("", called)] if isinstance(called, dict) else []),
    ]


def _tool_call(call_id: str, function: Any) -> Atom:
    function = function if isinstance(function, dict) else {}
    return Atom("call", call_id, call_arguments(function), _id(function.get("name")))


def _id(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _content(role: str, content: Any) -> list[Atom]:
    """The atoms of a message's content. Neighbouring texts are one: some clients cut them up, others join them."""
    texts, others = [], []
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else ():
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            match part.get("type"):
                case "tool_use":
                    name = _id(part.get("name"))
                    others.append(Atom("call", _id(part.get("id")), call_arguments(part), name))
                case "tool_result":
                    others.append(Atom("result", _id(part.get("tool_use_id")), _text(part.get("content"))))
                case "thinking" | "redacted_thinking":
                    pass
                case _:
                    # Marks for the provider's cache move on from turn to turn.
                    what = {name: value for name, value in part.items() if name != "cache_control"}
                    texts.append(str(what.get("text", what)))
    text = "".join(texts).strip()
    return [*([Atom("text", role, text)] if text else []), *others]


def _text(content: Any) -> str:
    return "".join(atom.what for atom in _content("", content))


def same_arguments(text: str) -> str:
    """Return a call's arguments in a canonical form, however a client writes them; none are an empty object."""
    text = text.strip()
    return "{}" if not text or parsed(text) == {} else same_json(text) or text


def same_json(text: str) -> str | None:
    """Return the JSON of a text in a canonical form; None if it is no object and no list."""
    text = text.strip()
    if text.startswith(FENCE) and text.endswith(FENCE) and len(text) >= 2 * len(FENCE):
        text = text[len(FENCE) : -len(FENCE)]
        text = text[4 * (text[:4].lower() == "json") :].strip()
    value = parsed(text) if text[:1] in ("{", "[") else None
    if not isinstance(value, dict | list) or not value:
        return None
    try:
        return orjson.dumps(_even(value), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONEncodeError, RecursionError):
        return None


def parsed(text: str) -> Any:
    """Return the value of a text that is JSON, or else the text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _even(value: Any) -> Any:
    """The value with 3.0 as 3: a client that knows a field to be a float writes it so."""
    if isinstance(value, dict):
        return {name: _even(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_even(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
