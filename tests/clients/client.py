"""What an agent does with an official client, printed as JSON, one line a step: client.py PACKAGE URL MODEL."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

SAY: Any = [{"role": "user", "content": "Say hello to Zoë."}]
OURS = ("x-rollout-id", "x-call-id", "x-policy-version", "date", "content-length", "transfer-encoding", "connection")


def said(step: str, value: Any) -> None:
    print(json.dumps({step: value}, default=lambda model: model.model_dump(warnings=False)), flush=True)


def failure(call: Callable[[], Any]) -> Any:
    """The class of the exception and what it says."""
    try:
        return call()
    except Exception as error:
        own = [getattr(error, name, None) for name in ("status_code", "code", "type", "param", "request_id", "body")]
        return [type(error).__name__, str(error), *own]


def shown(raw: Any) -> list[Any]:
    return [raw.status_code, {n: v for n, v in raw.headers.items() if n not in OURS}]


async def openai(client: Any, of_asyncio: Any, model: str) -> None:
    asked: Any = {"model": model, "messages": SAY, "temperature": 0, "max_tokens": 8}
    chat = client.chat.completions
    said("chat", chat.create(**asked))
    said("stream", list(chat.create(**asked, stream=True)))
    with chat.stream(**asked) as stream:
        said("final", failure(stream.get_final_completion))
    raw = chat.with_raw_response.create(**asked)
    said("raw", [*shown(raw), raw.parse()])
    with chat.with_streaming_response.create(**asked, stream=True) as lines:
        said("lines", list(lines.iter_lines()))
    response: Any = {"model": model, "input": "Say hello.", "temperature": 0, "max_output_tokens": 8}
    said("response", client.responses.create(**response))
    said("response, streamed", [event.type for event in client.responses.create(**response, stream=True)])
    said("no such model", failure(lambda: chat.create(**asked | {"model": "nobody"})))
    said("wrong type, streamed", failure(lambda: chat.create(**asked | {"temperature": "hot"}, stream=True)))
    chat = of_asyncio.chat.completions
    said("async", await asyncio.gather(*(chat.create(**asked) for _ in range(4))))
    said("async, streamed", [part async for part in await chat.create(**asked, stream=True)])
    async with await chat.create(**asked, stream=True) as left:
        said("left", await anext(aiter(left)))


async def anthropic(client: Any, of_asyncio: Any, model: str) -> None:
    asked: Any = {"model": model, "max_tokens": 8, "messages": SAY, "extra_body": {"temperature": 0}}
    said("message", client.messages.create(**asked))
    said("events", list(client.messages.create(**asked, stream=True)))
    with client.messages.stream(**asked) as stream:
        said("final", stream.get_final_message())
    said("raw", shown(client.messages.with_raw_response.create(**asked)))
    said("tokens", client.messages.count_tokens(model=model, messages=SAY))
    said("no such model", failure(lambda: client.messages.create(**asked | {"model": "nobody"})))
    said("async", await asyncio.gather(*(of_asyncio.messages.create(**asked) for _ in range(3))))


async def main(name: str, base_url: str, model: str) -> None:
    warnings.simplefilter("ignore")
    package, how = importlib.import_module(name), {"base_url": base_url, "api_key": "unused"}
    said("version", package.__version__)
    one, other = (
        (package.OpenAI, package.AsyncOpenAI) if name == "openai" else (package.Anthropic, package.AsyncAnthropic)
    )
    with one(**how, max_retries=2) as client:
        async with other(**how, max_retries=0) as of_asyncio:
            await {"openai": openai, "anthropic": anthropic}[name](client, of_asyncio, model)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
