"""Streams and whole answers under another Content-Type than their own."""

from __future__ import annotations

import json
from typing import Any

from support.cases import Case
from support.streams.messages import END, SAID, START, STOP, TEXT, block, texts
from support.streams.pieces import DONE, MESSAGES, RESPONSES, TOP, Json, case, chunk, frame
from support.streams.responses import CALL, HELLO, ITEMS, response


def _token(text: str, logprob: float = -0.5) -> Json:
    return {"content": [{"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}]}


VLLM = [
    frame(
        TOP
        | {
            "choices": [
                {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            ],
            "prompt_token_ids": [1, 2, 3],
        }
    ),
    chunk({"content": "Hel"}, logprobs=_token("Hel"), token_ids=[5]),
    chunk({"content": "lo"}, logprobs=_token("lo"), token_ids=[6]),
    chunk({"content": ""}, logprobs=_token(""), token_ids=[7], finish_reason="stop"),
    frame(TOP | {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}}),
    DONE,
]
WHOLE = json.dumps(
    {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "prompt_token_ids": [1, 2, 3],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "finish_reason": "stop",
                "token_ids": [5, 6],
                "logprobs": {"content": [{"token": "x", "logprob": -0.5}] * 2},
            }
        ],
    }
)


def of_vllm(name: str, content_type: str | None, stream: list[Any]) -> Case:
    return case(
        name,
        stream,
        upstream="vllm",
        content_type=content_type,
        trainable=True,
        status="ok",
        message={"content": "Hello"},
        not_in_answer=["[5", "completion_tokens", "-0.5"],
    )


TYPES = [
    of_vllm("stream_as_text", "text/plain; charset=utf-8", VLLM),
    of_vllm("stream_as_anything", "application/x-ndjson", VLLM),
    of_vllm("stream_after_a_comment", "application/json", [": ping\n\n", *VLLM]),
    of_vllm("stream_after_blank_lines", "application/json", ["\n\n", *VLLM]),
    of_vllm("stream_with_a_mark", None, [b"\xef\xbb", b"\xbf", *VLLM]),
    of_vllm("stream_in_small_pieces", "application/json", list("".join(VLLM[:2])) + VLLM[2:]),
    of_vllm("stream_that_names_its_events", "application/json", ["event: message\n" + p for p in VLLM]),
    of_vllm("whole_as_stream", "text/event-stream", [WHOLE]) | {"not_in_answer": ["[5", "-0.5"]},
    of_vllm("whole_as_stream_in_pieces", "text/event-stream", ["\n ", *WHOLE]) | {"not_in_answer": ["[5", "-0.5"]},
    of_vllm("whole_as_json", "application/json", [WHOLE]) | {"not_in_answer": ["[5", "-0.5"]},
    case(
        "whole_with_a_mark",
        [b"\xef\xbb\xbf", WHOLE],
        content_type="application/json",
        status="ok",
        message={"content": "Hello"},
        clean=True,
    ),
    case("error_as_stream", ['{"error": {"message": "boom"}}'], error="boom", status="error", clean=True),
    case("text_that_is_no_stream", ["data is what I have"], content_type="text/plain", status="error", clean=True),
    case("empty_as_json", [], content_type="application/json", clean=True),
    case(
        "responses_as_json",
        [response("created"), *ITEMS, response("completed", status="completed")],
        RESPONSES,
        content_type="application/json",
        output=[HELLO, CALL],
        status="ok",
        clean=True,
    ),
    case(
        "messages_as_json",
        [START, *block(TEXT, 0, *texts("Hello")), STOP, END],
        MESSAGES,
        content_type="application/json",
        content=SAID,
        status="ok",
        clean=True,
    ),
]
