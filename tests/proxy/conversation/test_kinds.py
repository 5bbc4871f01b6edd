"""Conversations without a name, and all that clients and models do to them: each is one rollout, and no other's."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import pytest_asyncio

from support.cases import Case, cases_with
from support.scripted import CHAT, MESSAGES, RESPONSES, Proxy, scripted

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
Turn = tuple[str, Json, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxy]:
    async with scripted(tmp_path_factory.mktemp("kinds")) as (one,):
        yield one


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> Json:
    return {"role": "assistant", "content": text} | more


def calling(call_id: str, given: str = "{}", name: str = "now") -> Json:
    function = {"name": name, "arguments": given}
    return said(None, tool_calls=[{"id": call_id, "type": "function", "function": function}])


def told(call_id: str, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def chat(*messages: Json, answer: Any) -> Turn:
    return CHAT, {"messages": list(messages)}, answer


def claude(*messages: Json, answer: Any) -> Turn:
    return MESSAGES, {"max_tokens": 9, "messages": list(messages)}, answer


def responses(*items: Json, answer: Any, **more: Any) -> Turn:
    return RESPONSES, {"input": list(items), **more}, answer


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def message(item_id: str, words: str) -> Json:
    content = [{"type": "output_text", "text": words, "annotations": []}]
    return {"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": content}


def function(item_id: str | None, call_id: str) -> Json:
    item = {"type": "function_call", "call_id": call_id, "name": "now", "arguments": "{}"}
    return item | ({"id": item_id} if item_id else {})


def output(call_id: str, words: str) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": words}


def thought(signature: str, words: str = "Hm.") -> Json:
    return {"type": "thinking", "thinking": words, "signature": signature}


Q, ON = user("What time is it, %CASE%?"), user("go on")
DONE = said("done")
LONG = "I wonder whether it is noon already in %CASE%, or not."
OWN: dict[str, list[Turn]] = {
    "an answer of null": [chat(Q, answer=said(None)), chat(Q, said(None), ON, answer=DONE)],
    "an empty answer that the client leaves out": [chat(Q, answer=said("")), chat(Q, ON, answer=DONE)],
    "an empty answer after a result": [
        chat(Q, answer=calling("c1")),
        chat(Q, calling("c1"), told("c1", "noon"), answer=said("")),
        chat(Q, calling("c1"), told("c1", "noon"), said(""), ON, answer=DONE),
    ],
    "two empty answers": [
        chat(Q, answer=said("")), chat(Q, said(""), ON, answer=said("")),
        chat(Q, said(""), ON, said(""), user("now"), answer=DONE),
    ],
    "an empty answer of Messages": [
        claude(Q, answer=[]), claude(Q, {"role": "assistant", "content": []}, ON, answer=[text("done")]),
    ],
    "an empty output of Responses": [responses(Q, answer=[]), responses(Q, ON, answer=[message("m_1", "done")])],
    "a prefill, and what follows it": [
        chat(Q, answer=said("It is")), chat(Q, said("It is"), answer=said(" noon.")),
        chat(Q, said("It is noon."), ON, answer=DONE),
    ],
    "a prefill that is a message of its own later": [
        chat(Q, said("It is"), answer=said("noon.")), chat(Q, said("It is"), said("noon."), ON, answer=DONE),
    ],
    "a prefill of Messages": [
        claude(Q, {"role": "assistant", "content": "{"}, answer=[text('"time": "noon"}')]),
        claude(Q, {"role": "assistant", "content": '{"time":"noon"}'}, ON, answer=[text("done")]),
    ],
    "a turn of Messages that paused": [
        claude(Q, answer=[text("Wait"), {"type": "server_tool_use", "id": "srv_1", "name": "web", "input": {}}]),
        claude(Q, {"role": "assistant", "content": [
            text("Wait"), {"type": "server_tool_use", "id": "srv_1", "name": "web", "input": {}}]},
            answer=[text("noon")]),
    ],
    "ids written anew, over two turns": [
        chat(Q, answer=calling("call_abcdefghijkl%CASE%")),
        chat(Q, calling("abcdefghi"), told("abcdefghi", "noon"), answer=calling("call_mnopqrstuvwx%CASE%")),
        chat(Q, calling("abcdefghi"), told("abcdefghi", "noon"), calling("jklmnopqr"), told("jklmnopqr", "one"),
             answer=DONE),
    ],
    "ids written anew in Messages": [
        claude(Q, answer=[text("Well"), {"type": "tool_use", "id": "call:1", "name": "now", "input": {"a": 1.0}}]),
        claude(Q, {"role": "assistant", "content": [
            text("Well"), {"type": "tool_use", "id": "call_1", "name": "now", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "noon"}]},
            answer=[text("done")]),
    ],
    "ids left out": [
        chat(Q, answer=calling("call_abcdefghijkl%CASE%")),
        chat(Q, said("", tool_calls=[{"function": {"name": "now", "arguments": "{}"}}]), {"role": "tool",
             "content": "noon"}, answer=DONE),
    ],
    "an id of Responses' call as the chat's": [
        responses(Q, answer=[function("fc_%CASE%", "call_%CASE%")]),
        responses(Q, function(None, "fc_x"), output("fc_x", "noon"), answer=[]),
    ],
    "arguments that are empty, and then an object": [
        chat(Q, answer=calling("c1", "")), chat(Q, calling("c1", "{}"), told("c1", "noon"), answer=DONE),
    ],
    "a reference to a call's item": [
        responses(Q, answer=[function("fc_%CASE%", "c:0")]),
        responses({"type": "item_reference", "id": "fc_%CASE%"}, output("c:0", "noon"), answer=[]),
    ],
    "references in a history without answers": [
        responses(Q, answer=[message("msg_%CASE%1", "noon")]),
        responses(Q, {"type": "item_reference", "id": "msg_%CASE%1"}, ON, answer=[message("msg_%CASE%2", "one")]),
        responses(Q, {"type": "item_reference", "id": "msg_%CASE%1"}, ON, {"type": "item_reference", "id":
                  "msg_%CASE%2"}, user("and now?"), answer=[]),
    ],
    "a reference to a short id": [
        responses(Q, answer=[message("m-%CASE%_1", "noon")]),
        responses({"type": "item_reference", "id": "m-%CASE%_1"}, ON, answer=[]),
    ],
    "thoughts without an id": [
        responses(Q, answer=[{"type": "reasoning", "encrypted_content": "gAAAA%CASE%" * 3}, message("m_1", "noon")]),
        responses(user("Edited."), {"type": "reasoning", "encrypted_content": "gAAAA%CASE%" * 3},
                  message("m_x", "edited"), ON, answer=[]),
    ],
    "signed thoughts of Messages beside an edited answer": [
        claude(Q, answer=[thought("sig%CASE%" * 3), text("noon")]),
        claude(user("Edited."), {"role": "assistant", "content": [thought("sig%CASE%" * 3), text("edited")]}, ON,
               answer=[text("done")]),
    ],
    "hidden thoughts of Messages beside an edited answer": [
        claude(Q, answer=[{"type": "redacted_thinking", "data": "hid%CASE%" * 3}, text("noon")]),
        claude(Q, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "hid%CASE%" * 3},
               text("edited")]}, ON, answer=[text("done")]),
    ],
    "a model's thoughts beside an edited answer": [
        chat(Q, answer=said("noon", reasoning_content=LONG)),
        chat(user("Edited."), said("edited", reasoning_content=LONG), ON, answer=DONE),
    ],
    "details of thoughts beside an edited answer": [
        chat(Q, answer=said("noon", reasoning_details=[{"type": "reasoning.encrypted", "data": "enc%CASE%" * 3}])),
        chat(user("Edited."), said("edited", reasoning_details=[{"type": "reasoning.encrypted", "data":
             "enc%CASE%" * 3}]), ON, answer=DONE),
    ],
    "thoughts in a text that the client leaves out": [
        chat(Q, answer=said("<think>\nHm.\n</think>\n\nnoon")),
        chat(Q, said("noon"), ON, answer=said("Hm.</think>one", tool_calls=calling("c1")["tool_calls"])),
        chat(Q, said("noon"), ON, said("one", tool_calls=calling("c1")["tool_calls"]), told("c1", "x"),
             answer=said("Hm.</think>", tool_calls=calling("c2")["tool_calls"])),
        chat(Q, said("noon"), ON, said("one", tool_calls=calling("c1")["tool_calls"]), told("c1", "x"), calling("c2"),
             told("c2", "y"), answer=DONE),
    ],
    "letters that the client composes": [
        chat(Q, answer=said("au cafe\u0301")), chat(Q, said("au caf\u00e9"), ON, answer=DONE),
    ],
    "results that are cleared later": [
        chat(Q, answer=calling("c1")), chat(Q, calling("c1"), told("c1", "noon"), answer=said("ok")),
        chat(Q, calling("c1"), told("c1", "…"), said("ok"), ON, answer=DONE),
    ],
    "a first request that fails nine times": [*[chat(Q, answer=503)] * 9, chat(Q, answer=DONE)],
    "a first request that fails at every API": [
        *[claude(Q, answer=529)] * 2, claude(Q, answer=[text("noon")]),
    ],
    "a later request that fails": [
        chat(Q, answer=said("ok")), *[chat(Q, said("ok"), ON, answer=500)] * 3, chat(Q, said("ok"), ON, answer=DONE),
        chat(Q, said("ok"), ON, DONE, user("more"), answer=DONE),
    ],
}  # fmt: skip


def own(turns: Iterable[Any], case: str) -> list[Any]:
    """The turns with a text of their own."""
    found: list[Any] = json.loads(json.dumps(list(turns)).replace("%CASE%", case))
    return found


@pytest.mark.parametrize("case", cases_with("unnamed"), ids=lambda case: case["name"])
async def test_a_recorded_answer_that_is_extended_or_quoted_is_gone_on_with(case: Case, proxy: Proxy) -> None:
    found = [await proxy.ask(*turn) for turn in own(case["unnamed"], uuid.uuid4().hex)]
    assert len({*filter(None, found)}) == 1


@pytest.mark.parametrize("case", OWN)
async def test_one_conversation_is_one_rollout(case: str, proxy: Proxy) -> None:
    found = [await proxy.ask(*turn) for turn in own(OWN[case], uuid.uuid4().hex[:12])]
    assert len(set(found)) == 1, found


PAIRS: dict[str, tuple[list[Turn], list[Turn]]] = {
    "the same question and answer": (
        [chat(Q, answer=said("ok")), chat(Q, said("ok"), user("A"), answer=said("ok")),
         chat(Q, said("ok"), user("A"), said("ok"), ON, answer=DONE)],
        [chat(Q, answer=said("ok")), chat(Q, said("ok"), user("B"), answer=said("ok")),
         chat(Q, said("ok"), user("B"), said("ok"), ON, answer=DONE)],
    ),
    "only the results differ": (
        [chat(Q, answer=calling("c:0")), chat(Q, calling("c:0"), told("c:0", "sun"), answer=said("ok")),
         chat(Q, calling("c:0"), told("c:0", "sun"), said("ok"), ON, answer=DONE)],
        [chat(Q, answer=calling("c:0")), chat(Q, calling("c:0"), told("c:0", "rain"), answer=said("ok")),
         chat(Q, calling("c:0"), told("c:0", "rain"), said("ok"), ON, answer=DONE)],
    ),
    "only the ids differ": (
        [chat(Q, answer=calling("call_aaaaaaaaaaaaaaaa%CASE%")),
         chat(Q, calling("call_aaaaaaaaaaaaaaaa%CASE%"), told("call_aaaaaaaaaaaaaaaa%CASE%", "x"), answer=DONE)],
        [chat(Q, answer=calling("call_bbbbbbbbbbbbbbbb%CASE%")),
         chat(Q, calling("call_bbbbbbbbbbbbbbbb%CASE%"), told("call_bbbbbbbbbbbbbbbb%CASE%", "x"), answer=DONE)],
    ),
    "ids of Kimi, other arguments": (
        [chat(Q, answer=calling("functions.get_the_weather:0", '{"of": "A"}')),
         chat(Q, calling("functions.get_the_weather:0", '{"of": "A"}'), told("functions.get_the_weather:0", "x"),
              answer=DONE)],
        [chat(Q, answer=calling("functions.get_the_weather:0", '{"of": "B"}')),
         chat(Q, calling("functions.get_the_weather:0", '{"of": "B"}'), told("functions.get_the_weather:0", "x"),
              answer=DONE)],
    ),
    "only the functions differ": (
        [chat(Q, answer=calling("c:0", name="now")),
         chat(Q, calling("c:0", name="now"), told("c:0", "x"), answer=DONE)],
        [chat(Q, answer=calling("c:0", name="then")),
         chat(Q, calling("c:0", name="then"), told("c:0", "x"), answer=DONE)],
    ),
    "only the thoughts differ": (
        [chat(Q, answer=said("ok", reasoning_content=LONG + "A")),
         chat(Q, said("ok", reasoning_content=LONG + "A"), ON, answer=DONE)],
        [chat(Q, answer=said("ok", reasoning_content=LONG + "B")),
         chat(Q, said("ok", reasoning_content=LONG + "B"), ON, answer=DONE)],
    ),
    "only the thoughts in their texts differ": (
        [chat(Q, answer=said("<think>A</think>ok")), chat(Q, said("<think>A</think>ok"), ON, answer=DONE)],
        [chat(Q, answer=said("<think>B</think>ok")), chat(Q, said("<think>B</think>ok"), ON, answer=DONE)],
    ),
    "empty answers": (
        [chat(Q, answer=said("")), chat(Q, said(""), user("A"), answer=said("")),
         chat(Q, said(""), user("A"), said(""), ON, answer=DONE)],
        [chat(Q, answer=said("")), chat(Q, said(""), user("B"), answer=said("")),
         chat(Q, said(""), user("B"), said(""), ON, answer=DONE)],
    ),
    "a request that fails in between": (
        [chat(Q, answer=calling("call_aaaaaaaaaaaaaaaa%CASE%")),
         chat(Q, calling("call_aaaaaaaaaaaaaaaa%CASE%"), told("call_aaaaaaaaaaaaaaaa%CASE%", "x"), answer=503),
         chat(Q, calling("call_aaaaaaaaaaaaaaaa%CASE%"), told("call_aaaaaaaaaaaaaaaa%CASE%", "x"), answer=DONE)],
        [chat(Q, answer=calling("call_bbbbbbbbbbbbbbbb%CASE%")),
         chat(Q, calling("call_bbbbbbbbbbbbbbbb%CASE%"), told("call_bbbbbbbbbbbbbbbb%CASE%", "x"), answer=503),
         chat(Q, calling("call_bbbbbbbbbbbbbbbb%CASE%"), told("call_bbbbbbbbbbbbbbbb%CASE%", "x"), answer=DONE)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
async def test_two_conversations_that_begin_alike_stay_two(case: str, proxy: Proxy) -> None:
    run = uuid.uuid4().hex[:12]
    one, other = (own(turns, run) for turns in PAIRS[case])
    found = [[await proxy.ask(*turn) for turn in turns] for turns in zip(one, other, strict=True)]
    first, second = (set(rollouts) for rollouts in zip(*found, strict=True))
    assert len(first) == len(second) == 1, found
    assert first != second


async def test_the_same_question_after_an_answer_is_a_new_rollout(proxy: Proxy) -> None:
    turns = own([chat(Q, answer=503), chat(Q, answer=DONE), chat(Q, answer=DONE), chat(Q, answer=503)], "again")
    first, second, third, fourth = [await proxy.ask(*turn) for turn in turns]
    assert first == second
    assert len({second, third, fourth}) == 3


async def test_a_rollout_that_has_ended_is_not_tried_again(proxy: Proxy) -> None:
    turn = own([chat(Q, answer=503)], "ended")[0]
    first = await proxy.ask(*turn)
    await proxy.post(f"/rollouts/{first}/end", {"status": "failed"})
    assert await proxy.ask(*turn) != first


async def test_ids_of_an_example_in_a_prompt_lead_nowhere(proxy: Proxy) -> None:
    example = [user("Example"), calling("call_1"), told("call_1", "x")]
    turns = own([chat(Q, answer=calling("call_1")), chat(*example, user("Else"), answer=DONE)], "example")
    follow = own([chat(*example, user("Else"), DONE, ON, answer=DONE)], "example")
    first, second, third = [await proxy.ask(*turn) for turn in [*turns, *follow]]
    assert first != second == third
