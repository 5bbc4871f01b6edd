"""Rollouts that nobody names: recorded traffic of many agents at once, replayed without its names."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from itertools import combinations
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.conversation.unnamed import (
    BEGINNINGS,
    Conversation,
    UnnamedRollouts,
    end_statements,
    start_statements,
)
from lightning_proxy.proxy.store.database import Database
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.retention import Keeper
from lightning_proxy.proxy.store.rollouts import ROLLOUT_SEEN
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, RolloutName

Running = Callable[..., AbstractAsyncContextManager[Any]]
Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "You are a careful assistant."}
WORDS = [
    "amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lemur", "mango",
    "nadir", "ocean", "pearl",
]  # fmt: skip


def sentence(source: random.Random) -> str:
    return " ".join(source.choices(WORDS, k=8))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer_of(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


class Model:
    """Answers with a sentence, or, where there are tools, often with calls of them."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        text = sentence(self.random)
        if not body.get("tools") or self.random.random() < 0.3:
            return {"role": "assistant", "content": text}
        calls = [
            {"id": f"call_{uuid.UUID(int=self.random.getrandbits(128)).hex}", "type": "function",
             "function": {"name": "delegate", "arguments": json.dumps({"order": sentence(self.random)})}}
            for _ in range(self.random.randint(1, 2))
        ]  # fmt: skip
        return {"role": "assistant", "content": None, "tool_calls": calls}


class Agent:
    """One run of an agent program; every kind of what agents do to their histories, on the official client."""

    def __init__(self, client: openai.AsyncOpenAI, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)

    async def ask(self, messages: Messages, **more: Any) -> dict[str, Any]:
        await asyncio.sleep(self.random.random() / 50)
        answer = await self.client.chat.completions.create(model="policy", messages=messages, **more)  # type: ignore[call-overload]
        message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
        return message

    async def chat(self) -> None:
        """Several turns, one of them asked again from an earlier point."""
        messages: Messages = [SYSTEM, user(sentence(self.random))]
        for turn in range(4):
            messages.append(await self.ask(messages))
            if turn == 2:
                await self.ask([*messages[:-2], user(sentence(self.random))])  # a branch
            messages.append(user(sentence(self.random)))

    async def tools(self) -> None:
        """Tool calls, each order given to a sub-agent that has a conversation of its own."""
        messages: Messages = [SYSTEM, user(sentence(self.random))]
        for _ in range(3):
            message = await self.ask(messages, tools=[{"type": "function", "function": {"name": "delegate"}}])
            messages.append(message)
            for call in message.get("tool_calls") or ():
                order = json.loads(call["function"]["arguments"])["order"]
                found = await self.ask([{"role": "system", "content": "You are a worker."}, user(order)])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": found["content"]})
            if not message.get("tool_calls"):
                messages.append(user(sentence(self.random)))

    async def summary(self) -> None:
        """A history that is cut: its beginning becomes a summary, the last turns stay."""
        messages: Messages = [SYSTEM, user(sentence(self.random))]
        for turn in range(5):
            messages.append(await self.ask(messages))
            messages.append(user(sentence(self.random)))
            if turn == 2:
                messages = [SYSTEM, user("So far: " + sentence(self.random)), *messages[-2:]]

    async def run(self, kind: str) -> None:
        await getattr(self, kind)()


class Remembered:
    """Conversations in a store, told of calls without any other record of them."""

    def __init__(self, database: Database) -> None:
        self.database, self.conversations, self.calls = database, UnnamedRollouts(Store(database)), 0

    async def find(self, caller: str, request: dict[str, Any], *, is_retry: bool = False) -> str | None:
        return await self.conversations.find(caller, request, Conversation(request), RolloutName(""), is_retry=is_retry)

    async def asked(self, caller: str, rollout_id: str, request: dict[str, Any]) -> None:
        await self._write(start_statements(caller, self._start(rollout_id, request), Conversation(request)))

    async def answered(self, caller: str, rollout_id: str, request: dict[str, Any], response: Any) -> None:
        start = self._start(rollout_id, request)
        end = CallEnd(start.call_id, rollout_id, "ok", response, 200)
        await self._write(end_statements(caller, start, Conversation(request), end))

    def _start(self, rollout_id: str, request: dict[str, Any]) -> CallStart:
        self.calls += 1
        name = RolloutName(rollout_id, named=False)
        return CallStart(f"c{self.calls}", name, "chat/completions", "m", 0, request, float(self.calls))

    async def _write(self, statements: Any) -> None:
        for statement, row in statements:
            rollout = row | {"task_id": None, "agent": None, "mode": "train", "pin": 0, "key_id": None, "evidence": 1}
            await self.database.commit([(ROLLOUT_SEEN, [rollout]), (statement, [row])])


