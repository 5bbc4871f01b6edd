"""Conversations without a name, and all that clients and models do to them: each is one rollout, and no other's."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Json,
    Scripted,
    Wire,
    said,
    scripted,
    scripted_twice,
    together,
    user,
)  # fmt: skip

Turn = tuple[str, Json, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Scripted]]:
    """Two proxies on one store."""
    with scripted_twice(tmp_path_factory.mktemp("unnamed")) as both:
        yield both


@pytest.fixture
def model(models: list[Scripted]) -> Scripted:
    return models[0]


@pytest.fixture
def key() -> str:
    """An agent's key of this test alone; conversations are looked for among those of one key."""
    return uuid.uuid4().hex


def calling(call_id: str, given: str = "{}", name: str = "now") -> Json:
    function = {"name": name, "arguments": given}
    return said(None, tool_calls=[{"id": call_id, "type": "function", "function": function}])


def made(call_id: str, name: str = "now", **given: Any) -> Json:
    """What an answer with one tool call has."""
    return {"tool_calls": calling(call_id, json.dumps(given), name)["tool_calls"]}


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


Q, ON = user("What time is it, 0a1b2c3d?"), user("go on")
DONE = said("done")
LONG = "I wonder whether it is noon already in 0a1b2c3d, or not."
SAID, HALF, SYSTEM = (
    "The lighthouse of Bergen was built in 1881 by two brothers",
    "\ud83d",
    {"role": "system", "content": "You are a careful assistant."},
)
LOOKS = " I should look up where the lighthouse stands.\nAction: search[lighthouse]"
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
SHELL = {"type": "shell_call", "id": "x_1", "call_id": "call_0123456789abcdef", "action": {"commands": ["ls"]}}
ADDED = {"role": "function", "name": "add", "content": "3"}

