"""What the tests with a real vLLM cannot make it say: tests/end_to_end/test_messages_as_chat.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.dialects.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.dialects.as_chat.translation import MALFORMED, PROBES, Template, TemplateUnknown, learn
from lightning_proxy.proxy.gateway.attempts import Upstreams
from lightning_proxy.proxy.gateway.through_chat import Templates
from lightning_proxy.proxy.gateway.upstream import Request, Route, make_session
from support.messages_twice import assembled

Json = dict[str, Any]

HI = {"role": "user", "content": "Hi"}
ASKED: Json = {"model": "policy", "max_tokens": 8, "messages": [HI]}
USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}


def called(arguments: str, index: int = 0) -> Json:
    function = {"name": f"tool{index}", "arguments": arguments}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": function}


def answer(finish: str = "stop", stop: Any = None, **message: Any) -> Json:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, "stop_reason": stop}
    return {"id": "chatcmpl-1", "model": "policy", "choices": [choice], "usage": USAGE}


def whole(chat: Json) -> Json:
    return MessagesTranslator(ASKED).answer(chat)


def chunk(delta: Json, finish: str | None = None, stop: Any = None) -> Json:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop}]}


def streamed(*deltas: Json, finish: Json | None = None) -> list[Json]:
    """The events for an answer in these pieces."""
    chunks = [chunk({"role": "assistant", "content": ""}), *map(chunk, deltas), finish or chunk({}, "stop")]
    stream = MessagesTranslator(ASKED)
    events = [
        event
        for part in [*chunks, {"choices": [], "usage": USAGE}]
        for event in stream.feed({"id": "chatcmpl-1", "model": "policy", **part})
    ]
    return [*events, *stream.end()]


def test_arguments_that_max_tokens_cut_are_kept() -> None:
    said = whole(answer("length", tool_calls=[called('{"a": 1, "b')]))
    assert said["content"][0]["input"] == {"INVALID_JSON": '{"a": 1, "b'}
    assert said["stop_reason"] == "max_tokens"


def test_why_an_answer_ends() -> None:
    for finish, stop, arguments, expected in (
        ("stop", None, None, ("end_turn", None)),
        ("stop", "END", None, ("stop_sequence", "END")),
        ("stop", 7, None, ("end_turn", None)),  # a token
        ("length", "END", None, ("max_tokens", None)),
        ("abort", None, None, (None, None)),
        ("stop", None, "{}", ("tool_use", None)),
        ("tool_calls", "END", "{}", ("tool_use", None)),
        ("tool_calls", "END", '{"a', ("stop_sequence", "END")),  # a call that is cut must not run
    ):
        calls = [] if arguments is None else [called(arguments)]
        said = whole(answer(finish, stop, content="Hello", tool_calls=calls))
        assert (said.get("stop_reason"), said.get("stop_sequence")) == expected
        events = streamed({"content": "Hello"}, {"tool_calls": calls}, finish=chunk({}, finish, stop))
        assert events[-2]["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}


def test_a_stream_has_one_open_block_at_a_time() -> None:
    events = streamed(
        {"reasoning": "Hm"},
        {},  # vLLM sends these while a parser holds text back
        {"reasoning": ".", "content": "I "},
        {"content": "add.", "tool_calls": [called("")]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"content": "held", "tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [called("{}", 1)]},
        {"content": "the end"},
    )
    kinds = [(event["type"], event.get("index")) for event in events]
    start, piece, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert kinds == [
        ("message_start", None),
        (start, 0), (piece, 0), (piece, 0), (piece, 0), (stop, 0),  # thinking, and its signature
        (start, 1), (piece, 1), (piece, 1), (stop, 1),
        (start, 2), (piece, 2), (piece, 2), (stop, 2),
        (start, 3), (piece, 3), (stop, 3),  # text that came inside the call
        (start, 4), (piece, 4), (stop, 4),
        (start, 5), (piece, 5), (stop, 5),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
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
        said = whole(chat)
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


def probed(**prompts: Any) -> Template:
    """What is learnt where every prompt is one token, but for those that are named; None: refused."""
    ids = {name: [1] for name in PROBES} | {name.replace("_", " "): prompt for name, prompt in prompts.items()}
    refused = (400, {"error": {"message": "no"}})
    counted = {name for name, (path, _) in PROBES.items() if path.endswith("count_tokens")}
    return learn({
        name: refused if prompt is None
        else (200, {"input_tokens": len(prompt)} if name in counted else {"prompt_token_ids": prompt})
        for name, prompt in ids.items()
    })  # fmt: skip


def test_the_template_is_learnt_from_its_prompts() -> None:
    assert probed().merges_system is None  # it shows no system messages
    assert probed(inline=[1, 2], merged=[1, 2]).merges_system is True
    assert probed(inline=[1, 2], merged=[1, 2], in_place=None).merges_system is True
    assert probed(inline=[1, 2], in_place=[1, 2]).merges_system is False
    assert probed().disabled_effort == "low"
    assert probed(none=[2]).disabled_effort == "none"
    assert probed(none=None).disabled_effort == "low"
    assert probed(none=[2, 3]).disabled_effort is None  # the server was told another
    assert (probed().ignores_no_tools, probed(no_tools=[1, 2]).ignores_no_tools) == (True, False)
    assert probed(no_tools=None).ignores_no_tools is False
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


# What a server's template makes of Messages is asked once, and again where the server could not say it yet.


def asking(app: web.Application, statuses: list[int] | None = None, go: asyncio.Event | None = None) -> list[str]:
    """Answer what a template is learnt by; returns the models that were asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["model"])
        if go is not None:
            await go.wait()
        return web.json_response({"prompt_token_ids": [1], "input_tokens": 1}, status=statuses[0] if statuses else 200)

    app.router.add_post("/v1/{rest:.*}", answer)
    return asked


def route(server: TestServer) -> Route:
    return Route(UpstreamConfig(name="up", base_url=str(server.make_url("/v1"))), "base", 0)


REQUEST = Request("POST", "/v1/messages", b"", [], b"", False)
LEARNT = Template(None, "low", True)


async def test_a_template_is_asked_for_until_the_server_can_say_it() -> None:
    for statuses, known, times in (
        ([200, 200], [LEARNT] * 2, 1),
        ([503, 200], [Template(), LEARNT], 2),
        ([401, 200], [Template(), LEARNT], 2),  # whoever came first has no key
        ([404, 200], [Template()] * 2, 1),  # another server, or an older one
    ):
        asked = asking(app := web.Application(), statuses)
        async with TestServer(app) as server, make_session() as session:
            templates = Templates(Upstreams(session))
            for expected in known:
                assert await templates.learned(route(server), REQUEST) == expected
                statuses.pop(0)
        assert asked == ["base"] * times * len(PROBES)


async def test_requests_that_come_at_once_ask_once() -> None:
    asked = asking(app := web.Application(), go=(go := asyncio.Event()))
    async with TestServer(app) as server, make_session() as session:
        templates = Templates(Upstreams(session))
        first, *others = (asyncio.create_task(templates.learned(route(server), REQUEST)) for _ in range(5))
        while len(asked) < len(PROBES):
            await asyncio.sleep(0.001)
        first.cancel()  # its agent left
        go.set()
        assert await asyncio.gather(*others) == [LEARNT] * 4
    assert len(asked) == len(PROBES)
