"""Requests with numbers and truth values in other types, which vLLM reads all the same."""

from __future__ import annotations

from typing import Any

from support.cases import Case
from support.streams.content_types import VLLM
from support.streams.pieces import CHAT, MESSAGES, RESPONSES, case

USAGE = {"stream_options": {"include_usage": True}}


def asked(name: str, path: str = CHAT, trainable: bool = True, **expected: Any) -> Case:
    request = {"stream_options": None} | expected.pop("request") if path == CHAT else expected.pop("request")
    return case(name, VLLM, path, upstream="vllm", request=request, trainable=trainable, **expected)


LENIENT = [
    asked("true_as_text", request={"stream": "true"}, sent=USAGE),
    asked("n_as_text", request={"n": "1"}, sent=USAGE),
    asked("n_with_a_fraction_of_0", request={"n": 1.0}, sent=USAGE),
    asked("temperature_0_as_text", request={"temperature": "0"}, trainable=False, untrainable="greedy"),
    asked("top_k_1_as_text", request={"top_k": " 1 "}, trainable=False, untrainable="greedy"),
    asked("no_beams_as_text", request={"use_beam_search": "off"}),
    asked("no_echo_as_text", request={"echo": "false", "logprobs": "no", "top_logprobs": "0"}, sent={"logprobs": True}),
    asked(
        "usage_as_text",
        request={"stream_options": {"include_usage": "1"}},
        sent={"stream_options": {"include_usage": "1"}},
    ),
    asked(
        "messages_as_text",
        MESSAGES,
        request={"stream": 1, "temperature": "0.5"},
        sent={"stream": True, "temperature": 0.5},
    ),
    asked("responses_as_text", RESPONSES, request={"stream": "yes", "top_p": "0.5", "background": 0}, sent=USAGE),
    asked("messages_greedy_as_text", MESSAGES, request={"temperature": "0"}, trainable=False, untrainable="greedy"),
    asked("responses_greedy_as_text", RESPONSES, request={"temperature": "0.0"}, trainable=False, untrainable="greedy"),
]
