"""Conversations with a real vLLM, through a proxy that sends turns as exact tokens and through one that sends text.

The model may say one sentence only, but in which tokens is sampled: seldom those that its text is tokenised as again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import anthropic
import openai
import pytest

from contract.real import System
from support.token_continuity import SENTENCE, Json, Served, converse, say, two_proxies

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(900)]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Reykjavik"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


@pytest.fixture(scope="module")
def served(merged: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with two_proxies(merged, tmp_path_factory.mktemp("continuity")) as found:
        yield found


def talk(client: openai.OpenAI) -> None:
    told = converse(client, stream=True)
    assert [told[0], told[2], told[3]] == [SENTENCE, SENTENCE[: SENTENCE.index("lazy")], SENTENCE]
    assert SENTENCE.startswith(told[1] or "-")


def with_tools(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "How is it in Reykjavik?"}]
    for _ in range(2):
        choice = say(client, messages, CALL, stream=True, tools=[WEATHER])
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.finish_reason) == ("get_weather", "tool_calls")
        assert call.function.arguments.replace(" ", "") == '{"city":"Reykjavik"}'
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
    assert say(client, messages, SENTENCE, stream=True, tools=[WEATHER]).message.content == SENTENCE


def over_messages(client: openai.OpenAI) -> None:
    shape, messages = {"format": {"type": "json_schema", "schema": {"enum": [SENTENCE]}}}, list[Any]()
    with anthropic.Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key="unused") as own:
        for turn in range(3):
            messages.append({"role": "user", "content": f"Say it again, {turn} times."})
            asked: Json = {"model": "policy", "max_tokens": 200, "messages": messages, "system": "You are brief."}
            with own.messages.stream(**asked, extra_body={"output_config": shape}) as events:
                message: Any = events.get_final_message()
            assert (json.loads(message.content[0].text), message.stop_reason) == (SENTENCE, "end_turn")
            messages.append({"role": "assistant", "content": message.content})


def over_responses(client: openai.OpenAI, *, by_id: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "How is it in Reykjavik?"}]
    more: Json = {"instructions": "You are brief.", "tools": [{"type": "function", **WEATHER["function"]}]}
    for text in (CALL, SENTENCE, SENTENCE):
        more["extra_body"] = {"structured_outputs": {"choice": [text]}}
        *_, last = client.responses.create(model="policy", input=items, stream=True, max_output_tokens=200, **more)
        (said,) = last.response.output
        items.append(said.model_dump(exclude_none=True))
        if by_id:
            items, more["previous_response_id"] = [], last.response.id
        if text == CALL:
            assert said.name == "get_weather"
            items.append({"type": "function_call_output", "call_id": said.call_id, "output": "Rain."})
        else:
            assert (last.response.output_text, last.response.status) == (SENTENCE, "completed")
            items.append({"role": "user", "content": "Say it again."})


TALKS: dict[str, Callable[[openai.OpenAI], None]] = {
    "chat": talk, "tools": with_tools, "messages": over_messages,
    "responses": partial(over_responses, by_id=False), "responses by id": partial(over_responses, by_id=True),
}  # fmt: skip


@pytest.mark.parametrize("name", TALKS)
def test_a_conversation_is_one_row_only_as_exact_tokens(served: Served, name: str) -> None:
    rollout = name.replace(" ", "-")
    for way in served.url:
        TALKS[name](served.client(way, rollout))
    assert served.rows("exact", rollout) == 1
    assert served.rows("text", rollout) > 1
    for call in served.calls("exact", rollout) if name == "chat" else ():
        assert call.usage and call.usage["prompt_tokens"] == len(call.prompt_token_ids)


def test_answers_have_the_shape_that_they_have_as_text(served: Served) -> None:
    answers = {}
    for way in served.url:
        client, messages = served.client(way, "shape"), [{"role": "user", "content": "Hello."}]
        messages.append(say(client, messages, SENTENCE, stream=False).message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "Again."})
        asked: Json = {"model": "policy", "messages": messages, "temperature": 0, "max_tokens": 5, "logprobs": True}
        whole = client.chat.completions.create(**asked)
        streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [keys(chunk.model_dump()) for chunk in streamed]  # a chunk has more than one token on a busy machine
        answers[way] = [keys(whole.model_dump()), *(shape for shape, _ in groupby(chunks))]
    assert answers["exact"] == answers["text"]


def keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    return [keys(item) for item in value[:1]] if isinstance(value, list) else type(value).__name__