TOGETHER: dict[str, list[Turn]] = {
    "an empty answer that the client leaves out": [chat(Q, answer=said("")), chat(Q, ON, answer=DONE)],
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
    "ids written anew, over two turns": [
        chat(Q, answer=calling("call_abcdefghijkl0a1b2c3d")),
        chat(Q, calling("abcdefghi"), told("abcdefghi", "noon"), answer=calling("call_mnopqrstuvwx0a1b2c3d")),
        chat(Q, calling("abcdefghi"), told("abcdefghi", "noon"), calling("jklmnopqr"), told("jklmnopqr", "one"),
             answer=DONE),
    ],
    "ids left out": [
        chat(Q, answer=calling("call_abcdefghijkl0a1b2c3d")),
        chat(Q, said("", tool_calls=[{"function": {"name": "now", "arguments": "{}"}}]), {"role": "tool",
             "content": "noon"}, answer=DONE),
    ],
    "an id of Responses' call as the chat's": [
        responses(Q, answer=[function("fc_0a1b2c3d", "call_0a1b2c3d")]),
        responses(Q, function(None, "fc_x"), output("fc_x", "noon"), answer=[]),
    ],
    "arguments that are empty, and then an object": [
        chat(Q, answer=calling("c1", "")), chat(Q, calling("c1", "{}"), told("c1", "noon"), answer=DONE),
    ],
    "a reference to a short id": [
        responses(Q, answer=[message("m-0a1b2c3d_1", "noon")]),
        responses({"type": "item_reference", "id": "m-0a1b2c3d_1"}, ON, answer=[]),
    ],
    "signed thoughts of Messages beside an edited answer": [
        claude(Q, answer=[thought("sig0a1b2c3d" * 3), text("noon")]),
        claude(user("Edited."), {"role": "assistant", "content": [thought("sig0a1b2c3d" * 3), text("edited")]}, ON,
               answer=[text("done")]),
    ],
    "a model's thoughts beside an edited answer": [
        chat(Q, answer=said("noon", reasoning_content=LONG)),
        chat(user("Edited."), said("edited", reasoning_content=LONG), ON, answer=DONE),
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
    "a later request that fails": [
        chat(Q, answer=said("ok")), *[chat(Q, said("ok"), ON, answer=500)] * 3, chat(Q, said("ok"), ON, answer=DONE),
        chat(Q, said("ok"), ON, DONE, user("more"), answer=DONE),
    ],
    "parts, spaces and what the client leaves out": [
        chat(Q, answer=said(" hello ", refusal=None, reasoning="hm", **made("c1", a=1))),
        chat(Q, said([text("hello")], tool_calls=[{"id": "c1", "type": "function", "function": {
             "name": "now", "arguments": '{"a":1}'}}]), told("c1", "2"), answer=DONE),
    ],
    "a tool's use in Messages": [
        claude(Q, answer=[text("well"), {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]),
        claude(Q, said([text("well"), {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]),
               user([{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]), answer=[text("done")]),
    ],
    "half a character": [
        claude(user(HALF), answer=[{"type": "tool_use", "id": HALF, "name": "f", "input": {"a": HALF}}]),
        claude(user(HALF), said([{"type": "tool_use", "id": HALF, "name": "f", "input": {"a": HALF}}]),
               user([{"type": "tool_result", "tool_use_id": HALF, "content": "x"}]), answer=[text("done")]),
    ],
    "a picture without the mark for the provider's cache": [
        claude(user([PICTURE | {"cache_control": {"type": "ephemeral"}}]), answer=[text("A cat.")]),
        claude(user([PICTURE]), said("A cat."), user("Sure?"), answer=[text("done")]),
    ],
    "a prompt that holds an earlier completion": [
        (COMPLETIONS, {"prompt": "Question: How old is it?\nThought:"}, LOOKS),
        (COMPLETIONS, {"prompt": f"Question: How old is it?\nThought:{LOOKS}\n"
                                 "Observation: Old.\nThought:"}, " Done."),
    ],
    "a tool that OpenAI defines": [
        responses(Q, answer=[SHELL]),
        responses(Q, SHELL, {"type": "shell_call_output", "call_id": SHELL["call_id"], "output": []}, answer=[]),
    ],
    **{
        f"what the model said, {name}": [chat(user("hi"), answer=said(f"Well.\n{SAID}! Thank you.")),
                                         chat(*messages, answer=DONE)]
        for name, messages in {
            "told another agent": [user(SAID)],
            "in JSON": [user(json.dumps([said(f"Well.\n{SAID}!")]))],
            "completed": [user("Hello?"), said(f"Thought: {SAID}\n</code>")],
        }.items()
    },
    **{
        f"a tool call of {given} that stands in a text": [
            chat(user("hi"), answer=said(None, **made("call_0a1b2c3d4e5f60718293a4b5", "search", **given))),
            chat(user("hi"), said(f"Calling tools:\n[{{'id': 'call_0a1b2c3d4e5f60718293a4b5', 'arguments': {given}}}]"),
                 user("Observation: x"), answer=DONE),
        ]
        for given in ({"query": SAID}, {"steps": [{"query": SAID}]}, {})
    },
    "a short order that is all that a sub-agent is told": [
        chat(user("hi"), answer=said(None, **made("c1", "f", order="Count to ten"))),
        chat(SYSTEM, user("Count to ten"), answer=DONE),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_one_conversation_is_one_rollout(name: str, model: Scripted, key: str) -> None:
    assert len({*model.rollouts(TOGETHER[name], key)}) == 1


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
    "ids of Kimi, other arguments": (
        [chat(Q, answer=calling("functions.get_the_weather:0", '{"of": "A"}')),
         chat(Q, calling("functions.get_the_weather:0", '{"of": "A"}'), told("functions.get_the_weather:0", "x"),
              answer=DONE)],
        [chat(Q, answer=calling("functions.get_the_weather:0", '{"of": "B"}')),
         chat(Q, calling("functions.get_the_weather:0", '{"of": "B"}'), told("functions.get_the_weather:0", "x"),
              answer=DONE)],
    ),
    "only the thoughts differ": (
        [chat(Q, answer=said("ok", reasoning_content=LONG + "A")),
         chat(Q, said("ok", reasoning_content=LONG + "A"), ON, answer=DONE)],
        [chat(Q, answer=said("ok", reasoning_content=LONG + "B")),
         chat(Q, said("ok", reasoning_content=LONG + "B"), ON, answer=DONE)],
    ),
    "a request that fails in between": (
        [chat(Q, answer=calling("call_aaaaaaaaaaaaaaaa0a1b2c3d")),
         chat(Q, calling("call_aaaaaaaaaaaaaaaa0a1b2c3d"), told("call_aaaaaaaaaaaaaaaa0a1b2c3d", "x"), answer=503),
         chat(Q, calling("call_aaaaaaaaaaaaaaaa0a1b2c3d"), told("call_aaaaaaaaaaaaaaaa0a1b2c3d", "x"), answer=DONE)],
        [chat(Q, answer=calling("call_bbbbbbbbbbbbbbbb0a1b2c3d")),
         chat(Q, calling("call_bbbbbbbbbbbbbbbb0a1b2c3d"), told("call_bbbbbbbbbbbbbbbb0a1b2c3d", "x"), answer=503),
         chat(Q, calling("call_bbbbbbbbbbbbbbbb0a1b2c3d"), told("call_bbbbbbbbbbbbbbbb0a1b2c3d", "x"), answer=DONE)],
    ),
    "functions of before there were tools": (
        [chat(Q, answer=said(None, function_call={"name": "add", "arguments": '{"x":1}'})),
         chat(Q, said(None, function_call={"name": "add", "arguments": '{"x":1}'}), ADDED, answer=DONE)],
        [chat(Q, answer=said(None, function_call={"name": "add", "arguments": '{"x":2}'})),
         chat(Q, said(None, function_call={"name": "add", "arguments": '{"x":2}'}), ADDED, answer=DONE)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_two_conversations_that_begin_alike_stay_two(name: str, model: Scripted, key: str) -> None:
    found = [model.rollouts(list(turns), key) for turns in zip(*PAIRS[name], strict=True)]
    first, second = (set(rollouts) for rollouts in zip(*found, strict=True))
    assert len(first) == len(second) == 1 and first != second, found


QUESTION = user("Who wrote the oldest known treatise on falconry?")
APART: dict[str, list[Turn]] = {
    "the same first question": [chat(Q, answer=DONE), chat(Q, answer=DONE), chat(Q, answer=503)],
    "a search for the question": [
        chat(SYSTEM, QUESTION, answer=said(None, **made("c1", "search", query=QUESTION["content"]))),
        chat(SYSTEM, QUESTION, answer=DONE),
    ],
    "another prompt of the same template": [
        (COMPLETIONS, {"prompt": "Question: How old is it?\nThought:"}, LOOKS),
        (COMPLETIONS, {"prompt": "Question: How tall is it?\nThought:"}, " I should look up how tall it is."),
    ],
    "a system's prompt with what the model once said": [
        chat(user("hi"), answer=said(SAID)), chat({"role": "system", "content": SAID}, user("Hello?"), answer=DONE),
    ],
    "a short order in a longer text": [
        chat(user("hi"), answer=said(None, **made("c1", "f", order="Count to ten"))),
        chat(SYSTEM, user("Count to ten, then stop"), answer=DONE),
    ],
    **{
        f"what the model only repeats of a {role}'s message": [
            chat(user("hi"), {"role": role, "content": f"Remember. {SAID}.", "tool_call_id": "c1"}, answer=said(SAID)),
            chat(user(f"Now, {SAID}."), answer=DONE),
        ]
        for role in ("system", "user", "tool")
    },
    "what was said in two rollouts": [
        chat(user("one"), answer=said(SAID)), chat(user("two"), answer=said(SAID)), chat(user(SAID), answer=DONE),
    ],
    "short JSON that several may have said": [
        chat(user("Is the sky blue?"), answer=said('{"ok": true}')),
        chat(user("Is grass green?"), said('{"ok":true}'), user("Is snow white?"), answer=DONE),
    ],
    "ids of an example in a prompt": [
        chat(Q, answer=calling("call_1")),
        chat(user("Example"), calling("call_1"), told("call_1", "x"), user("Else"), answer=DONE),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_ties_no_two_requests_together(name: str, model: Scripted, key: str) -> None:
    found = model.rollouts(APART[name], key)
    assert len({*found}) == len(found), found


FIRST, FOLLOW = chat(Q, answer=said("hello")), chat(Q, said("hello"), ON, answer=DONE)


def test_nothing_is_shared_between_keys(model: Scripted, key: str) -> None:
    (first,), (other,) = model.rollouts([FIRST], key), model.rollouts([FOLLOW], f"{key}-other")
    assert first != other and model.rollouts([FOLLOW], key) == [first]


@pytest.mark.parametrize("other", [{"X_Task_Id": "other"}, {"X_Rollout_Mode": "eval"}])
def test_tasks_and_evaluations_that_say_the_same_do_not_mix(other: Json, model: Scripted, key: str) -> None:
    names = {"Authorization": f"Bearer {key}", "X_Task_Id": "t"}
    found = [
        [model.ask(*turn, **names | more).headers["x-rollout-id"] for more in ({}, other)] for turn in (FIRST, FOLLOW)
    ]
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_a_response_is_known_by_its_id_and_by_its_conversation(model: Scripted, key: str) -> None:
    named = {"Authorization": f"Bearer {key}"}
    first = model.ask(*responses(Q, answer=[message("m_1", "noon")]), **named)
    body = {"id": "resp_x", "status": "completed", "conversation": {"id": "conv_1"}, "output": []}
    for more in (
        {"previous_response_id": first.json["id"]},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
    ):
        answer = Wire([json.dumps(body).encode()], "application/json")
        found = model.ask(RESPONSES, {"input": "more"} | more, answer, **named)
        assert found.headers["x-rollout-id"] == first.headers["x-rollout-id"], more


def test_of_several_rollouts_that_are_quoted_the_first_goes_on(model: Scripted, key: str) -> None:
    """The later ones are guests: a sub-agent that nobody could know to be one, say."""
    guest = "The glacier of Tartu has lost a third of its ice"
    turns = [chat(user("hi"), answer=said(SAID)), chat(user("Glaciers?"), answer=said(guest))]
    host, other, both = model.rollouts(
        [*turns, chat(user(f"{SAID}."), user(f"Observation: {guest}"), answer=DONE)], key
    )
    assert host == both != other


def test_a_client_that_sends_its_first_request_again_stays_in_its_rollout(model: Scripted, key: str) -> None:
    (first,) = model.rollouts([FIRST], key)
    again = model.ask(*FIRST, Authorization=f"Bearer {key}", x_stainless_retry_count="1")
    assert again.headers["x-rollout-id"] == first


def test_a_retry_of_a_first_request_goes_where_it_failed(model: Scripted, key: str) -> None:
    """Several agents ask the same at the same moment; two of them are refused, and their clients ask again."""

    def ask(answer: Any, **more: str) -> str:
        return model.ask(*chat(Q, answer=answer), Authorization=f"Bearer {key}", **more).headers["x-rollout-id"]

    first, second = together(4), together(2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, [first(answer) for answer in (DONE, 503, 503, DONE)]))
        again = list(pool.map(lambda _: ask(second(DONE), x_stainless_retry_count="1"), range(2)))
    assert len({*found}) == 4 and {*again} == {*found[1:3]}


def test_a_rollout_that_has_ended_is_not_tried_again(model: Scripted, key: str) -> None:
    (first,) = model.rollouts([chat(Q, answer=503)], key)
    model.proxy.post(f"/rollouts/{first}/end", {"status": "failed"})
    assert model.rollouts([chat(Q, answer=503)], key) != [first]


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path, key: str) -> None:
    found = []
    for turn in (FIRST, FOLLOW):
        with scripted(tmp_path) as one:
            found += one.rollouts([turn], key)
    assert len({*found}) == 1


def test_two_proxies_never_go_on_with_the_same_one(models: list[Scripted], key: str) -> None:
    first = [*models[0].rollouts([FIRST] * 16, key)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda i: models[i % 2].rollouts([FOLLOW], key)[0], range(16))
    assert sorted(found) == sorted(first)


TOOLS: Json = {
    "tools": [{"type": "function", "function": {"name": "User", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "User"}},
}


@pytest.mark.parametrize("tools", [{}, TOOLS], ids=["text", "tools"])
@pytest.mark.parametrize(("names", "edits"), [("ABCD", False), ("ABCD", True), ("AAAA", False)])
def test_conversations_of_short_json_stay_whole(
    tools: Json, names: str, edits: bool, model: Scripted, key: str
) -> None:
    """Answers as clients keep them that validate them: written anew, in another order, an age that is a fraction."""
    histories = [[{"role": "system", "content": "Extract the user."}, user(f"{name} is new")] for name in names]
    found = Counter[str]()
    for turn in range(3):
        for name, history in zip(names, histories, strict=True):
            if edits and turn:
                history[0] = {"role": "system", "content": f"Extract the user. Turn {turn}."}
            written = json.dumps({"name": name, "age": turn})
            answer = calling(f"c{turn}", written, "User") if tools else said(f"```json\n{written}\n```")
            found.update(model.rollouts([(CHAT, {"messages": history, **tools}, answer)], key))
            kept = said(json.dumps({"age": float(turn), "name": name}, separators=(",", ":")))
            history += [kept, user(f"{name} is older now")]
    assert sorted(found.values()) == [3] * 4


WORDS = ["amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lemur"]


class Agent:
    """One run of an agent program, which does what agents do to their histories; it notes where its calls went."""

    def __init__(self, model: Scripted, key: str, seed: int) -> None:
        self.model, self.key, self.random, self.found = model, key, random.Random(seed), list[str]()

    def sentence(self) -> str:
        return " ".join(self.random.choices(WORDS, k=8))

    def ask(self, messages: list[Json], answer: Json | None = None) -> Json:
        answer = answer or said(self.sentence())
        self.found += self.model.rollouts([(CHAT, {"messages": messages}, answer)], self.key)
        return answer

    def chat(self) -> None:
        """Several turns, one of them asked again from an earlier point."""
        messages = [SYSTEM, user(self.sentence())]
        for turn in range(4):
            messages.append(self.ask(messages))
            if turn == 2:
                self.ask([*messages[:-2], user(self.sentence())])
            messages.append(user(self.sentence()))

    def tools(self) -> None:
        """Tool calls, each order given to a sub-agent that has a conversation of its own."""
        messages = [SYSTEM, user(self.sentence())]
        for _ in range(3):
            order, call_id = self.sentence(), f"call_{uuid.UUID(int=self.random.getrandbits(128)).hex}"
            messages.append(self.ask(messages, said(None, **made(call_id, "delegate", order=order))))
            found = self.ask([{"role": "system", "content": "You are a worker."}, user(order)])
            messages.append(told(call_id, found["content"]))

    def summary(self) -> None:
        """A history that is cut: its beginning becomes a summary, the last turns stay."""
        messages = [SYSTEM, user(self.sentence())]
        for turn in range(5):
            messages += [self.ask(messages), user(self.sentence())]
            if turn == 2:
                messages = [SYSTEM, user("So far: " + self.sentence()), *messages[-2:]]


def test_of_many_agents_at_once_each_calls_are_found_to_be_one_run(models: list[Scripted], key: str) -> None:
    """Precision and recall over pairs of calls."""
    agents = [Agent(models[i % 2], key, i) for i in range(45)]
    with ThreadPoolExecutor(9) as pool:
        list(pool.map(lambda i: (agents[i].chat, agents[i].tools, agents[i].summary)[i % 3](), range(45)))
    calls = [(i, rollout) for i, agent in enumerate(agents) for rollout in agent.found]
    pairs = Counter((one[0] == other[0], one[1] == other[1]) for one, other in combinations(calls, 2))
    right = pairs[True, True]
    assert (
        len(calls) > 200
        and right / (right + pairs[False, True]) >= 0.99
        and right / (right + pairs[True, False]) >= 0.99
    )
