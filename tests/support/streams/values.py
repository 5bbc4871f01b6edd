"""Chat streams with values and ends that few servers send, after public reports."""

from __future__ import annotations

from support.streams.pieces import DONE, TOP, USAGE, case, chunk, frame, say

VALUES = [
    case(
        "finish_reason_empty_before",
        [
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "Hello"}, finish_reason=""),
            chunk(finish_reason="stop"),
            DONE,
        ],
        finish_reason="stop",
        choice={"finish_reason": "stop"},
    ),
    case(
        "finish_reason_empty_after",
        [chunk({"content": "Hello"}), chunk(finish_reason="stop"), chunk(finish_reason=""), DONE],
        finish_reason="stop",
        choice={"finish_reason": "stop"},
    ),
    case(
        "finish_reason_twice",
        [chunk({"content": "Hello"}), chunk(finish_reason="stop"), chunk(finish_reason="stop"), DONE],
        finish_reason="stop",
        message={"content": "Hello"},
    ),
    case(
        "role_in_every_chunk",
        [chunk({"role": "assistant", "content": t}) for t in ("Hel", "lo")] + say()[1:],
        message={"role": "assistant", "content": "Hello"},
    ),
    case(
        "words_in_every_chunk",
        [
            chunk(
                {"role": "assistant", "content": t, "phase": "final", "reasoning_format": "md"},
                service_tier="flex",
                content_filter_results={"hate": {"filtered": False, "severity": "safe"}},
            )
            for t in ("Hel", "lo")
        ]
        + say()[1:],
        message={"content": "Hello", "phase": "final", "reasoning_format": "md"},
        choice={"service_tier": "flex", "content_filter_results": {"hate": {"filtered": False, "severity": "safe"}}},
    ),
    case(
        "top_fields_empty",
        [
            frame({"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": []}),
            chunk({"content": "Hello"}),
            frame({"id": "", "model": "", "object": "", "choices": [], "usage": USAGE}),
            DONE,
        ],
        holds=['"id": "c1"', '"model": "m"', '"object": "chat.completion"'],
        usage=USAGE,
    ),
    case(
        "thinking_in_parts",
        say(
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "I"}]}]},
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": " think"}]}]},
            {"content": "Ans"},
            {"content": "wer"},
        ),
        message={
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "I think"}]},
                {"type": "text", "text": "Answer"},
            ]
        },
    ),
    case(
        "text_then_parts",
        say({"content": "Hello "}, {"content": [{"type": "text", "text": "you"}]}, {"content": "!"}),
        message={"content": [{"type": "text", "text": "Hello you!"}]},
    ),
    case(
        "parts_then_null",
        say({"content": [{"type": "text", "text": "Hello"}]}, {"content": None}, {"content": ""}),
        message={"content": [{"type": "text", "text": "Hello"}]},
    ),
    case(
        "reasoning_details",
        say(
            {
                "reasoning": "I",
                "reasoning_details": [{"type": "reasoning.text", "text": "I", "format": "a", "index": 0}],
            },
            {
                "reasoning": " th",
                "reasoning_details": [{"type": "reasoning.text", "text": " th", "format": "a", "index": 0}],
            },
            {"content": "Hello"},
        ),
        message={
            "content": "Hello",
            "reasoning": "I th",
            "reasoning_details": [{"type": "reasoning.text", "text": "I th", "format": "a", "index": 0}],
        },
    ),
    case(
        "usage_beside_an_error",
        [
            chunk({"content": "Hel"}),
            frame(
                TOP
                | {
                    "error": {"message": "boom", "code": 502},
                    "usage": USAGE,
                    "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}],
                }
            ),
            DONE,
        ],
        usage=USAGE,
        error="boom",
        status="error",
        clean=True,
    ),
    case(
        "usage_after_an_error",
        [
            chunk({"content": "Hel"}),
            frame({"error": {"message": "boom"}}),
            frame(TOP | {"choices": [], "usage": USAGE}),
            DONE,
        ],
        usage=USAGE,
        error="boom",
        clean=True,
    ),
    case(
        "usage_empty_at_the_end",
        [
            chunk({"content": "Hello"}),
            frame(TOP | {"choices": [], "usage": USAGE}),
            frame(TOP | {"choices": [], "usage": {}}),
            DONE,
        ],
        usage=USAGE,
    ),
    case(
        "mark_split",
        [
            b"\xef",
            b"\xbb",
            b"\xbfdata: {",
            *[piece[7:] if i == 0 else piece for i, piece in enumerate(say({"content": "Hello"}))],
        ],
        message={"role": "assistant", "content": "Hello"},
        clean=True,
    ),
    case(
        "mark_and_comment",
        [b"\xef\xbb\xbf: ping\n\n", *say({"content": "Hello"})],
        message={"content": "Hello"},
        clean=True,
    ),
    case(
        "mark_and_crlf",
        [b"\xef\xbb\xbf", *[p.replace("\n", "\r\n") for p in say({"content": "Hello"})]],
        message={"role": "assistant", "content": "Hello"},
        clean=True,
    ),
]


ENDS = [
    case(
        "events_without_data",
        [
            chunk({"role": "assistant", "content": ""}),
            "data:\n\n",
            chunk({"content": "x"}),
            "data: \n\n",
            chunk(finish_reason="stop"),
            DONE,
        ],
        message={"content": "x"},
        status="ok",
        clean=True,
    ),
    case(
        "error_of_a_choice",
        [chunk({"content": "x"}), chunk(finish_reason="error", error={"code": 502, "message": "busy"}), DONE],
        message={"content": "x"},
        status="error",
        error="busy",
        clean=True,
    ),
    *(
        case(f"chat_error_{name}", [chunk({"content": "x"}), frame(told)], status="error", error="busy", clean=True)
        for name, told in {
            "list": {"errors": [{"message": "busy"}]},
            "success": {"success": False, "message": "busy"},
            "message": {"status_code": 503, "error_message": "busy"},
        }.items()
    ),
    case(
        "chat_error_by_object",
        [chunk({"content": "Hel"}), frame({"object": "error", "message": "boom", "code": 400}), DONE],
        error="boom",
        status="error",
        clean=True,
        message={"content": "Hel"},
    ),
    case(
        "chat_error_without_done",
        [chunk({"content": "Hel"}), frame({"error": {"message": "boom"}})],
        error="boom",
        status="error",
        clean=True,
    ),
    case("chat_error_event", ['event: error\ndata: {"message": "boom"}\n\n'], error="boom", status="error", clean=True),
    case("chat_error_detail", [frame({"detail": "boom"})], error="boom", status="error", clean=True),
    case("chat_error_without_message", [frame({"error": {"code": 7}})], error='{"code":7}', status="error", clean=True),
    case("chat_without_done", say({"content": "Hello"})[:-1], message={"content": "Hello"}, status="ok", clean=True),
    case("chat_not_ended", [chunk({"content": "Hel"})], message={"content": "Hel"}, status="error", broken=True),
    case("chat_reset_after_its_reason", say({"content": "Hello"})[:-1], breaks=True, status="error", broken=True),
]
