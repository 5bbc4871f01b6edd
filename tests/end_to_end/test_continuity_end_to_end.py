"""Conversations with a real vLLM, through a proxy that sends turns as exact tokens and through one that sends text.

The model may say one sentence only, but in which tokens is sampled: seldom those that its text is tokenised as again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import anthropic
import openai
import pytest

from contract.real import System
from support.token_continuity import SENTENCE, Json, Served, converse, say, two_proxies

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(900)]

# A stream says all that a whole answer says, so whole ones are for test-all.
WHOLE_OR_STREAM = pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Reykjavik"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def served(merged: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with two_proxies(merged, tmp_path_factory.mktemp("continuity")) as found:
        yield found


@WHOLE_OR_STREAM
def test_a_conversation_is_one_row_only_as_exact_tokens(served: Served, stream: bool) -> None:
    name = f"talk-{stream}"
    told = {way: converse(served.client(way, name), stream=stream) for way in served.url}
    for texts in told.values():
        assert [texts[0], texts[2], texts[3]] == [SENTENCE, SENTENCE[: SENTENCE.index("lazy")], SENTENCE]
        assert SENTENCE.startswith(texts[1] or "-")
    assert served.rows("exact", name) == 1
    assert served.rows("text", name) > 1
    for call in served.calls("exact", name):
        assert call.usage and call.usage["prompt_tokens"] == len(call.prompt_token_ids)


@WHOLE_OR_STREAM
def test_tool_calls_and_their_results_stay_in_the_row(served: Served, stream: bool) -> None:
    name = f"tools-{stream}"
    for way in served.url:
        client, messages = served.client(way, name), [{"role": "user", "content": "How is it in Reykjavik?"}]
        for _ in range(2):
            choice = say(client, messages, CALL, stream=stream, tools=[WEATHER])
            (call,) = choice.message.tool_calls
            assert (call.function.name, choice.finish_reason) == ("get_weather", "tool_calls")
            assert call.function.arguments.replace(" ", "") == '{"city":"Reykjavik"}'
            messages.append(choice.message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
        assert say(client, messages, SENTENCE, stream=stream, tools=[WEATHER]).message.content == SENTENCE
    assert served.rows("exact", name) == 1
    assert served.rows("text", name) > 1


@WHOLE_OR_STREAM
def test_a_conversation_over_messages_is_one_row_only_as_exact_tokens(served: Served, stream: bool) -> None:
    shape = {"format": {"type": "json_schema", "schema": {"enum": [SENTENCE]}}}
    for way in served.url:
        client = anthropic.Anthropic(base_url=f"{served.url[way]}/rollouts/messages-{stream}", api_key="unused")
        served.clients.append(client)
        messages: list[Any] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"Say it again, {turn} times."})
            asked: Json = {"model": "policy", "max_tokens": 200, "messages": messages, "system": "You are brief."}
            asked["extra_body"] = {"output_config": shape}
            if stream:
                with client.messages.stream(**asked) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**asked)
            assert (json.loads(message.content[0].text), message.stop_reason) == (SENTENCE, "end_turn")
            messages.append({"role": "assistant", "content": message.content})
    assert served.rows("exact", f"messages-{stream}") == 1
    assert served.rows("text", f"messages-{stream}") > 1


@pytest.mark.parametrize("by_id", [False, True])
@WHOLE_OR_STREAM
def test_a_conversation_over_responses_is_one_row_only_as_exact_tokens(
    served: Served, stream: bool, by_id: bool
) -> None:
    name = f"responses-{stream}-{by_id}"
    for way in served.url:
        client, items, previous = served.client(way, name), [], None
        for turn in range(3):
            said: list[Any] = [{"role": "user", "content": f"Say it again, {turn} times."}]
            items += said
            asked: Json = {"model": "policy", "max_output_tokens": 200, "instructions": "You are brief."}
            asked |= {"input": said, "previous_response_id": previous} if by_id and previous else {"input": items}
            asked["extra_body"] = {"structured_outputs": {"choice": [SENTENCE]}}
            if stream:
                *_, last = client.responses.create(**asked, stream=True)
                response = last.response
            else:
                response = client.responses.create(**asked)
            assert (response.output_text, response.status) == (SENTENCE, "completed")
            items += [item.model_dump(exclude_none=True) for item in response.output]
            previous = response.id
    assert served.rows("exact", name) == 1
    assert served.rows("text", name) > 1


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


def test_an_edited_history_goes_as_text_and_errors_are_vllms_own(served: Served) -> None:
    before = served.outcomes("exact")
    client, messages = served.client("exact", "edits"), [{"role": "user", "content": "Hello."}]
    say(client, messages, SENTENCE, stream=False)
    messages += [{"role": "assistant", "content": "Something else."}, {"role": "user", "content": "Again."}]
    say(client, messages, SENTENCE, stream=False)
    after = served.outcomes("exact")
    assert {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k)} == {"first": 1, "edited": 1}
    messages = [{"role": "user", "content": "Hello."}]
    messages.append(say(client, messages, SENTENCE, stream=False).message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "no " * 2000})
    errors = []
    for way in served.url:
        with pytest.raises(openai.BadRequestError) as caught:
            served.client(way, "edits").chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        errors.append(caught.value.body)
    assert errors[0] == errors[1]
    assert "maximum context length" in str(errors[0])


def keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    return [keys(item) for item in value[:1]] if isinstance(value, list) else type(value).__name__
