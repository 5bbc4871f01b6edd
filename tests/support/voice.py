"""What vLLM 0.32 answers, shaped by what it is asked for: the fields that are null without asking, and the bytes."""

from __future__ import annotations

import json
from typing import Any

import orjson

Json = dict[str, Any]

TEXT = ["h", "é", " 😀", "\n", '"', "\u2028", "ok"]
OBJECT = ['{"a":', " true", "}"]
USAGE = {"prompt_tokens": 3, "total_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": None}
PROMPT = [1, 2, 3]


def dumps(value: Any) -> bytes:
    """As vLLM's server encodes whole answers."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def sse(value: Any) -> bytes:
    """As it encodes chunks: other digits for small floats."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def chat(body: Json) -> Json:
    """The whole answer of /v1/chat/completions."""
    choices = []
    for index in range(body.get("n") or 1):
        message = {"role": "assistant", "content": "".join(_pieces(body)), "refusal": None, "tool_calls": _tools(body)}
        if message["tool_calls"]:
            message["content"] = None
        finish = "tool_calls" if message["tool_calls"] else "stop"
        choice = {"index": index, "message": message, "logprobs": _logprobs(body, _pieces(body))}
        choices.append(choice | {"finish_reason": finish, "stop_reason": None, "token_ids": _ids(body, index)})
    top = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "base", "choices": choices}
    ids = PROMPT if body.get("return_token_ids") else None
    top |= {"unknown": {"kept": [1, None, 2.5]}}
    return top | {"usage": USAGE, "prompt_logprobs": None, "prompt_token_ids": ids, "kv_transfer_params": None}


def chat_stream(body: Json) -> list[bytes]:
    """The frames of a streamed /v1/chat/completions, [DONE] included."""
    top = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "base"}
    ids, n = body.get("return_token_ids"), body.get("n") or 1
    chunks: list[Json] = []
    for index in range(n):
        role = _choice(index, {"role": "assistant", "content": ""}, None, None)
        chunks.append(top | {"choices": [role], "prompt_token_ids": PROMPT if ids else None})
    for index in range(n):
        deltas = _tool_deltas(body) or [{"content": piece} for piece in _pieces(body)]
        for i, delta in enumerate(deltas):
            if delta == {} and not (ids or body.get("logprobs")):
                continue  # the parser holds text back
            last = i == len(deltas) - 1
            finish = ("tool_calls" if body.get("tools") else "stop") if last else None
            choice = _choice(index, delta, _logprobs(body, [f"t{i}"]), finish, [100 * index + i] if ids else None)
            chunks.append(top | {"choices": [choice]})
    if (body.get("stream_options") or {}).get("include_usage"):
        if body["stream_options"].get("continuous_usage_stats"):
            chunks = [chunk | {"usage": USAGE} for chunk in chunks]
        chunks.append(top | {"choices": [], "usage": USAGE, "system_fingerprint": "fp"})
    else:
        chunks[-1] |= {"system_fingerprint": "fp"}
    return [*map(sse, chunks), b"data: [DONE]\n\n"]


def completions(body: Json) -> Json:
    choices = []
    for index in range(body.get("n") or 1):
        logprobs = None
        if body.get("logprobs") is not None:
            logprobs = {"tokens": TEXT, "token_logprobs": [-0.5 - i for i in range(len(TEXT))], "text_offset": [0]}
        choice = {"index": index, "text": "".join(TEXT), "logprobs": logprobs, "finish_reason": "length"}
        ids = bool(body.get("return_token_ids"))
        choice |= {"stop_reason": None, "token_ids": _ids(body, index), "prompt_token_ids": PROMPT if ids else None}
        choices.append(choice)
    top = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "base", "choices": choices}
    return top | {"usage": USAGE}


def completions_stream(body: Json) -> list[bytes]:
    top = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "base"}
    chunks: list[Json] = []
    for i, piece in enumerate(TEXT):
        logprobs = None if body.get("logprobs") is None else {"tokens": [piece], "token_logprobs": [-0.25 - i]}
        choice = {"index": 0, "text": piece, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}
        ids = bool(body.get("return_token_ids"))
        choice |= {"prompt_token_ids": PROMPT if ids and i == 0 else None, "token_ids": [i] if ids else None}
        chunks.append(top | {"choices": [choice], "usage": None})
    chunks[-1]["choices"][0]["finish_reason"] = "length"
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(top | {"choices": [], "usage": USAGE})
    return [*map(sse, chunks), b"data: [DONE]\n\n"]


