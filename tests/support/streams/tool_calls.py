"""Chat streams with tool calls, after public reports."""

from __future__ import annotations

from support.streams.pieces import BOTH, CITY, DONE, ONE, TOP, ZONE, calls, case, chunk, frame, piece

TOOL_CALLS = [
    case(
        "interleaved",
        calls(
            piece("call_a", "get_weather", ""),
            piece("call_b", "get_time", "", 1),
            piece(None, None, '{"city":'),
            piece(None, None, '{"tz":', 1),
            piece(None, None, '"Paris"}'),
            piece(None, None, '"UTC"}', 1),
        ),
        tool_calls=BOTH,
    ),
    case(
        "two_in_one_chunk",
        [
            chunk({"tool_calls": [piece("call_a", "get_weather", CITY), piece("call_b", "get_time", ZONE, 1)]}),
            chunk(finish_reason="tool_calls"),
            DONE,
        ],
        tool_calls=BOTH,
    ),
    case(
        "indexes_backwards",
        calls(
            piece("call_b", "get_time", "", 1),
            piece("call_a", "get_weather", "", 0),
            piece(None, None, CITY, 0),
            piece(None, None, ZONE, 1),
        ),
        tool_calls=BOTH,
    ),
    case(
        "index_used_again",
        calls(
            piece("call_a", "get_weather", CITY, 0),
            piece("call_b", "get_time", ZONE, 1),
            piece("call_c", "get_time", ZONE, 0),
        ),
        tool_calls=[*BOTH, ["call_c", "get_time", ZONE]],
    ),
    case(
        "index_is_text",
        calls(
            piece("call_a", "get_weather", "", "0"),
            piece(None, None, CITY, "0"),
            piece("call_b", "get_time", "", "1"),
            piece(None, None, ZONE, "1"),
        ),
        tool_calls=BOTH,
    ),
    case(
        "index_has_a_fraction",
        calls(
            piece("call_a", "get_weather", "", 0.0),
            piece("call_b", "get_time", "", 1.0),
            piece(None, None, CITY, 0.0),
            piece(None, None, ZONE, 1.0),
        ),
        tool_calls=BOTH,
    ),
    case(
        "index_null",
        calls(
            {"index": None, "id": "call_a", "function": {"name": "get_weather", "arguments": ""}},
            {"index": None, "function": {"arguments": CITY}},
            {"index": None, "id": "call_b", "function": {"name": "get_time", "arguments": ZONE}},
        ),
        tool_calls=BOTH,
    ),
    case("index_later", calls(piece("call_a", "get_weather", "", None), piece(None, None, CITY, 0)), tool_calls=ONE),
    case(
        "index_0_in_pieces",
        calls(
            piece("call_a", "get_weather", ""),
            piece(None, None, '{"city":'),
            piece(None, None, '"Paris"}'),
            piece("call_b", "get_time", ""),
            piece("", "", ZONE),
        ),
        tool_calls=BOTH,
    ),
    case(
        "index_0_id_and_name_again",
        calls(
            piece("call_a", "get_weather", '{"city":'),
            piece("call_a", "get_weather", '"Paris"}'),
            piece("call_b", "get_time", '{"tz":'),
            piece("call_b", "get_time", '"UTC"}'),
        ),
        tool_calls=BOTH,
    ),
    case(
        "index_0_without_ids",
        calls(piece("", "get_weather", CITY), piece("", "get_time", ZONE)),
        tool_calls=[["", "get_weather", CITY], ["", "get_time", ZONE]],
    ),
    case(
        "no_index_no_ids",
        calls(piece(None, "get_weather", CITY, None), piece(None, "get_weather", ZONE, None)),
        tool_calls=[[None, "get_weather", CITY], [None, "get_weather", ZONE]],
    ),
    case(
        "no_index_two_in_pieces",
        calls(
            piece("call_a", "get_weather", "", None),
            piece(None, None, CITY, None),
            piece("call_b", "get_time", "", None),
            piece(None, None, '{"tz":', None),
            piece(None, None, '"UTC"}', None),
        ),
        tool_calls=BOTH,
    ),
    case(
        "no_index_id_in_each_piece",
        calls(
            piece("call_a", "get_weather", "", None),
            piece("call_b", "get_time", "", None),
            piece("call_a", None, CITY, None),
            piece("call_b", None, ZONE, None),
        ),
        tool_calls=BOTH,
    ),
    case(
        "id_after_name",
        calls(piece(None, "get_weather", ""), piece("call_a", None, ""), piece(None, None, CITY)),
        tool_calls=ONE,
    ),
    case(
        "name_after_id_and_arguments",
        calls(piece("call_a", None, '{"city":'), piece(None, "get_weather", '"Paris"}')),
        tool_calls=ONE,
    ),
    case(
        "name_in_pieces",
        calls(piece("call_a", "get_", ""), piece(None, "weather", ""), piece(None, None, CITY)),
        tool_calls=ONE,
    ),
    case(
        "name_again",
        calls(
            piece("call_a", "get_weather", ""),
            piece(None, "get_weather", '{"city":'),
            piece(None, "get_weather", '"Paris"}'),
        ),
        tool_calls=ONE,
    ),
    case(
        "another_id_on_the_pieces",
        calls(
            piece("call_a", "get_weather", ""),
            piece("x1", None, '{"city":'),
            piece("x1", None, '"Paris"}'),
            piece("call_b", "get_time", "", 1),
            piece("x2", None, ZONE, 1),
        ),
        tool_calls=BOTH,
    ),
    case(
        "an_id_of_its_own_on_each_piece",
        calls(
            piece("call_a", "get_weather", ""),
            piece("x1", None, '{"city":'),
            piece("x2", None, '"Paris"}'),
        ),
        tool_calls=ONE,
    ),
    case(
        "nulls",
        calls(
            piece("call_a", "get_weather", ""),
            {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": CITY}},
            {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": None}},
            {"index": 0, "function": None},
        ),
        tool_calls=ONE,
    ),
    case(
        "same_id_by_index",
        calls(piece("f:0", "get_weather", CITY, 0), piece("f:0", "get_time", ZONE, 1)),
        tool_calls=[["f:0", "get_weather", CITY], ["f:0", "get_time", ZONE]],
    ),
    case(
        "same_id_all_index_0",
        calls(piece("f:0", "f", '{"n":1}'), piece("f:0", "f", '{"n":2}')),
        tool_calls=[["f:0", "f", '{"n":1}'], ["f:0", "f", '{"n":2}']],
    ),
    case(
        "whole_call_once_more",
        calls(
            piece("call_a", "get_weather", '{"city":'),
            piece(None, None, '"Paris"}'),
            piece("call_a", "get_weather", CITY),
        ),
        tool_calls=ONE,
    ),
    case(
        "begins_with_an_empty_object",
        calls(piece("call_a", "get_weather", "{}"), piece(None, None, CITY)),
        tool_calls=ONE,
    ),
    case(
        "no_parameters",
        calls(piece("call_a", "now", "{}"), piece("call_b", "now", "{}")),
        tool_calls=[["call_a", "now", "{}"], ["call_b", "now", "{}"]],
    ),
    case(
        "objects",
        calls(piece("call_a", "get_weather", {"city": "Paris"}), piece("call_b", "get_time", {"tz": "UTC"})),
        tool_calls=BOTH,
    ),
    case(
        "object_after_its_name",
        calls(piece("call_a", "get_weather", ""), piece(None, None, {"city": "Paris"})),
        tool_calls=ONE,
    ),
    case(
        "object_in_pieces",
        calls(piece("call_a", "f", {"a": 1}), piece("call_a", None, {"b": 2})),
        tool_calls=[["call_a", "f", '{"a":1,"b":2}']],
    ),
    case(
        "one_call_for_a_list",
        [chunk({"tool_calls": piece("call_a", "get_weather", CITY)}), chunk(finish_reason="tool_calls"), DONE],
        tool_calls=ONE,
    ),
    case(
        "custom_tool",
        calls(
            {"index": 0, "id": "call_a", "type": "custom", "custom": {"name": "patch", "input": ""}},
            {"index": 0, "custom": {"input": "*** Begin"}},
            {"index": 0, "custom": {"input": " Patch"}},
        ),
        tool_calls=[["call_a", "patch", "*** Begin Patch"]],
    ),
    case(
        "function_call",
        [
            chunk({"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": ""}}),
            chunk({"function_call": {"arguments": '{"city":'}}),
            chunk({"function_call": {"name": "", "arguments": '"Paris"}'}}),
            chunk(finish_reason="function_call"),
            DONE,
        ],
        tool_calls=[[None, "get_weather", CITY]],
        finish_reason="function_call",
    ),
    case(
        "function_call_object",
        [
            chunk({"function_call": {"name": "get_weather", "arguments": {"city": "Paris"}}}),
            chunk(finish_reason="function_call"),
            DONE,
        ],
        tool_calls=[[None, "get_weather", CITY]],
    ),
    case(
        "index_0_interleaved_by_id",
        calls(
            piece("call_a", "get_weather", ""),
            piece("call_b", "get_time", ""),
            piece("call_a", None, '{"city":'),
            piece("call_b", None, '{"tz":'),
            piece("call_a", "get_weather", '"Paris"}'),
            piece("call_b", "get_time", '"UTC"}'),
        ),
        tool_calls=BOTH,
    ),
    case(
        "index_counts_pieces_by_id",
        calls(
            piece("call_a", "get_weather", "", 0),
            piece("call_a", None, '{"city":', 1),
            piece("call_a", "", '"Paris"}', 2),
            piece("call_b", "get_time", ZONE, 3),
        ),
        tool_calls=BOTH,
    ),
    case(
        "index_counts_pieces",
        calls(
            piece("call_a", "get_weather", "", 0),
            piece(None, None, '{"city":', 1),
            piece("", "", '"Paris"}', 2),
            piece("call_b", "get_time", ZONE, 3),
        ),
        tool_calls=BOTH,
    ),
    case(
        "index_without_a_call",
        calls(piece("call_a", "get_weather", CITY), piece("", "", "", 1)),
        tool_calls=ONE,
    ),
    case(
        "arguments_again_at_the_end",
        calls(piece("call_a", "get_weather", ""), piece(None, None, CITY), piece(None, None, CITY)),
        tool_calls=ONE,
    ),
    case(
        "call_again_without_its_id",
        calls(piece("call_a", "get_weather", ""), piece(None, None, CITY), piece(None, "get_weather", CITY)),
        tool_calls=ONE,
    ),
    case(
        "several_choices",
        [
            chunk({"tool_calls": [piece("call_a", "get_weather", "")]}),
            chunk({"tool_calls": [piece("call_b", "get_time", "")]}, 1),
            chunk({"tool_calls": [piece(None, None, ZONE)]}, 1),
            chunk({"tool_calls": [piece(None, None, CITY)]}),
            chunk(finish_reason="tool_calls"),
            chunk(index=1, finish_reason="tool_calls"),
            DONE,
        ],
        tool_calls=BOTH,
    ),
    case(
        "calls_in_a_last_message",
        [
            chunk({"role": "assistant", "content": ""}),
            frame(
                TOP
                | {
                    "choices": [
                        {
                            "index": 0,
                            "finish_reason": "tool_calls",
                            "message": {"role": "assistant", "tool_calls": [piece("call_a", "get_weather", CITY)]},
                        }
                    ]
                }
            ),
            DONE,
        ],
        tool_calls=ONE,
    ),
    case(
        "extra_content",
        calls(piece("call_a", "get_weather", CITY, extra_content={"google": {"thought_signature": "Ej"}})),
        tool_calls=ONE,
        holds=['"thought_signature": "Ej"'],
    ),
]
