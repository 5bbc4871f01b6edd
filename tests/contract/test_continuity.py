"""A conversation goes on with the very tokens that were sampled, though its text would be tokenised differently again.

The played vLLM has a token a byte, but one token for "ll", of which the model samples two. What is one training row is
seen in the record: each prompt begins with the tokens of an earlier call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from contract.scripted import Json, said, user
from contract.system import Proxy, in_this_process
from contract.vllm import PlayedVllm

END, PAIR = 0, 256


def tokenize(text: str) -> list[int]:
    ids = text.replace("ll", "\x01").replace("|", "\x00").encode()
    return [PAIR if token == 1 else token for token in ids]


def rendered(body: Json) -> list[int]:
    text = "".join(f"<{m['role']}>{_text(m['content'])}|" for m in body["messages"])
    return tokenize(text + "<assistant>" * body.get("add_generation_prompt", True))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class DriftingVllm(PlayedVllm):
    """Answers the number of the call and "hello", and takes prompts as tokens."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.render_status, self.refuses_tokens, self.ignores_tokens = 200, False, False
        self.more: Json = {}  # of each message

    async def _render(self, request: web.Request) -> web.Response:
        body: Json = {"token_ids": rendered(await request.json())} if self.render_status == 200 else {"error": {}}
        return web.json_response(body, status=self.render_status)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given and self.refuses_tokens:
            return web.json_response({"error": {"message": "no tokens, please"}}, status=400)
        prompt = rendered(body) if given is None or self.ignores_tokens else given
        ids = [*f"{len(self.requests)} hello".encode(), END]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        logprobs = {"content": [{"token": "", "logprob": -0.5} for _ in ids]}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}
        top = {"id": "x", "model": "base", "prompt_token_ids": prompt, "usage": usage}
        message = said(f"{len(self.requests)} hello", **self.more)
        if not body.get("stream"):
            return web.json_response(top | {"choices": [choice | {"message": message}]})
        text = f"data: {json.dumps(top | {'choices': [choice | {'delta': message}]})}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")


@contextmanager
def drifting(directory: Path, continuity: str = "exact", **more: Any) -> Iterator[Proxy]:
    directory.mkdir(exist_ok=True)
    policy = {"publish": "merged", "directory": str(directory / "policy"), "token_continuity": continuity}
    with in_this_process(directory, DriftingVllm(directory), policy=policy, **more) as proxy:
        yield proxy


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with drifting(tmp_path) as one:
        yield one


def talk(proxy: Proxy, turns: int, messages: list[Json], rollout: str = "r", **fields: Any) -> list[Json]:
    for number in range(turns):
        messages = [*messages, user(f"all {number}")]
        answer = proxy.chat(rollout, *messages, **fields)
        assert answer.status == 200 and b'_token_ids": [' not in answer.body
        choice = json.loads(answer.body.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]
        messages = [*messages, choice.get("message") or choice["delta"]]
    return messages


def rows(proxy: Proxy, rollout: str = "r") -> int:
    """How many training rows the rollout makes: calls that no other one's prompt begins with."""
    calls = proxy.rollout(rollout)["calls"]
    assert all(call["trainable"] for call in calls)
    whole = [call["prompt_token_ids"] + call["response_token_ids"] for call in calls]
    return sum(not any(call["prompt_token_ids"][: len(row)] == row for call in calls) for row in whole)


def outcomes(proxy: Proxy) -> dict[str, int]:
    lines = proxy.call("GET", "/metrics").body.decode().splitlines()
    found = (line.split(" ") for line in lines if line.startswith("lightning_token_continuity_total{"))
    return {labels.split('"')[1]: int(float(value)) for labels, value in found}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_one_row_and_its_text_is_the_same(proxy: Proxy, stream: bool) -> None:
    messages = talk(proxy, 4, [], stream=stream)
    assert [m["content"] for m in messages[1::2]] == [f"{n} hello" for n in (1, 2, 3, 4)]
    assert (rows(proxy), outcomes(proxy)) == (1, {"first": 1, "exact": 3})


