"""Images, sound, files and what else a message may hold: they reach the model, and the record has them unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from support import voice
from support.corpus.case import whole
from support.corpus.dialects import PARTS
from support.played import Played, playing
from support.relaying import MemoryRecorder, relaying

IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 5_000
SEEN: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": PARTS},
    "responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": IMAGE, "detail": "low"},
                    {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="},
                ],
            }
        ]
    },
    "messages": {
        "max_tokens": 5,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                    {"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}, "title": "é"},
                ],
            }
        ],
    },
}


@pytest.mark.parametrize("kind", ["openai", "vllm"])
@pytest.mark.parametrize("path", SEEN)
async def test_content_parts_reach_the_model_and_the_record(path: str, kind: str) -> None:
    played, recorder = Played(), MemoryRecorder()
    played.script = lambda asked: [whole(voice.dumps(voice.WHOLE[path](orjson.loads(asked.body))))]
    body = {"model": "policy"} | SEEN[path]
    async with (
        playing(played) as direct,
        relaying(direct, recorder, max_body_mb=1, kind=kind) as proxied,
        aiohttp.ClientSession() as http,
        http.post(f"{proxied}/v1/{path}", json=body) as answer,
    ):
        assert answer.status == 200
    [asked], [start], [end] = played.asked, recorder.starts, recorder.ends
    assert {name: orjson.loads(asked.body)[name] for name in SEEN[path]} == SEEN[path]
    assert (start.request, end.status) == (body, "ok")


async def test_the_store_gives_them_back_in_every_turn(running: Any, tmp_path: Path) -> None:
    first = {"role": "user", "content": [*PARTS[0]["content"], {"type": "image_url", "image_url": {"url": IMAGE}}]}
    turns = [first, {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "Sure?"}]
    async with running(tmp_path) as system:
        for messages in (turns[:1], turns):
            asked = {"model": "policy", "messages": messages}
            assert (await system.call("POST", "/v1/chat/completions", asked, X_Rollout_Id="r"))[0] == 200
        _, rollout = await system.call("GET", "/rollouts/r?requests=whole")
        _, transitions = await system.call("GET", "/rollouts/r/transitions?requests=whole")
    assert [call["request"]["messages"] for call in rollout["calls"]] == [turns[:1], turns]
    assert transitions["data"][1]["state"]["messages"] == turns


@pytest.mark.parametrize("path", ["messages/count_tokens", "embeddings", "images/generations", "audio/speech"])
async def test_what_is_no_decision_is_forwarded_and_not_recorded(path: str) -> None:
    played, recorder = Played(), MemoryRecorder()
    played.script = lambda asked: [whole(b'{"input_tokens": 12}')]
    body = {"model": "policy", "input": "a", "messages": PARTS, "x": 2.5}
    async with (
        playing(played) as direct,
        relaying(direct, recorder) as proxied,
        aiohttp.ClientSession() as http,
        http.post(f"{proxied}/v1/{path}", json=body) as answer,
    ):
        assert (answer.status, await answer.read()) == (200, b'{"input_tokens": 12}')
    assert orjson.loads(played.asked[0].body) == body | {"model": "base"}, "the alias is the model's name"
    assert recorder.starts == []
