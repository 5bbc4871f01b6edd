# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0", "anthropic==2.11.0"]
# ///
"""Agents without a framework, on the official clients: branches, best of n, retries, summaries, all three APIs."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
from rollouts import SYSTEM, Rollout, found, main

SEARCH = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": SEARCH}}


def client(rollout: Rollout, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=rollout.url, api_key=rollout.key, default_headers=rollout.headers, **more)


async def ask(api: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    answer = await api.chat.completions.create(**{"model": "policy", "messages": messages} | more)
    return answer.choices[0].message.model_dump(exclude_none=True)


def begin(rollout: Rollout) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": rollout.task}]


async def chat(rollout: Rollout) -> None:
    """A conversation; one question is asked twice, another is put in two ways."""
    async with client(rollout) as api:
        messages = begin(rollout)
        for turn in range(4):
            if turn == 2:
                await ask(api, messages)
            messages.append(await ask(api, messages))
            if turn == 1:
                await ask(api, [*messages, {"role": "user", "content": rollout.more()}])
            messages.append({"role": "user", "content": rollout.more()})


async def greedy(rollout: Rollout) -> None:
    """At temperature 0: rollouts of one task are told the same."""
    async with client(rollout) as api:
        messages = begin(rollout)
        for _ in range(3):
            messages.append(await ask(api, messages, temperature=0))
            messages.append({"role": "user", "content": "Are you sure? Think again."})


async def best_of_n(rollout: Rollout) -> None:
    async with client(rollout) as api:
        messages = begin(rollout)
        for _ in range(3):
            answer = await api.chat.completions.create(model="policy", messages=messages, n=3)
            best = rollout.random.choice(answer.choices).message.content
            messages += [{"role": "assistant", "content": best}, {"role": "user", "content": rollout.more()}]


async def tools(rollout: Rollout) -> None:
    async with client(rollout) as api:
        messages = begin(rollout)
        for _ in range(6):
            messages.append(message := await ask(api, messages, tools=[TOOL]))
            for call in message.get("tool_calls") or ():
                content = found(json.loads(call["function"]["arguments"])["query"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": rollout.more()})


async def flaky(rollout: Rollout) -> None:
    """The client asks again where it got an error or nothing."""
    async with client(rollout, timeout=0.5, max_retries=8) as api:
        messages = begin(rollout)
        for _ in range(3):
            messages.append(await ask(api, messages, model="flaky"))
            messages.append({"role": "user", "content": rollout.more()})


async def summary(rollout: Rollout) -> None:
    """What is old is summarised by the model itself; the last turn stays."""
    async with client(rollout) as api:
        messages = begin(rollout)
        for turn in range(6):
            messages.append(await ask(api, messages))
            messages.append({"role": "user", "content": rollout.more()})
            if turn % 2:
                said = "\n".join(f"{m['role']}: {m['content']}" for m in messages[1:])
                prompt = f"Summarise this conversation in two sentences.\n\n{said}"
                short = await ask(api, [{"role": "user", "content": prompt}])
                messages = [messages[0], {"role": "user", "content": f"Until now: {short['content']}"}, *messages[-2:]]


async def judged(rollout: Rollout) -> None:
    """The answer is judged by a model that is told nothing but question and answer."""
    async with client(rollout) as api:
        answer = await ask(api, begin(rollout))
        prompt = f"Question: {rollout.task}\nAnswer: {answer['content']}\nIs the answer right? Say yes or no, and why."
        verdict = await ask(api, [{"role": "system", "content": "You judge."}, {"role": "user", "content": prompt}])
        refine = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": verdict["content"]}]
        await ask(api, begin(rollout) + refine)


async def responses(rollout: Rollout) -> None:
    """All items are sent again."""
    tool = {"type": "function", "name": "search", "parameters": SEARCH}
    async with client(rollout) as api:
        items: list[Any] = [{"role": "user", "content": rollout.task}]
        for _ in range(6):
            answer = await api.responses.create(model="policy", instructions=SYSTEM, input=items, tools=[tool])
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            for call in calls:
                output = found(json.loads(call.arguments)["query"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
            if not calls:
                items.append({"role": "user", "content": rollout.more()})


async def previous_response(rollout: Rollout) -> None:
    """Only what is new is sent."""
    async with client(rollout) as api:
        last, items = None, rollout.task
        for _ in range(4):
            answer = await api.responses.create(model="policy", input=items, previous_response_id=last)
            last, items = answer.id, rollout.more()


async def claude(rollout: Rollout) -> None:
    tool: Any = {"name": "search", "description": "Searches.", "input_schema": SEARCH}
    root = rollout.url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key=rollout.key, default_headers=rollout.headers) as api:
        messages: list[Any] = [{"role": "user", "content": rollout.task}]
        for turn in range(6):
            wanted: Any = {
                "model": "policy",
                "system": SYSTEM,
                "messages": messages,
                "tools": [tool],
                "max_tokens": 500,
            }
            if turn % 2:
                async with api.messages.stream(**wanted) as stream:
                    answer: Any = await stream.get_final_message()
            else:
                answer = await api.messages.create(**wanted)
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            told: Any = [
                {"type": "tool_result", "tool_use_id": call.id, "content": found(call.input["query"])} for call in calls
            ]
            messages.append({"role": "user", "content": told or rollout.more()})


if __name__ == "__main__":
    scenarios = [
        chat, greedy, best_of_n, tools, flaky, summary, judged, responses, previous_response, claude,
    ]  # fmt: skip
    main({f"client-{s.__name__}": s for s in scenarios}, "openai", "anthropic")