def test_branches_and_rollouts_go_on_each_with_its_own(proxy: Proxy) -> None:
    shared = talk(proxy, 2, [])
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: talk(proxy, 2, shared), range(3)))
    talk(proxy, 2, [], "other")
    assert (rows(proxy), rows(proxy, "other")) == (3, 1)
    for number in range(12):
        proxy.chat("r", *shared, user(f"{number}"))
    assert outcomes(proxy) == {"first": 2, "exact": 1 + 6 + 1 + 12}


def test_several_proxies_share_a_conversation(tmp_path: Path) -> None:
    with drifting(tmp_path / "one") as one:
        config = yaml.safe_load(one.config.read_text())
        with drifting(tmp_path / "other", store=config["store"], upstreams=config["upstreams"]) as other:
            messages: list[Json] = []
            for proxy in (one, other, one, other, other, one):
                messages = talk(proxy, 1, messages)
            assert rows(one) == 1
            assert (outcomes(one), outcomes(other)) == ({"first": 1, "exact": 2}, {"exact": 3})


CALL: Json = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
REWRITTEN = CALL | {"id": "mine", "function": {"name": "add", "arguments": '{"a":1}'}}
PARTS = [{"type": "text", "text": "1 "}, {"type": "text", "text": "hello"}]


def test_an_answer_is_known_however_the_client_sends_it_back(proxy: Proxy) -> None:
    assert isinstance(proxy.vllm, DriftingVllm)
    ways: list[tuple[Json, Json, str]] = [
        ({}, said("1 hello", refusal=None, tool_calls=[], audio=None), "exact"),
        ({}, said(PARTS), "exact"),
        ({"reasoning": "hm", "refusal": None}, said("1 hello"), "exact"),
        ({"reasoning": "hm"}, said("1 hello", reasoning_content="hm"), "exact"),
        ({"tool_calls": [CALL]}, said("1 hello", tool_calls=[REWRITTEN]), "exact"),
        ({"reasoning": "hm"}, said("1 hello", reasoning="other"), "edited"),
        ({}, said("1 hello", tool_calls=[CALL]), "edited"),
        ({}, said("1 hello!"), "edited"),
    ]
    found = {"first": 0, "exact": 0, "edited": 0}
    for n, (more, kept, outcome) in enumerate(ways):
        proxy.vllm.more, proxy.vllm.requests, name = more, [], f"r{n}"
        (first, _) = talk(proxy, 1, [], name)
        proxy.chat(name, first | {"name": None}, kept, user("more"))
        found["first"] += 1
        found[outcome] += 1
        assert outcomes(proxy) == {name: count for name, count in found.items() if count}, kept
        assert rows(proxy, name) == (1 if outcome == "exact" else 2)


def test_what_cannot_be_exact_goes_as_text_and_is_counted(proxy: Proxy) -> None:
    before = talk(proxy, 1, [])
    proxy.chat("r", *before[:-1], said("No."), user("more"))
    proxy.chat("r", *before, user("more"), tools=[{"type": "function", "function": {"name": "f"}}])
    for more in ({"truncate_prompt_tokens": 500}, {"add_generation_prompt": False}, {"n": 2}):
        proxy.chat("r", *before, user("more"), **more)
    assert proxy.vllm is not None and not any("kv_transfer_params" in body for body in proxy.vllm.requests)
    assert outcomes(proxy) == {"first": 1, "edited": 1, "changed": 1, "unsupported": 3}


def test_a_server_that_does_not_play_along_costs_rows_and_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[tuple[Json, str, str]] = [
        ({"render_status": 403}, "unavailable", "add --enable-scale-out"),
        ({"render_status": 500}, "refused", ""),
        ({"refuses_tokens": True}, "refused", ""),
        ({"ignores_tokens": True}, "ignored", "does not take prompts as tokens"),
    ]
    for n, (fault, outcome, hint) in enumerate(faults):
        with drifting(tmp_path / f"{n}") as proxy:
            for name, value in fault.items():
                setattr(proxy.vllm, name, value)
            talk(proxy, 3, [])
            assert (rows(proxy), outcomes(proxy)) == (3, {"first": 1, outcome: 2})
            assert not hint or caplog.text.count(hint) == 1