@pytest.fixture
async def conversations(tmp_path: Path) -> AsyncIterator[Remembered]:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/conversations.db")) as database:
        yield Remembered(database)


async def test_hidden_names_are_found_again(running: Running, tmp_path: Path, conversations: Remembered) -> None:
    """Precision and recall over pairs of calls, on traffic of real clients whose names were then hidden."""
    async with running(tmp_path) as system:
        system.vllm.answer = Model()
        clients = [openai.AsyncOpenAI(base_url=f"{system.url}/rollouts/run-{i}/v1", api_key="same") for i in range(60)]
        kinds = ["chat", "tools", "summary"]
        await asyncio.gather(*(Agent(c, i).run(kinds[i % 3]) for i, c in enumerate(clients)))
        await asyncio.gather(*(c.close() for c in clients))
        _, page = await system.call("GET", "/rollouts?limit=1000")
        rollouts = [(await system.call("GET", f"/rollouts/{r['rollout_id']}?requests=whole"))[1] for r in page["data"]]
    calls = [(rollout["rollout_id"], call) for rollout in rollouts for call in rollout["calls"]]
    assert len(calls) > 300
    found = await replay(conversations, [call for _, call in calls])
    precision, recall = pairs(found, [name for name, _ in calls])
    print(f"{len(calls)} calls of {len(rollouts)} rollouts: precision {precision:.4f}, recall {recall:.4f}")
    assert precision >= 0.99
    assert recall >= 0.99


async def replay(conversations: Remembered, calls: list[dict[str, Any]]) -> list[str]:
    """The rollout that each call is given, begun and ended in the order of the recording."""
    moments = [(call["started_at"], 0, i) for i, call in enumerate(calls)]
    moments += [(call["started_at"] + call["latency_ms"] / 1000, 1, i) for i, call in enumerate(calls)]
    found = [""] * len(calls)
    for _, ended, i in sorted(moments):
        request = calls[i]["request"]
        if ended:
            await conversations.answered("key", found[i], request, calls[i]["response"])
        else:
            found[i] = await conversations.find("key", request) or f"new-{i}"
            await conversations.asked("key", found[i], request)
    return found


def pairs(found: list[str], true: list[str]) -> tuple[float, float]:
    together = Counter((a == b, x == y) for (a, x), (b, y) in combinations(zip(found, true, strict=True), 2))
    right = together[True, True]
    return right / (right + together[True, False]), right / (right + together[False, True])


async def test_an_agent_without_names_gets_one_rollout_a_conversation(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.vllm.answer = Model()
        async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="k") as client:
            await asyncio.gather(*(Agent(client, i).chat() for i in range(8)))
        _, page = await system.call("GET", "/rollouts?limit=1000")
        assert [r["calls"] for r in page["data"]] == [5] * 8


async def test_nothing_is_shared_between_keys(conversations: Remembered) -> None:
    await conversations.answered("one", "r", {"messages": [user("hi")]}, answer_of("hello"))
    follow = {"messages": [user("hi"), {"role": "assistant", "content": "hello"}, user("more")]}
    assert (await conversations.find("one", follow), await conversations.find("two", follow)) == ("r", None)


