"""Asks a vLLM for the same message twice: by its own /v1/messages, and by its chat route as the proxy translates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from lightning_proxy.proxy.dialects.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.dialects.as_chat.translation import PROBES, Template, learn
from lightning_proxy.proxy.dialects.chat import ChatApi
from lightning_proxy.proxy.dialects.messages import MessagesApi
from lightning_proxy.proxy.dialects.stream import Injection
from support.responses_twice import events, post

Json = dict[str, Any]


def template_of(url: str, model: str) -> Template:
    """What the server's template is known to make of a request, by the routes that say so."""
    root = url.removesuffix("/v1")
    answers = {name: post(root + path, body | {"model": model}) for name, (path, body) in PROBES.items()}
    return learn({name: (status, json.loads(answer)) for name, (status, answer) in answers.items()})


def native(url: str, body: Json) -> tuple[int, Any]:
    status, answer = post(f"{url}/messages", body)
    return status, comparable(events(answer) if status == 200 and body["stream"] else json.loads(answer))


def through_chat(url: str, body: Json, template: Template) -> tuple[int, Any]:
    """As the proxy does it: with what it asks for on top."""
    status, answer = post(f"{url}/chat/completions", ChatApi("chat").inject(MessagesTranslator(body).chat(template))[0])
    if status != 200:
        return status, comparable(MessagesTranslator(body).refusal(json.loads(answer)))
    translated = MessagesTranslator(body)
    if not body["stream"]:
        return status, comparable(translated.answer(json.loads(answer)))
    streamed = [event for chunk in events(answer) for event in translated.feed(chunk)]
    return status, comparable([*streamed, *translated.end()])


def prompts(url: str, body: Json, template: Template) -> tuple[Any, Any]:
    """The status and the tokens that either route renders."""
    chat = MessagesTranslator(body).chat(template)
    rendered = [post(f"{url}/{path}/render", asks) for path, asks in (("messages", body), ("chat/completions", chat))]
    own, ours = ((status, json.loads(answer).get("token_ids")) for status, answer in rendered)
    return own, ours


def comparable(answer: Any) -> Any:
    """Without ids; a stream as the order of its events, and what they say together."""
    if isinstance(answer, dict):
        text = json.dumps(answer)
    else:
        text = json.dumps([list(_kinds(answer)), answer[:1], answer[-2:], assembled(answer)])
    text = re.sub(r"\b(chatcmpl|chatcmpl-tool)-[0-9a-f-]{8,}", "ID", text)
    return json.loads(re.sub(r'"signature": "[0-9a-f]{32}"', '"signature": "S"', text))


def assembled(events: list[Json]) -> Any:
    stream = MessagesApi().stream(Injection())
    for event in events:
        stream.take(b"", event)
    return stream.response()


def _kinds(events: list[Json]) -> Iterator[tuple[Any, ...]]:
    """The types of the events in order. One delta stands for several of a kind: vLLM joins tokens as they come."""
    before = None
    for event in events:
        kind = (event["type"], event.get("index"), event.get("delta", event.get("content_block", {})).get("type"))
        if kind != before or kind[0] != "content_block_delta":
            yield kind
        before = kind
