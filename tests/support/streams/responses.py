"""Streams of /v1/responses whose last event says little, after public reports."""

from __future__ import annotations

import json
from typing import Any

from support.streams.pieces import DONE, RESPONSES, Json, case, frame


def response(kind: str, **fields: Any) -> str:
    base = {"id": "resp_1", "object": "response", "created_at": 1, "status": "in_progress", "model": "m", "output": []}
    return frame({"type": f"response.{kind}", "response": base | fields}, f"response.{kind}")


def event(kind: str, **fields: Any) -> str:
    return frame({"type": f"response.{kind}"} | fields, f"response.{kind}")


def item(kind: str, index: Any, what: Json) -> str:
    return event(f"output_item.{kind}", **({} if index is None else {"output_index": index}), item=what)


HELLO: Json = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
}
PART: Json = {"type": "output_text", "text": "Hello"}
CITED: Json = {"annotations": [{"type": "url_citation", "url": "https://example.org/", "title": "t"}]}
LOGPROBS: list[Json] = [{"token": "Hel", "logprob": -0.5}, {"token": "lo", "logprob": -0.1}]
CALL: Json = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "f",
    "arguments": '{"a":1}',
    "status": "completed",
}
CALLED = [["call_1", "f", '{"a":1}']]
ITEMS = [item("done", 0, HELLO), item("done", 1, CALL)]
COUNTS = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}

