"""What an agent does with anthropic's client, printed as JSON, one line a step: anthropic_client.py ROOT_URL MODEL."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic

SAY: Any = [{"role": "user", "content": "Say hello to Zoë."}]
OURS = ("x-rollout-id", "x-call-id", "x-policy-version", "date", "content-length", "transfer-encoding", "connection")


def said(step: str, value: Any) -> None:
    print(json.dumps({step: value}, default=lambda model: model.model_dump(warnings=False)), flush=True)


def failure(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        own = [getattr(error, name, None) for name in ("status_code", "request_id", "body")]
        return [type(error).__name__, str(error), *own]


def everywhere(client: anthropic.Anthropic, model: str) -> None:
    asked: Any = {"model": model, "max_tokens": 8, "messages": SAY, "extra_body": {"temperature": 0}}
    said("message", client.messages.create(**asked))
    said("events", list(client.messages.create(**asked, stream=True)))
    with client.messages.stream(**asked) as stream:
        said("text", list(stream.text_stream))
        said("final", stream.get_final_message())
    raw = client.messages.with_raw_response.create(**asked)
    said("raw", [raw.status_code, {n: v for n, v in raw.headers.items() if n not in OURS}])
    said("tokens", client.messages.count_tokens(model=model, messages=SAY))
    said("no such model", failure(lambda: client.messages.create(**asked | {"model": "nobody"})))


async def at_once(base_url: str, model: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="unused") as client:
        asked: Any = {"model": model, "max_tokens": 8, "messages": SAY, "extra_body": {"temperature": 0}}
        said("async", await asyncio.gather(*(client.messages.create(**asked) for _ in range(3))))


def main(base_url: str, model: str) -> None:
    said("version", anthropic.__version__)
    with anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=2) as client:
        everywhere(client, model)
    asyncio.run(at_once(base_url, model))


if __name__ == "__main__":
    main(*sys.argv[1:])
