"""Splits requests and answers into atoms that are the same however a client writes them.

Fields that clients drop, add or reformat when they send an answer back make no difference. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..apis.tools import answered_call, call_arguments, dicts, is_call
from ..json_text import dumps

Json = dict[str, Any]


class Atom(NamedTuple):
    """One thing in a conversation. `kind` is text, call or result; `who` is a role or a tool call's id.

    `what`: the text, the call's arguments as JSON, or the text of the result.
    """

    kind: str
    who: str
    what: str


def request_atoms(request: Json) -> list[Atom]:
    """Return the conversation that a request of any recorded API sends."""
    atoms = []
    for name in ("system", "instructions"):
        atoms += _content("system", request.get(name))
    items = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(items, str):
        return [*atoms, *_content("user", items)]
    for item in items if isinstance(items, list) else ():
        atoms += _item(item) if isinstance(item, dict) else _content("user", item)
    return atoms


def answer_atoms(response: Json) -> Iterator[list[Atom]]:
    """Return, for each choice of an answer, the atoms that the agent may send back."""
    if isinstance(output := response.get("output"), list):
        yield [atom for item in output if isinstance(item, dict) for atom in _item(item)]
    elif isinstance(response.get("content"), list):
        yield _item({"role": "assistant", "content": response["content"]})
    else:
        choices = response.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            message = choice.get("message") if isinstance(choice, dict) else None
            if isinstance(message, dict):
                yield _item({"role": "assistant"} | message)
            elif isinstance(choice, dict) and isinstance(text := choice.get("text"), str):
                yield _content("assistant", text)  # of completions: it comes back within the next prompt


def _item(item: Json) -> list[Atom]:
    kind = item.get("type")
    if is_call(item):
        return [Atom("call", str(item.get("call_id")), call_arguments(item))]
    if isinstance(kind, str) and kind.endswith("_call_output"):
        return [Atom("result", str(answered_call(item)), _text(item.get("output")))]
    if kind not in (None, "message"):
        return []  # reasoning, say: some clients send it back, others do not
    role = str(item.get("role"))
    if role == "tool":
        return [Atom("result", str(item.get("tool_call_id")), _text(item.get("content")))]
    if role == "function":
        return [Atom("result", "", _text(item.get("content")))]
    called = item.get("function_call")  # of OpenAI's API before there were tools
    return [
        *_content("system" if role == "developer" else role, item.get("content")),
        *(_tool_call(str(call.get("id")), call.get("function")) for call in dicts(item.get("tool_calls"))),
        *([_tool_call("", called)] if isinstance(called, dict) else []),
    ]


def _tool_call(call_id: str, function: Any) -> Atom:
    return Atom("call", call_id, _arguments(function.get("arguments") if isinstance(function, dict) else ""))


def _content(role: str, content: Any) -> list[Atom]:
    """The atoms of a message's content. Neighbouring texts are one: some clients cut them up, others join them."""
    texts, others = [], []
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else ():
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            match part.get("type"):
                case "tool_use":
                    others.append(Atom("call", str(part.get("id")), _arguments(part.get("input"))))
                case "tool_result":
                    others.append(Atom("result", str(part.get("tool_use_id")), _text(part.get("content"))))
                case "thinking" | "redacted_thinking":
                    pass
                case _:
                    # Marks for the provider's cache move on from turn to turn.
                    what = {name: value for name, value in part.items() if name != "cache_control"}
                    texts.append(str(what.get("text", what)))
    text = "".join(texts).strip()
    return [*([Atom("text", role, text)] if text else []), *others]


def _text(content: Any) -> str:
    return "".join(what for _, _, what in _content("", content))


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)