@pytest.mark.parametrize("other", [{"X_Task_Id": "other"}, {"X_Rollout_Mode": "eval"}])
async def test_tasks_and_evaluations_that_say_the_same_do_not_mix(
    running: Running, tmp_path: Path, other: dict[str, str]
) -> None:
    async with running(tmp_path) as system:
        system.vllm.answer = lambda _: {"role": "assistant", "content": "7"}
        messages: Messages = [user("What is 3+4?")]
        for _ in range(2):
            body = {"model": "policy", "messages": messages}
            for names in ({"X_Agent_Name": "a"}, {"X_Agent_Name": "b"} | other):
                given = {"X_Task_Id": "t"} | names
                assert (await system.call("POST", "/v1/chat/completions", body, **given))[0] == 200
            messages = [*messages, {"role": "assistant", "content": "7"}, user("Sure?")]
        _, page = await system.call("GET", "/rollouts")
        rollouts = [(await system.call("GET", f"/rollouts/{one['rollout_id']}"))[1] for one in page["data"]]
    found = {(r["mode"], r["task_id"], *(call["agent"] for call in r["calls"])) for r in rollouts}
    apart = (other.get("X_Rollout_Mode", "train"), other.get("X_Task_Id", "t"))
    assert found == {("train", "t", "a", "a"), (*apart, "b", "b")}


async def test_the_same_first_question_is_a_new_rollout_each_time(conversations: Remembered) -> None:
    first = {"messages": [SYSTEM, user("hi")]}
    await conversations.asked("k", "r1", first)
    await conversations.answered("k", "r1", first, answer_of("hello"))
    assert await conversations.find("k", first) is None
    assert await conversations.find("k", first, is_retry=True) == "r1"


async def test_equal_conversations_are_gone_on_with_one_by_one(conversations: Remembered) -> None:
    first = {"messages": [user("hi")]}
    for name in ("r1", "r2"):
        await conversations.answered("k", name, first, answer_of("hello"))
    follow = {"messages": [user("hi"), {"role": "assistant", "content": "hello"}, user("more")]}
    assert {await conversations.find("k", follow), await conversations.find("k", follow)} == {"r1", "r2"}


async def test_only_the_longest_beginnings_are_looked_for(conversations: Remembered) -> None:
    """A request of 200,000 messages would ask the store 100,000 times."""
    await conversations.answered("k", "r", {"messages": [user("hi")]}, answer_of("hello"))
    said = [user("hi"), {"role": "assistant", "content": "hello"}]
    for others, found in ((BEGINNINGS - 1, "r"), (BEGINNINGS, None)):
        more = [part for i in range(others) for part in (user(f"{i}"), {"role": "assistant", "content": f"{i}"})]
        assert await conversations.find("k", {"messages": [*said, *more, user("go on")]}) == found


async def test_what_clients_do_to_an_answer_makes_no_difference(conversations: Remembered) -> None:
    first = {"messages": [user("hi")]}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": " hello ", "tool_calls": [call], "refusal": None, "reasoning": "hm"}
    await conversations.answered("k", "r", first, {"choices": [{"message": answer}]})
    back = {
        "role": "assistant",
        "content": [{"type": "text", "text": "hello"}],
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
    }
    asked = {"messages": [user("hi"), back, {"role": "tool", "tool_call_id": "c1", "content": "2"}]}
    assert await conversations.find("k", asked) == "r"


async def test_responses_and_messages_are_gone_on_with_too(conversations: Remembered) -> None:
    output = [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
        {"type": "function_call", "call_id": "c7", "name": "f", "arguments": "{}"},
    ]
    await conversations.answered("k", "r1", {"input": "hi"}, {"id": "resp_1", "output": output})
    assert await conversations.find("k", {"input": "more", "previous_response_id": "resp_1"}) == "r1"
    await conversations.answered("k", "r1", {"input": "hi"}, {"id": "resp_2", "conversation": {"id": "conv_1"}})
    for kept in ("conv_1", {"id": "conv_1"}):
        assert await conversations.find("k", {"input": "more", "conversation": kept}) == "r1"
    result = {"type": "function_call_output", "call_id": "c7", "output": "x"}
    assert await conversations.find("k", {"input": [user("hi"), *output[1:], result]}) == "r1"
    content = [{"type": "text", "text": "well"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]
    await conversations.answered("k", "r2", {"system": "s", "messages": [user("hi")]}, {"content": content})
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]}
    asked = {"system": "s", "messages": [user("hi"), {"role": "assistant", "content": content}, told]}
    assert await conversations.find("k", asked) == "r2"


