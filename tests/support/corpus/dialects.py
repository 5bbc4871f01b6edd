"""What vLLM answers in the recorded APIs, asked for everything that changes it; and JSON that it would not write."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from support import voice
from support.corpus.case import CHAT, DONE, ERROR, STREAM, Case, post, says, streamed, whole
from support.played import Asked, Step

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SUB = {"type": "function", "function": {"name": "subtract", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE, AUDIO, FILE]}]

ASKED: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        {},
        {"logprobs": False, "return_token_ids": False},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 3},
        {"return_token_ids": True},
        {"return_token_ids": True, "logprobs": True},
        {"n": 3},
        {"n": 2, "logprobs": True},
        {"n": 2, "return_token_ids": True, "tools": [ADD, SUB]},
        {"tools": [ADD]},
        {"tools": [ADD, SUB]},
        {"tools": [ADD, SUB], "parallel_tool_calls": True, "logprobs": True},
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"response_format": SCHEMA},
        {"response_format": {"type": "json_object"}, "logprobs": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True}, "tools": [ADD, SUB]},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
        {"stream_options": None},
        {"temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["o"], "max_tokens": 5, "user": "u"},
        {"unknown": {"nested": [1, 2.50, None, "é", "\ud83d\ude00"]}, "extra_body": {"x": 1e-7}},
        {"messages": PARTS},
        {"messages": [{"role": "user", "content": "Zoë 😀 \u2028 \\u0000 \x7f"}]},
    ],
    "completions": [
        {"prompt": "a"},
        {"prompt": "a", "logprobs": 2},
        {"prompt": "a", "logprobs": 0},
        {"prompt": "a", "return_token_ids": True},
        {"prompt": "a", "echo": True},
        {"prompt": [1, 2]},
        {"prompt": "a", "stream_options": {"include_usage": True}},
        {"prompt": "a", "suffix": "b", "unknown": {"x": [None]}},
    ],
    "responses": [
        {"input": "a"},
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"input": "a", "include": ["reasoning.encrypted_content"]},
        {"input": "a", "enable_response_messages": True},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "é"}]}], "previous_response_id": "r"},
        {"input": "a", "background": True},
    ],
    "messages": [
        {"messages": []},
        {"messages": [], "tools": [{"name": "add", "input_schema": {"type": "object"}}], "system": "s"},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "aaaa"}}]}]},
    ],
}


def vllm(asked: Asked) -> list[Step]:
    """What vLLM answers to a request of any of the recorded APIs."""
    path, body = asked.target.decode().removeprefix("/v1/"), json.loads(asked.body)
    if body.get("stream"):
        return streamed(*voice.STREAM[path](body))
    return [whole(voice.dumps(voice.WHOLE[path](body)), "x-request-id: 1")]


def dialects() -> Iterable[Case]:
    for path, bodies in ASKED.items():
        for body in bodies:
            for stream in (False, True):
                said = body | ({"stream": True} if stream else {})
                yield Case(f"{path} {json.dumps(said)}", post(path, said), vllm)


def pretty() -> Iterable[Case]:
    """An upstream other than vLLM: no byte of its JSON is written anew."""
    text = b'{ "id" : "x",\r\n "choices": [ ], "n": 1.50, "big": 123456789012345678901234567890, "e": "\\u00e9\\/" }'
    odd = [text, b"[]", b"null", b'"text"', b"", b" ", b"\xff\xfe", b"<html>", b"1" * 4_000, b"{" + b" " * 99 + b"}"]
    for body in odd:
        yield Case(f"body {body[:12]!r}", CHAT, says(whole(body)))
        yield Case(f"event {body[:12]!r}", STREAM, says(*streamed(b"data: " + body + b"\n\n", DONE)))
    wrong = {"stream": "yes", "messages": 3, "n": [], "temperature": "hot", "stream_options": 1}
    for said in ({"model": 5}, wrong, b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud800b"}]}'):
        yield Case(f"asked {said!r}", post(body=said), says(whole(ERROR, status=400)))
    yield Case("a character in halves", STREAM, halves)


def halves(asked: Asked) -> list[Step]:
    """As servers send a character that they cut in two, which UTF-8 cannot hold."""
    ids = b'"token_ids":[%d],"logprobs":{"content":[{"token":"x","logprob":-1}]}'
    nothing = b'"token_ids":null,"logprobs":null'
    tokens = [ids % i if b'"return_token_ids"' in asked.body else nothing for i in range(2)]
    texts = (b'"a\\ud83d"', b'"\\ude00b"')
    said = [b'{"index":0,"delta":{"content":%s},%s}' % pair for pair in zip(texts, tokens, strict=True)]
    return streamed(*(b'data: {"choices":[%s]}\n\n' % choice for choice in said), DONE)