def responses(body: Json) -> Json:
    asked = "message.output_text.logprobs" in (body.get("include") or [])
    logprobs = [{"token": t, "logprob": -0.5, "bytes": list(t.encode())} for t in TEXT] if asked else None
    part = {"annotations": [], "text": "".join(TEXT), "type": "output_text", "logprobs": logprobs}
    item = {"id": "msg_1", "content": [part], "role": "assistant", "status": "completed", "type": "message"}
    ids = bool(body.get("enable_response_messages"))
    top = {"id": "resp_1", "created_at": 1, "model": "base", "object": "response", "output": [item]}
    top |= {"top_logprobs": body.get("top_logprobs", 0 if asked else None), "status": "completed"}
    top |= {"usage": {"input_tokens": 3, "output_tokens": len(TEXT), "total_tokens": 3 + len(TEXT)}}
    seen = [{"message": "x", "tokens": PROMPT}] if ids else None
    return top | {"input_messages": seen, "output_messages": [{"tokens": list(range(len(TEXT)))}] if ids else None}


def responses_stream(body: Json) -> list[bytes]:
    whole = responses(body)
    asked = "message.output_text.logprobs" in (body.get("include") or [])
    part = whole["output"][0]["content"][0]
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events: list[Json] = [
        {"response": whole | {"output": [], "status": "in_progress"}, "type": "response.created"},
        {"item": whole["output"][0] | {"content": []}, "output_index": 0, "type": "response.output_item.added"},
        at | {"part": part | {"text": "", "logprobs": []}, "type": "response.content_part.added"},
    ]
    for piece in TEXT:
        logprobs = [{"token": piece, "logprob": -0.5}] if asked else []
        events.append(at | {"delta": piece, "logprobs": logprobs, "type": "response.output_text.delta"})
    events.append(at | {"text": "".join(TEXT), "logprobs": part["logprobs"] or [], "type": "response.output_text.done"})
    events.append(at | {"part": part, "type": "response.content_part.done"})
    events.append({"item": whole["output"][0], "output_index": 0, "type": "response.output_item.done"})
    events.append({"response": whole, "type": "response.completed"})
    return [
        b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event | {"sequence_number": number}) + b"\n\n"
        for number, event in enumerate(events)
    ]


def messages(body: Json) -> Json:
    content = [{"type": "text", "text": "".join(TEXT)}]
    if body.get("tools"):
        content.append({"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}})  # type: ignore[dict-item]
    top = {"id": "msg_1", "type": "message", "role": "assistant", "content": content, "model": "base"}
    return top | {"stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 7}}


def messages_stream(body: Json) -> list[bytes]:
    whole = messages(body)
    events: list[Json] = [{"type": "message_start", "message": whole | {"content": [], "stop_reason": None}}]
    events.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    for piece in TEXT:
        delta = {"type": "text_delta", "text": piece}
        events.append({"type": "content_block_delta", "index": 0, "delta": delta})
    events.append({"type": "content_block_stop", "index": 0})
    events.append({"type": "ping"})
    events.append({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}})
    events.append({"type": "message_stop"})
    return [b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n" for event in events]


WHOLE = {
    "chat/completions": chat, "completions": completions, "responses": responses, "messages": messages
}  # fmt: skip
STREAM = {
    "chat/completions": chat_stream,
    "completions": completions_stream,
    "responses": responses_stream,
    "messages": messages_stream,
}


def _pieces(body: Json) -> list[str]:
    return OBJECT if body.get("response_format") else TEXT


def _tools(body: Json) -> list[Json]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": tool["function"]["name"], "arguments": '{"a": 1}'}}
        for i, tool in enumerate(body.get("tools") or ())
    ]


def _tool_deltas(body: Json) -> list[Json]:
    """A name, arguments in two pieces, and in between nothing, while the parser holds text back."""
    deltas: list[Json] = []
    for i, call in enumerate(_tools(body)):
        start = call | {"index": i, "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [start]})
        for piece in ('{"a"', ": 1}"):
            deltas += [{}, {"tool_calls": [{"index": i, "function": {"arguments": piece}}]}]
    return deltas and [*deltas, {"content": ""}]


def _choice(index: int, delta: Json, logprobs: Any, finish: str | None, *ids: Any) -> Json:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "unknown": {"a": None}}
    return choice | ({"token_ids": ids[0]} if ids else {})


def _ids(body: Json, index: int) -> list[int] | None:
    return [100 * index + i for i in range(len(_pieces(body)))] if body.get("return_token_ids") else None


def _logprobs(body: Json, pieces: list[str]) -> Json | None:
    if not body.get("logprobs"):
        return None
    top = [{"token": "x", "logprob": -1e-05, "bytes": [120]}] * (body.get("top_logprobs") or 0)
    return {"content": [{"token": p, "logprob": -0.5, "bytes": list(p.encode()), "top_logprobs": top} for p in pieces]}