async def test_functions_of_before_there_were_tools_are_gone_on_with_too(conversations: Remembered) -> None:
    def called(x: int) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": f'{{"x":{x}}}'}}

    for x in (1, 2):
        await conversations.answered("k", f"r{x}", {"messages": [user("go")]}, {"choices": [{"message": called(x)}]})
    told = {"role": "function", "name": "add", "content": "3"}
    for x in (1, 2):
        assert await conversations.find("k", {"messages": [user("go"), called(x), told]}) == f"r{x}"
    assert await conversations.find("k", {"messages": [user("other"), called(3), told]}) is None


async def test_a_prompt_that_holds_an_earlier_completion_goes_on_with_it(conversations: Remembered) -> None:
    asked = "Answer with the tools: search.\nQuestion: {}\nThought:".format
    said = " I should look up where the lighthouse stands.\nAction: search[lighthouse]"
    first = {"prompt": asked("How old is the lighthouse of Bergen?")}
    await conversations.answered("k", "r", first, {"choices": [{"index": 0, "text": said}]})
    follow = {"prompt": f"{first['prompt']}{said}\nObservation: It is in Bergen, and old.\nThought:"}
    assert await conversations.find("k", follow) == "r"
    assert await conversations.find("k", {"prompt": asked("How old is the lighthouse of Stavanger?")}) is None


@pytest.mark.parametrize("kind", ["shell_call", "local_shell_call", "apply_patch_call", "computer_call"])
async def test_tools_that_openai_defines_are_gone_on_with_too(kind: str, conversations: Remembered) -> None:
    call = {"type": kind, "id": "x_1", "call_id": "call_0123456789abcdef", "action": {"commands": ["ls"]}}
    await conversations.answered("k", "r", {"input": "hi"}, {"id": "resp_1", "output": [call]})
    result = {"type": f"{kind}_output", "call_id": call["call_id"], "output": []}
    assert await conversations.find("k", {"input": [user("hi"), call, result]}) == "r"


async def test_a_picture_is_the_same_without_the_mark_for_the_providers_cache(conversations: Remembered) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    first = {"messages": [{"role": "user", "content": [picture | {"cache_control": {"type": "ephemeral"}}]}]}
    await conversations.answered("k", "r", first, {"content": [{"type": "text", "text": "A cat."}]})
    follow = [{"role": "user", "content": [picture]}, {"role": "assistant", "content": "A cat."}, user("Sure?")]
    assert await conversations.find("k", {"messages": follow}) == "r"


async def test_a_search_for_the_question_does_not_draw_its_siblings_in(conversations: Remembered) -> None:
    question = "Who wrote the oldest known treatise on falconry?"
    call = {"id": "c1", "function": {"name": "search", "arguments": json.dumps({"query": question})}}
    answer = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}
    await conversations.answered("k", "r1", {"messages": [SYSTEM, user(question)]}, answer)
    assert await conversations.find("k", {"messages": [SYSTEM, user(question)]}) is None


SAID = "The lighthouse of Bergen was built in 1881 by two brothers"


def says(text: str, **call: Any) -> dict[str, Any]:
    calls = [{"id": "call_0a1b2c3d4e5f60718293a4b5", "function": call}] if call else None
    return {"choices": [{"message": {"role": "assistant", "content": text or None, "tool_calls": calls}}]}