TERMINAL = [
    case(
        "completed_without_output",
        [
            response("created"),
            *ITEMS,
            frame({"type": "response.completed", "response": {"id": "resp_1", "usage": COUNTS}}),
        ],
        RESPONSES,
        output=[HELLO, CALL],
        tool_calls=CALLED,
        usage=COUNTS,
        status="ok",
        clean=True,
        holds=['"status": "completed"', '"model": "m"'],
    ),
    case(
        "completed_with_null_output",
        [response("created"), *ITEMS, response("completed", status="completed", output=None)],
        RESPONSES,
        output=[HELLO, CALL],
        tool_calls=CALLED,
        clean=True,
    ),
    case(
        "completed_without_response",
        [response("created"), *ITEMS, frame({"type": "response.completed"})],
        RESPONSES,
        output=[HELLO, CALL],
        status="ok",
        clean=True,
        finish_reason="tool_calls",
    ),
    case(
        "incomplete_without_output",
        [
            response("created"),
            item("done", 0, HELLO),
            response("incomplete", status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
        ],
        RESPONSES,
        output=[HELLO],
        status="ok",
        finish_reason="length",
        clean=True,
    ),
    case(
        "failed_without_output",
        [
            response("created"),
            item("done", 0, HELLO),
            response("failed", status="failed", error={"code": "server_error", "message": "boom"}),
        ],
        RESPONSES,
        output=[HELLO],
        status="error",
        error="boom",
        clean=True,
    ),
    case(
        "failed_without_error",
        [response("created"), response("failed", status="failed")],
        RESPONSES,
        status="error",
        error="failed",
        clean=True,
    ),
    case(
        "response_done",
        [response("created"), *ITEMS, response("done", status="completed", usage=COUNTS)],
        RESPONSES,
        output=[HELLO, CALL],
        usage=COUNTS,
        status="ok",
        clean=True,
    ),
    case("only_done_for_responses", [response("created"), *ITEMS, DONE], RESPONSES, output=[HELLO, CALL], clean=True),
    case(
        "done_after_completed",
        [response("created"), *ITEMS, response("completed", status="completed"), DONE],
        RESPONSES,
        output=[HELLO, CALL],
        clean=True,
    ),
    case(
        "types_in_event_fields",
        [
            'event: response.created\ndata: {"response": {"id": "resp_1", "status": "in_progress", "output": []}}\n\n',
            f"event: response.output_item.done\ndata: {json.dumps({'output_index': 0, 'item': HELLO})}\n\n",
            'event: response.completed\ndata: {"response": {"id": "resp_1", "status": "completed", "output": []}}\n\n',
        ],
        RESPONSES,
        output=[HELLO],
        status="ok",
        clean=True,
    ),
    case(
        "deltas_alone",
        [
            response("created"),
            item("added", 0, HELLO | {"content": [], "status": "in_progress"}),
            event("output_text.delta", item_id="msg_1", output_index=0, content_index=0, delta="Hel"),
            event("output_text.delta", item_id="msg_1", output_index=0, content_index=0, delta="lo"),
            item("added", 1, CALL | {"arguments": ""}),
            event("function_call_arguments.delta", item_id="fc_1", output_index=1, delta='{"a":'),
            event("function_call_arguments.delta", item_id="fc_1", output_index=1, delta="1}"),
            response("completed", status="completed", usage=COUNTS),
        ],
        RESPONSES,
        holds=['"text": "Hello"'],
        tool_calls=CALLED,
        usage=COUNTS,
        clean=True,
    ),
    case(
        "deltas_without_items",
        [
            event("output_text.delta", item_id="msg_1", output_index=0, content_index=0, delta="Hello"),
            response("completed", status="completed"),
        ],
        RESPONSES,
        output=[
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hello"}],
            }
        ],
        clean=True,
    ),
    case(
        "part_done",
        [
            response("created"),
            item("added", 0, HELLO | {"content": []}),
            event("content_part.added", item_id="msg_1", output_index=0, content_index=0, part=PART | {"text": ""}),
            event("content_part.done", item_id="msg_1", output_index=0, content_index=0, part=PART),
            response("completed", status="completed"),
        ],
        RESPONSES,
        output=[HELLO | {"content": [PART]}],
    ),
    case(
        "part_done_with_citations",
        [
            response("created"),
            item("added", 0, HELLO | {"content": []}),
            event("content_part.done", item_id="msg_1", output_index=0, content_index=0, part=PART | CITED),
            response("completed", status="completed"),
        ],
        RESPONSES,
        output=[HELLO | {"content": [PART | CITED]}],
    ),
    case(
        "log_probabilities_of_deltas",
        [
            response("created"),
            item("added", 0, HELLO | {"content": []}),
            *(
                event("output_text.delta", item_id="msg_1", output_index=0, content_index=0, delta=d, logprobs=[p])
                for d, p in zip(["Hel", "lo"], LOGPROBS, strict=True)
            ),
            response("completed", status="completed"),
        ],
        RESPONSES,
        output=[HELLO | {"content": [PART | {"logprobs": LOGPROBS}]}],
    ),
    case(
        "last_event_with_null_fields",
        [
            response("in_progress", usage=COUNTS),
            *ITEMS,
            response("completed", status="completed", model="", usage=None),
        ],
        RESPONSES,
        usage=COUNTS,
        holds=['"model": "m"'],
    ),
    case(
        "items_backwards",
        [response("created"), item("done", 1, CALL), item("done", 0, HELLO), response("completed", status="completed")],
        RESPONSES,
        output=[HELLO, CALL],
    ),
    case(
        "arguments_done",
        [
            response("created"),
            item("added", 0, CALL | {"arguments": ""}),
            event("function_call_arguments.done", item_id="fc_1", output_index=0, arguments='{"a":1}'),
            response("completed", status="completed"),
        ],
        RESPONSES,
        tool_calls=CALLED,
    ),
    case(
        "items_of_one_index",
        [response("created"), item("done", 0, HELLO), item("done", 0, CALL), response("completed", status="completed")],
        RESPONSES,
        output=[HELLO, CALL],
    ),
    case(
        "items_without_index",
        [
            response("created"),
            item("added", None, HELLO | {"content": []}),
            item("done", None, HELLO),
            item("done", None, CALL),
            response("completed", status="completed"),
        ],
        RESPONSES,
        output=[HELLO, CALL],
    ),
    case(
        "ids_of_their_own",
        [
            response("created"),
            item("added", 0, CALL | {"id": "x1", "arguments": ""}),
            event("function_call_arguments.delta", item_id="x2", output_index=0, delta='{"a":1}'),
            item("done", 0, CALL | {"id": "x3"}),
            response("completed", status="completed"),
        ],
        RESPONSES,
        output=[CALL | {"id": "x3"}],
    ),
    case(
        "last_event_with_empty_items",
        [
            response("created"),
            *ITEMS,
            response("completed", status="completed", output=[HELLO | {"content": []}, CALL | {"arguments": ""}]),
        ],
        RESPONSES,
        output=[HELLO, CALL],
        tool_calls=CALLED,
    ),
    case(
        "reasoning_summary",
        [
            response("created"),
            item("added", 0, {"type": "reasoning", "id": "rs_1", "summary": []}),
            event("reasoning_summary_text.delta", item_id="rs_1", output_index=0, summary_index=0, delta="I th"),
            event("reasoning_summary_text.delta", item_id="rs_1", output_index=0, summary_index=0, delta="ink"),
            response("completed", status="completed"),
        ],
        RESPONSES,
        output=[{"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I think"}]}],
    ),
    case(
        "response_error_text",
        [response("created"), frame({"error": "boom"})],
        RESPONSES,
        error="boom",
        status="error",
        clean=True,
    ),
    case(
        "response_error_event",
        [response("created"), 'event: error\ndata: {"code": "x", "message": "boom"}\n\n'],
        RESPONSES,
        error="boom",
        status="error",
        clean=True,
    ),
    case(
        "response_error_bare",
        [response("created"), frame({"message": "boom", "code": 500})],
        RESPONSES,
        error="boom",
        status="error",
        clean=True,
    ),
    case(
        "response_error_with_items",
        [response("created"), item("done", 0, HELLO), frame({"type": "error", "message": "boom"})],
        RESPONSES,
        error="boom",
        output=[HELLO],
        clean=True,
    ),
    case(
        "response_not_ended",
        [response("created"), item("done", 0, HELLO)],
        RESPONSES,
        output=[HELLO],
        status="error",
        broken=True,
    ),
]
