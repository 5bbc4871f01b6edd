"""Asks a vLLM for the same twice: by its own /v1/responses or /v1/messages, and by its chat route as the proxy does."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from lightning_proxy.proxy.dialects.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.dialects.as_chat.responses import ResponsesTranslator
from lightning_proxy.proxy.dialects.as_chat.translation import MALFORMED, PROBES, Template, Translator, learn
from lightning_proxy.proxy.dialects.chat import ChatApi
from lightning_proxy.proxy.dialects.messages import MessagesApi
from lightning_proxy.proxy.dialects.stream import Injection

Json = dict[str, Any]


class Answer(NamedTuple):
    status: int
    events: list[Json]
    """The one answer, or a stream's events."""
    tokens: list[list[int]]
    """The prompt's and the answer's."""


def assert_same(vllm: str, body: Json) -> Json:
    """The whole answers, or the events and what they amount to, and the tokens of prompt and answer. Return ours."""
    for _ in range(10):  # where it falls behind, vLLM joins tokens in one piece: then both are asked again
        own, ours = native(vllm, body), through_chat(vllm, body)
        if same(told(ours.events)) == same(told(own.events)):
            break
    assert own.status == ours.status == 200
    assert ours.tokens == own.tokens
    assert same(told(ours.events)) == same(told(own.events))
    last = ours.events[-1]
    return dict(last.get("response", last))


def native(vllm: str, body: Json) -> Answer:
    status, text = post(f"{vllm}/responses", body | {"enable_response_messages": True})
    own = events(text)
    response = own[-1].get("response", own[-1])
    seen = [response.get(name) or [] for name in ("input_messages", "output_messages")]
    response |= dict.fromkeys(("input_messages", "output_messages"))
    return Answer(status, own, [[token for message in messages for token in message["tokens"]] for messages in seen])


def through_chat(vllm: str, body: Json) -> Answer:
    """What the agent gets when the proxy asks the chat route, for tokens too."""
    try:
        ResponsesTranslator(body).chat(Template())
    except MALFORMED:  # it goes unchanged
        return native(vllm, body)
    status, ours, chunks = translated(ResponsesTranslator, vllm, body, Template())
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    prompt = [chunk["prompt_token_ids"] for chunk in chunks[:1]]
    return Answer(status, ours, [*prompt, [token for choice in choices for token in choice.get("token_ids") or []]])


def translated(kind: type[Translator], url: str, body: Json, template: Template) -> tuple[int, list[Json], list[Json]]:
    """The status, what the proxy makes of the chat route's answer or chunks, and those."""
    status, text = post(f"{url}/chat/completions", ChatApi("chat").inject(kind(body).chat(template))[0])
    chunks, translator = events(text), kind(body)
    if status != 200:
        return status, [translator.refusal(chunks[0])], []
    if not body.get("stream"):
        return status, [translator.answer(chunks[0])], chunks
    return status, [*(event for chunk in chunks for event in translator.feed(chunk)), *translator.end()], chunks


def events(text: str) -> list[Json]:
    """A stream's, or the one answer."""
    data = (line.removeprefix("data: ") for line in text.split("\n") if line.startswith(("data: ", "{")))
    return [json.loads(line) for line in data if line != "[DONE]"]


def told(events: list[Json]) -> list[Json]:
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers in ([], list(range(len(events))))
    return in_one_piece(events)


def in_one_piece(events: list[Json]) -> list[Json]:
    """The events without their numbers; pieces that vLLM joins where it falls behind are joined."""
    unnumbered = [event | {"sequence_number": 0} for event in events]
    groups = groupby(unnumbered, lambda event: (event.get("type"), event.get("item_id")))
    return [event for _, group in groups for event in _joined([*group])]


def _joined(group: list[Json]) -> Iterator[Json]:
    if "delta" not in group[0]:
        yield from group
        return
    logprobs = [token for event in group for token in event.get("logprobs") or []]
    yield {**group[0], "delta": "".join(event["delta"] for event in group), "logprobs": logprobs}


def same(value: Any) -> Any:
    """The value with ids named in order of appearance, without times, and without what chat does not tell of caches."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    names: dict[str, str] = {}
    number = lambda found: names.setdefault(found[0], f"{found[1]}-{len(names)}")  # noqa: E731
    text = re.sub(r"\b(resp|msg|rs|fc|ctc|chatcmpl-tool)[_-][0-9a-f]{16}\b", number, text)
    text = re.sub(r'"(created_at|cached_tokens|cache_write_tokens)": \d+', r'"\1": 0', text)
    return json.loads(text)


def post(url: str, body: Json) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(url: str) -> bytes:
    """Nothing, where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bytes(answer.read())
    except OSError:
        return b""


# Messages


def template_of(url: str, model: str) -> Template:
    """What the server's template is known to make of a request, by the routes that say so."""
    root = url.removesuffix("/v1")
    answers = {name: post(root + path, body | {"model": model}) for name, (path, body) in PROBES.items()}
    return learn({name: (status, json.loads(answer)) for name, (status, answer) in answers.items()})


def native_message(url: str, body: Json) -> tuple[int, Any]:
    status, answer = post(f"{url}/messages", body)
    return status, comparable(events(answer))


def message_through_chat(url: str, body: Json, template: Template) -> tuple[int, Any]:
    """As the proxy does it: with what it asks for on top."""
    status, ours, _ = translated(MessagesTranslator, url, body, template)
    return status, comparable(ours)


def prompts(url: str, body: Json, template: Template) -> tuple[Any, Any]:
    """The status and the tokens that either route renders."""
    chat = MessagesTranslator(body).chat(template)
    rendered = [post(f"{url}/{path}/render", asks) for path, asks in (("messages", body), ("chat/completions", chat))]
    own, ours = ((status, json.loads(answer).get("token_ids")) for status, answer in rendered)
    return own, ours


def comparable(answer: list[Json]) -> Any:
    """Without ids; a stream as the order of its events, and what they say together."""
    is_stream = len(answer) > 1
    shown = [[*_kinds_of_events(answer)], answer[:1], answer[-2:], assembled(answer)] if is_stream else answer[0]
    text = re.sub(r"\b(chatcmpl|chatcmpl-tool)-[0-9a-f-]{8,}", "ID", json.dumps(shown))
    return json.loads(re.sub(r'"signature": "[0-9a-f]{32}"', '"signature": "S"', text))


def assembled(events: list[Json]) -> Any:
    stream = MessagesApi().stream(Injection())
    for event in events:
        stream.take(b"", event)
    return stream.response()


def _kinds_of_events(events: list[Json]) -> Iterator[tuple[Any, ...]]:
    """The types of the events in order. One delta stands for several of a kind: vLLM joins tokens as they come."""
    before = None
    for event in events:
        kind = (event["type"], event.get("index"), event.get("delta", event.get("content_block", {})).get("type"))
        if kind != before or kind[0] != "content_block_delta":
            yield kind
        before = kind