@pytest.mark.parametrize(
    "wrapped",
    [
        pytest.param([user(SAID)], id="another agent is told it"),
        pytest.param([user(f"Go on.\n\nuser: Hello?\nwriter: {SAID}. Is that so?")], id="a transcript"),
        pytest.param([user(json.dumps([{"role": "assistant", "content": f"Well.\n{SAID}!"}]))], id="JSON"),
        pytest.param([user("Hello?"), {"role": "assistant", "content": f"Thought: {SAID}\n</code>"}], id="completed"),
    ],
)
async def test_what_the_model_said_is_found_in_whatever_it_is_wrapped_in(
    wrapped: Messages, conversations: Remembered
) -> None:
    await conversations.answered("k", "r", {"messages": [SYSTEM, user("hi")]}, says(f"Well.\n{SAID}! Thank you."))
    assert await conversations.find("k", {"messages": wrapped}) == "r"


async def test_a_prompt_that_holds_what_the_model_once_said_tells_nothing(conversations: Remembered) -> None:
    """It is the prompt of many: examples, say, or what an optimiser wrote."""
    await conversations.answered("k", "r", {"messages": [SYSTEM, user("hi")]}, says(SAID))
    assert await conversations.find("k", {"messages": [{"role": "system", "content": SAID}, user("Hello?")]}) is None


@pytest.mark.parametrize("arguments", [{"query": SAID}, {"steps": [{"query": SAID}]}, {}])
async def test_tool_calls_are_found_in_texts_too(arguments: dict[str, Any], conversations: Remembered) -> None:
    """Some agents write their tool calls down as text; ids and arguments are there all the same."""
    asked = {"messages": [user("hi")]}
    await conversations.answered("k", "r", asked, says("", name="search", arguments=json.dumps(arguments)))
    told = [{"id": "call_0a1b2c3d4e5f60718293a4b5", "name": "search", "arguments": arguments}]
    written = {"role": "assistant", "content": f"Calling tools:\n{told}"}
    assert await conversations.find("k", {"messages": [user("hi"), written, user("Observation: x")]}) == "r"


async def test_an_order_may_be_short_if_it_is_all_that_a_subagent_is_told(conversations: Remembered) -> None:
    await conversations.answered(
        "k", "r", {"messages": [user("hi")]}, says("", name="f", arguments='{"order": "Count to ten"}')
    )
    assert await conversations.find("k", {"messages": [SYSTEM, user("Count to ten")]}) == "r"
    assert await conversations.find("k", {"messages": [SYSTEM, user("Count to ten, then stop")]}) is None


@pytest.mark.parametrize("role", ["system", "user", "tool"])
async def test_what_the_model_only_repeats_tells_nothing(role: str, conversations: Remembered) -> None:
    """A template, a question, a page: others are told the same."""
    known = {"role": role, "content": f"Remember. {SAID}.", "tool_call_id": "c1"}
    await conversations.answered("k", "r", {"messages": [user("hi"), known]}, says(SAID))
    assert await conversations.find("k", {"messages": [user(f"Now, {SAID}.")]}) is None


async def test_of_several_rollouts_that_are_quoted_the_first_goes_on(conversations: Remembered) -> None:
    """The later ones are guests: a sub-agent that nobody could know to be one, say."""
    guest = "The glacier of Tartu has lost a third of its ice"
    await conversations.answered("k", "host", {"messages": [user("hi")]}, says(SAID))
    await conversations.answered("k", "guest", {"messages": [user("Glaciers?")]}, says(guest))
    assert await conversations.find("k", {"messages": [user(f"hi\n{SAID}."), user(f"Observation: {guest}")]}) == "host"


async def test_what_is_said_in_two_rollouts_tells_nothing(conversations: Remembered) -> None:
    for name in ("r1", "r2"):
        await conversations.answered("k", name, {"messages": [user(name)]}, says(SAID))
    assert await conversations.find("k", {"messages": [user(SAID)]}) is None


async def test_ids_that_are_counted_do_not_mix_conversations_up(conversations: Remembered) -> None:
    """Some models number their tool calls: what was called counts then."""
    asked = {"messages": [user("hi")]}

    def call(query: str, more: str = "") -> dict[str, Any]:
        function = {"name": "search", "arguments": f'{{"query":{more} "{query}"}}'}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "functions.search:0", "function": function}],
        }

    for name in ("r1", "r2"):
        await conversations.answered("k", name, asked, {"choices": [{"message": call(f"of {name}")}]})
    for name in ("r1", "r2"):
        result = {"role": "tool", "tool_call_id": "functions.search:0", "content": "x"}
        assert await conversations.find("k", {"messages": [user("hi"), call(f"of {name}", " "), result]}) == name


