"""Messages and Responses through chat: what the tests with a real vLLM (tests/end_to_end) cannot make it say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.dialects.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.dialects.as_chat.responses import ResponsesTranslator
from lightning_proxy.proxy.dialects.as_chat.translation import (
    MALFORMED,
    PROBES,
    Template,
    TemplateUnknown,
    Untranslatable,
    learn,
)
from lightning_proxy.proxy.gateway.through_chat import Templates
from lightning_proxy.proxy.gateway.upstream import Request, Route
from support.twice import assembled

Json = dict[str, Any]
HI = {"role": "user", "content": "Hi"}
ASKED: Json = {"model": "policy", "max_tokens": 8, "messages": [HI]}
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 6}}


def called(arguments: str, index: int = 0) -> Json:
    function = {"name": f"tool{index}", "arguments": arguments}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": function}


def answer(finish: str = "stop", stop: Any = None, **message: Any) -> Json:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, "stop_reason": stop}
    return {"id": "chatcmpl-1", "created": 7, "model": "policy", "choices": [choice], "usage": USAGE}


def streamed(stream: Any, *deltas: Json, finish: str = "stop", stop: Any = None) -> list[Json]:
    """The events for an answer in these pieces, as vLLM sends it: also where its parser holds text back."""
    begins = [{"delta": delta} for delta in ({"role": "assistant", "content": ""}, {}, *deltas)]
    ends = {"delta": {}, "finish_reason": finish, "stop_reason": stop}
    parts: list[Json] = [*({"choices": [one]} for one in (*begins, ends)), {"choices": [], "usage": USAGE}]
    top = {"id": "chatcmpl-1", "created": 7, "model": "policy"}
    return [*(event for part in parts for event in stream.feed(top | part)), *stream.end()]


def test_why_an_answer_ends() -> None:
    for finish, stop, arguments, expected in (
        ("stop", None, None, ("end_turn", None)),
        ("stop", "END", None, ("stop_sequence", "END")),
        ("stop", 7, None, ("end_turn", None)),  # a token
        ("length", "END", None, ("max_tokens", None)),
        ("length", None, '{"a": 1, "b', ("max_tokens", None)),
        ("abort", None, None, (None, None)),
        ("stop", None, "{}", ("tool_use", None)),
        ("stop", None, "[1]", ("tool_use", None)),  # no object, but not lost
        ("tool_calls", "END", "{}", ("tool_use", None)),
        ("tool_calls", "END", '{"a', ("stop_sequence", "END")),  # a call that is cut must not run
    ):
        calls = [] if arguments is None else [called(arguments)]
        said = MessagesTranslator(ASKED).answer(answer(finish, stop, content="Hello", tool_calls=calls))
        assert (said.get("stop_reason"), said.get("stop_sequence")) == expected
        pieces: list[Json] = [{"content": "Hello"}, {"tool_calls": calls}]
        events = streamed(MessagesTranslator(ASKED), *pieces, finish=finish, stop=stop)
        assert events[-2]["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}
        if arguments and arguments != "{}":
            assert said["content"][-1]["input"] == {"INVALID_JSON": arguments}, "what was cut is kept"


def test_a_stream_has_one_open_block_at_a_time() -> None:
    events = streamed(
        MessagesTranslator(ASKED),
        {"reasoning": "Hm"},
        {},
        {"reasoning": ".", "content": "I "},
        {"content": "add.", "tool_calls": [called("")]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"content": "held", "tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [called("{}", 1)]},
        {"content": "the end"},
    )
    kinds = [(event["type"].removeprefix("content_block_"), event.get("index")) for event in events]
    # Thinking with its signature, text, a call, text that came inside the call, another call, text.
    pieces = enumerate((3, 2, 2, 1, 1, 1))
    blocks = [one for i, n in pieces for one in [("start", i), *[("delta", i)] * n, ("stop", i)]]
    assert kinds == [("message_start", None), *blocks, ("message_delta", None), ("message_stop", None)]
    thinking, *others = assembled(events)["content"]
    assert (thinking["thinking"], len(thinking["signature"])) == ("Hm.", 32)
    assert others == [
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "call_0", "name": "tool0", "input": {"a": 1}},
        {"type": "text", "text": "held"},
        {"type": "tool_use", "id": "call_1", "name": "tool1", "input": {}},
        {"type": "text", "text": "the end"},
    ]


def test_an_answer_that_is_sent_back_is_what_was_said() -> None:
    for chat in (
        answer(content="Hello"),
        answer(content=None),
        answer(reasoning="Hm.", content="Hello", tool_calls=[called('{"a":1,"b":[]}'), called("", 1)]),
        answer("length", tool_calls=[called('{"é')]),
    ):
        said = MessagesTranslator(ASKED).answer(chat)
        again = ASKED | {"messages": [HI, {"role": "assistant", "content": said["content"]}, HI]}
        assert MessagesTranslator(again).chat(Template())["messages"][1] == MessagesTranslator.history(said)


def test_what_depends_on_the_template_waits_for_it() -> None:
    inline = {"role": "system", "content": "Be kind."}
    body = ASKED | {"system": "Be brief.", "messages": [HI, inline], "tools": [], "thinking": {"type": "disabled"}}
    for known in (Template(), Template(True, "none"), Template(True, None, True), Template(None, "none", True)):
        with pytest.raises(TemplateUnknown):
            MessagesTranslator(body).chat(known)
    chat = MessagesTranslator(body).chat(Template(True, "low", True))
    assert chat["messages"] == [{"role": "system", "content": "Be brief.Be kind."}, HI]
    assert (chat["reasoning_effort"], "tools" in chat) == ("low", False)
    chat = MessagesTranslator(body).chat(Template(False, "none", True))
    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, HI, inline]


def probed(prompts: Any) -> Template:
    """What is learnt where every prompt is one token, but for those that are named; None: refused."""
    answers = {}
    for name, (path, _) in PROBES.items():
        prompt = prompts.get(name, [1])
        shown = {"input_tokens": len(prompt or ())} if path.endswith("count_tokens") else {"prompt_token_ids": prompt}
        answers[name] = (400, {"error": {"message": "no"}}) if prompt is None else (200, shown)
    return learn(answers)


def test_the_template_is_learnt_from_its_prompts() -> None:
    for prompts, expected in (
        ({}, Template(None, "low", True)),  # it shows no system messages
        ({"inline": [1, 2], "merged": [1, 2]}, Template(True, "low", True)),
        ({"inline": [1, 2], "merged": [1, 2], "in place": None}, Template(True, "low", True)),
        ({"inline": [1, 2], "in place": [1, 2]}, Template(False, "low", True)),
        ({"none": [2]}, Template(None, "none", True)),
        ({"none": None}, Template(None, "low", True)),
        ({"none": [2, 3]}, Template(None, None, True)),  # the server was told another
        ({"no tools": [1, 2]}, Template(None, "low", False)),
        ({"no tools": None}, Template(None, "low", False)),
    ):
        assert probed(prompts) == expected, prompts
    assert learn(dict.fromkeys(PROBES, (404, {}))) == Template()


def test_what_vllm_refuses_or_reads_otherwise_goes_to_its_own_route() -> None:
    for changed in (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"messages": [{"role": "tool", "content": "3"}]},
        {"messages": "Hi"},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
    ):
        with pytest.raises(MALFORMED):
            MessagesTranslator(ASKED | changed).chat(Template())


class PlayedUpstreams:
    """Answers each probe with this status, as soon as it may."""

    def __init__(self) -> None:
        self.asked, self.status, self.go = 0, 200, asyncio.Event()

    async def ask(self, _: UpstreamConfig, request: Request) -> tuple[int, bytes]:
        assert b'"base"' in request.body
        self.asked += 1
        await self.go.wait()
        return self.status, b'{"prompt_token_ids": [1], "input_tokens": 1}'


async def test_a_template_is_asked_for_once_or_until_the_server_can_say_it() -> None:
    learnt, request = Template(None, "low", True), Request("POST", "/v1/messages", b"", [], b"", False)
    upstreams: Any = PlayedUpstreams()
    route = Route(UpstreamConfig(name="up", base_url="http://127.0.0.1:9/v1"), "base", 0)
    templates = Templates(upstreams)
    first, *others = (asyncio.create_task(templates.learned(route, request)) for _ in range(5))
    while upstreams.asked < len(PROBES):
        await asyncio.sleep(0)
    first.cancel()  # its agent left
    upstreams.go.set()
    assert await asyncio.gather(*others) == [learnt] * 4
    assert upstreams.asked == len(PROBES)
    for refused, times in ((503, 2), (401, 2), (404, 1)):  # 401: whoever came first has no key
        templates, upstreams.asked = Templates(upstreams), 0
        for upstreams.status in (refused, 200):
            known = await templates.learned(route, request)
            assert known == (learnt if (times, upstreams.status) == (2, 200) else Template())
        assert upstreams.asked == times * len(PROBES)


# Responses

SAY = {"role": "user", "content": "add"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "1"}


def responses(**body: Any) -> ResponsesTranslator:
    return ResponsesTranslator({"model": "m", "input": [SAY]} | body)


def shown(earlier: Any = (), **body: Any) -> list[Json]:
    """The messages of the chat request."""
    return list(responses(**body).chat(Template(), earlier)["messages"])


def test_an_answer_comes_back_as_the_message_that_was_said_and_a_stream_ends_with_all_of_it() -> None:
    messages: list[Json] = [
        {"content": "hi"},
        {"reasoning": "so", "content": "hi"},
        {"reasoning": "so", "content": "hi", "tool_calls": [CALL, CALL | {"id": "call_2"}]},
        {"tool_calls": [CALL]},
    ]
    for message in messages:
        said = {"role": "assistant", **message}
        deltas = [{name: letter} for name in ("reasoning", "content") for letter in message.get(name, "")]
        for i, call in enumerate(message.get("tool_calls", ())):
            begin, rest = ({"function": {"name": "add", "arguments": part}} for part in ('{"a"', ": 1}"))
            deltas += [{"tool_calls": [call | begin | {"index": i}]}, {"tool_calls": [rest | {"index": i}]}]
        whole = responses(request_id="r", tools=[ADD]).answer(answer(**message))
        last = streamed(responses(request_id="r", tools=[ADD]), *deltas)[-1]
        assert last["type"] == "response.completed"
        for given in (whole, last["response"]):
            assert ResponsesTranslator.history(given) == said
            assert shown(input=[SAY, *given["output"], RESULT])[1] == said
            later = shown([SAY, *given["output"]], input=[RESULT], previous_response_id=given["id"])
            assert later == [SAY, said, {"role": "tool", "tool_call_id": "call_1", "content": "1"}]
            for item in given["output"]:
                del item["id"]
                item["status"] = "completed"  # vLLM's whole answers leave that of reasoning out
        assert last["response"] == whole


def test_what_goes_before_is_shown_as_it_was_said() -> None:
    # vLLM keeps the first part of a message, and fails on a refusal.
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    refusal = [{"type": "refusal", "refusal": "No."}]
    items = [{"type": "message", "role": "assistant", "content": content} for content in (parts, refusal)]
    assert [m["content"] for m in shown(input=[*items, SAY])] == ["ab", "No.", "add"]
    # A chat message has all of its text before its calls.
    text = {"type": "message", "role": "assistant", "content": "b"}
    call = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
    (_, said) = shown(input=[SAY, text | {"content": "a"}, call, text])
    assert said == {"role": "assistant", "content": "ab", "tool_calls": [CALL]}
    reference = [{"type": "item_reference", "id": "msg_1"}]
    referred = shown([SAY | {"id": "msg_1"}], previous_response_id="r", input=reference, instructions="Be brief.")
    assert (referred[0]["role"], referred[-1]) == ("system", SAY)


def test_a_limit_is_told_also_where_chat_only_tells_of_calls() -> None:
    cut = responses(tools=[ADD], max_output_tokens=4).answer(answer("tool_calls", content=None, tool_calls=[CALL]))
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_what_chat_cannot_do_is_left_to_its_own_route() -> None:
    bodies: list[Json] = [
        {"background": True},
        {"prompt": {"id": "p"}},
        {"input": []},
        {"input": [{"type": "mcp_call", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        {"input": [{"type": "item_reference", "id": "unknown"}]},
        {"previous_response_id": "resp_1"},
        {"tool_choice": "required"},
        {"tools": [ADD], "tool_choice": {"type": "web_search_preview"}},
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "subtract"}},
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}, "structured_outputs": {"choice": ["a"]}},
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
    ]
    for body in bodies:
        with pytest.raises(Untranslatable):
            shown(**body)
