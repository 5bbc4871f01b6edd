"""Streams of /v1/messages that leave out what Anthropic sends, after public reports."""

from __future__ import annotations

from typing import Any

from support.streams.pieces import DONE, MESSAGES, Json, case, frame


def message(kind: str, **fields: Any) -> str:
    return frame({"type": kind} | fields, kind)


START = message(
    "message_start",
    message={
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "m",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 1},
    },
)
STOP = message("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 7})
END = message("message_stop")
TEXT, TOOL = {"type": "text", "text": ""}, {"type": "tool_use", "id": "tu_1", "name": "f", "input": {}}


def block(start: Json | None, index: Any, *deltas: Json) -> list[str]:
    at = {} if index is None else {"index": index}
    begin = [] if start is None else [message("content_block_start", content_block=start, **at)]
    return [
        *begin,
        *(message("content_block_delta", delta=d, **at) for d in deltas),
        message("content_block_stop", **at),
    ]


def texts(*parts: str) -> list[Json]:
    return [{"type": "text_delta", "text": part} for part in parts]


def inputs(*parts: str) -> list[Json]:
    return [{"type": "input_json_delta", "partial_json": part} for part in parts]


SAID = [{"type": "text", "text": "Hello"}]
USED = [TOOL | {"input": {"a": 1}}]
OF_MESSAGES = [
    case(
        "no_start_of_a_block",
        [START, *block(None, 0, *texts("Hel", "lo")), STOP, END],
        MESSAGES,
        content=SAID,
        status="ok",
    ),
    case(
        "no_start_of_the_message",
        [*block(TEXT, 0, *texts("Hello")), STOP, END],
        MESSAGES,
        content=SAID,
        finish_reason="end_turn",
        usage={"output_tokens": 7},
    ),
    case(
        "blocks_of_one_index",
        [START, *block(TEXT, 0, *texts("Hello")), *block(TOOL, 0, *inputs('{"a"', ":1}")), STOP, END],
        MESSAGES,
        content=SAID + USED,
        tool_calls=[["tu_1", "f", '{"a":1}']],
    ),
    case(
        "blocks_backwards",
        [START, *block(TOOL, 1, *inputs('{"a":1}')), *block(TEXT, 0, *texts("Hello")), STOP, END],
        MESSAGES,
        content=SAID + USED,
    ),
    case(
        "input_is_a_text",
        [START, *block(TOOL, 0, *inputs('"a', 'b"')), STOP, END],
        MESSAGES,
        tool_calls=[["tu_1", "f", '"ab"']],
    ),
    case(
        "input_that_came_whole",
        [
            START,
            *block(TOOL | {"input": '{"a": '}, 0),
            *block(TOOL | {"id": "tu_2", "input": {"INVALID_JSON": "{"}}, 1),
            STOP,
            END,
        ],
        MESSAGES,
        tool_calls=[["tu_1", "f", '{"a": '], ["tu_2", "f", "{"]],
    ),
    case(
        "blocks_without_index",
        [START, *block(TEXT, None, *texts("Hello")), *block(TOOL, None, *inputs('{"a":1}')), STOP, END],
        MESSAGES,
        content=SAID + USED,
    ),
    case(
        "kinds_in_one_block",
        [
            START,
            *block(
                None,
                0,
                {"type": "thinking_delta", "thinking": "I th"},
                {"type": "thinking_delta", "thinking": "ink"},
                *texts("Hello"),
            ),
            STOP,
            END,
        ],
        MESSAGES,
        content=[{"type": "thinking", "thinking": "I think"}, *SAID],
    ),
    case(
        "input_is_an_object",
        [START, *block(TOOL, 0, {"type": "input_json_delta", "partial_json": {"a": 1}}), STOP, END],
        MESSAGES,
        content=USED,
        tool_calls=[["tu_1", "f", '{"a":1}']],
    ),
    case("input_at_its_start", [START, *block(USED[0], 0), STOP, END], MESSAGES, content=USED),
    case(
        "start_twice", [START, *block(TOOL, 0), *block(TOOL, 0, *inputs('{"a":1}')), STOP, END], MESSAGES, content=USED
    ),
    case(
        "tool_use_without_stop",
        [
            START,
            *block(TOOL, 0, *inputs('{"a":1}')),
            message("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 7}),
        ],
        MESSAGES,
        content=USED,
        status="ok",
        clean=True,
        finish_reason="tool_use",
        usage={"input_tokens": 3, "output_tokens": 7},
    ),
    case(
        "message_done_for_stop",
        [START, *block(TEXT, 0, *texts("Hello")), STOP, DONE],
        MESSAGES,
        content=SAID,
        status="ok",
        clean=True,
        finish_reason="end_turn",
    ),
    case(
        "stop_then_null",
        [
            START,
            *block(TEXT, 0, *texts("Hello")),
            STOP,
            message("message_delta", delta={"stop_reason": None}, usage={"output_tokens": 0, "input_tokens": 0}),
            END,
        ],
        MESSAGES,
        finish_reason="end_turn",
        usage={"input_tokens": 3, "output_tokens": 7},
    ),
    case(
        "message_types_in_event_fields",
        [
            piece_.replace('"type": "' + piece_.split("\n")[0][7:] + '", ', "")
            for piece_ in (START, *block(TEXT, 0, *texts("Hello")), STOP)
        ]
        + ["event: message_stop\ndata: {}\n\n"],
        MESSAGES,
        content=SAID,
        status="ok",
        finish_reason="end_turn",
        clean=True,
    ),
    case(
        "message_error_as_chat",
        [START, frame({"error": {"message": "boom"}})],
        MESSAGES,
        error="boom",
        status="error",
        clean=True,
    ),
    case(
        "message_error_text",
        [START, *block(TEXT, 0, *texts("Hello")), frame({"error": "boom"})],
        MESSAGES,
        error="boom",
        content=SAID,
        clean=True,
    ),
    case(
        "message_error_bare",
        [START, frame({"type": "overloaded_error", "message": "boom"})],
        MESSAGES,
        error="boom",
        status="error",
        clean=True,
    ),
    case(
        "message_error_event",
        [START, 'event: error\ndata: {"error": {"type": "x", "message": "boom"}}\n\n'],
        MESSAGES,
        error="boom",
        status="error",
        clean=True,
        usage={"input_tokens": 3, "output_tokens": 1},
    ),
    case(
        "message_not_ended",
        [START, *block(TEXT, 0, *texts("Hello"))],
        MESSAGES,
        content=SAID,
        status="error",
        broken=True,
    ),
    case(
        "reason_before_its_end",
        [START.replace('"stop_reason": null', '"stop_reason": "end_turn"'), *block(TEXT, 0, *texts("Hel"))],
        MESSAGES,
        status="error",
        broken=True,
    ),
    case(
        "message_reset_after_its_reason",
        [START, *block(TEXT, 0, *texts("Hello")), STOP],
        MESSAGES,
        breaks=True,
        content=SAID,
        status="error",
        broken=True,
    ),
]