async def test_text_that_utf8_cannot_hold_is_compared_like_any_other(conversations: Remembered) -> None:
    block = {"type": "tool_use", "id": "\ud83d", "name": "f", "input": {"a": "\ud83d"}}
    await conversations.answered("k", "r", {"messages": [user("\ud83d")]}, {"content": [block]})
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "\ud83d", "content": "x"}]}
    asked = {"messages": [user("\ud83d"), {"role": "assistant", "content": [block]}, told]}
    assert await conversations.find("k", asked) == "r"


async def test_a_conversation_goes_on_after_a_restart(running: Running, tmp_path: Path) -> None:
    messages: Messages = [SYSTEM, user("hi")]
    for _ in range(3):
        async with running(tmp_path) as system:
            system.vllm.answer = lambda _: {"role": "assistant", "content": "hello"}
            async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="k") as client:
                answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user("more")]
            _, page = await system.call("GET", "/rollouts")
    assert [rollout["calls"] for rollout in page["data"]] == [3]


async def test_two_workers_never_go_on_with_the_same_one(conversations: Remembered, tmp_path: Path) -> None:
    first = {"messages": [user("hi")]}
    for i in range(40):
        await conversations.answered("k", f"r{i}", first, answer_of("hello"))
    follow = {"messages": [user("hi"), {"role": "assistant", "content": "hello"}, user("more")]}
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/conversations.db")) as other:
        workers = [conversations, Remembered(other)]
        found = await asyncio.gather(*(workers[i % 2].find("k", follow) for i in range(40)))
    assert sorted(found, key=str) == sorted(f"r{i}" for i in range(40))


async def test_a_retry_of_a_first_request_goes_where_it_failed(running: Running, tmp_path: Path) -> None:
    """Several agents ask the same at the same moment; two of them are refused, and their clients ask again."""
    async with running(tmp_path) as system:
        fails, together = iter([True, False, True]), asyncio.Barrier(4)

        async def answer(_: web.Request) -> web.Response:
            if not together.broken:
                await together.wait()
            if next(fails, False):
                raise web.HTTPServiceUnavailable(text="{}")
            return web.json_response(answer_of("hello"))

        system.vllm.odd = answer
        body = {"model": "policy", "messages": [SYSTEM, user("hi")]}
        first = await asyncio.gather(*(system.call("POST", "/v1/chat/completions", body) for _ in range(4)))
        assert sorted(status for status, _ in first) == [200, 200, 503, 503]
        await together.abort()
        again = {"x-stainless-retry-count": "1"}
        await asyncio.gather(*(system.call("POST", "/v1/chat/completions", body, **again) for _ in range(2)))
        _, page = await system.call("GET", "/rollouts")
        calls = [(await system.call("GET", f"/rollouts/{r['rollout_id']}"))[1]["calls"] for r in page["data"]]
    assert sorted([call["status"] for call in of_rollout] for of_rollout in calls) == [
        ["error", "ok"], ["error", "ok"], ["ok"], ["ok"],
    ]  # fmt: skip


async def test_what_was_quiet_the_longest_is_forgotten(
    conversations: Remembered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.proxy.store.retention.CONVERSATIONS", 3)
    for i in range(5):
        await conversations.answered("k", f"r{i}", {"messages": [user(f"{i}")]}, answer_of("hello"))
    database = conversations.database
    later = [
        f"UPDATE {table} SET at = at + {time.time()} - 1000" for table in ("conversation_points", "conversation_tips")
    ]
    await database.commit([(statement, [{}]) for statement in later])  # just now, and not in 1970
    await Keeper(database, Config(), lambda *_: None).tidy()
    follow = [{"messages": [user(f"{i}"), {"role": "assistant", "content": "hello"}, user("x")]} for i in range(5)]
    assert [await conversations.find("k", request) for request in follow] == [None, None, "r2", "r3", "r4"]
