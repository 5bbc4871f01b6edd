"""The power sampling example: its chain against p^alpha worked out, and the program before a played model server."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from support.paths import EXAMPLES, load_module

PROGRAM = EXAMPLES / "power_sampling" / "sample.py"
PROMPT, END, LONGEST = [7, 8], 2, 4
example: Any = load_module(PROGRAM)


def next_token(prefix: Sequence[int]) -> tuple[float, float, float]:
    """The chances of 0, 1 and the end; a first 0 is likely, and followed by nothing that is."""
    if not prefix:
        return (0.6, 0.3, 0.1)
    return (0.4, 0.35, 0.25) if prefix[0] == 0 else (0.05, 0.9, 0.05)


def ending(source: random.Random, prefix: Sequence[int], tokens: int) -> Any:
    found, logprobs = list(prefix), list[float]()
    while len(logprobs) < tokens and found[-1:] != [END]:
        chances = next_token(found)
        found += source.choices(range(3), chances)
        logprobs.append(math.log(chances[found[-1]]))
    return example.Answer(tuple(found[len(prefix) :]), tuple(logprobs), found[-1] == END)


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_answers_come_in_proportion_to_the_power_of_their_probability(alpha: float) -> None:
    source = random.Random(0)
    whole = [
        answer
        for length in range(1, LONGEST + 1)
        for answer in itertools.product(range(3), repeat=length)
        if (answer[-1] == END or length == LONGEST) and END not in answer[:-1]
    ]
    powers = [math.prod(next_token(one[:i])[token] for i, token in enumerate(one)) ** alpha for one in whole]

    def propose(prefix: Sequence[int], tokens: int) -> list[Any]:
        return [ending(source, prefix, tokens) for _ in range(3)]

    seen: Counter[tuple[int, ...]] = Counter(
        example.power_sample(propose, alpha, LONGEST, source, moves=12).tokens for _ in range(4000)
    )
    assert set(seen) <= set(whole)
    apart = sum(abs(seen[one] / 4000 - p / sum(powers)) for one, p in zip(whole, powers, strict=True)) / 2
    assert apart < 0.04


class PlayedServer(BaseHTTPRequestHandler):
    """The routes of vLLM that the program asks, over `next_token`; a token's text is its number."""

    source = random.Random(0)

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "toy", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        about = {"id": "x", "object": "x", "created": 0, "model": "toy"}
        if self.path == "/v1/chat/completions":
            self._answer(about | {"choices": [], "prompt_token_ids": PROMPT})
        elif body.get("echo"):
            text = "".join(map(str, body["prompt"]))
            self._answer(about | {"choices": [{"index": 0, "finish_reason": "length", "text": text}]})
        else:
            prefix, tokens = body["prompt"][len(PROMPT) :], min(body["max_tokens"], LONGEST)
            found = [ending(self.source, prefix, tokens - len(prefix) or 1) for _ in range(body["n"])]
            self._answer(about | {"choices": [self._choice(one) for one in found]})

    def _choice(self, one: Any) -> dict[str, Any]:
        logprobs = {"token_logprobs": one.logprobs}
        ended = "stop" if one.ended else "length"
        return {"index": 0, "text": "", "finish_reason": ended, "token_ids": one.tokens, "logprobs": logprobs}

    def _answer(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), PlayedServer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_the_program_finds_the_likeliest_answer_which_does_not_begin_with_the_likeliest_token(url: str) -> None:
    command = [sys.executable, str(PROGRAM), "?", "--url", url, "--alpha", "50", "--max-tokens", "4", "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["1111"]), done.stderr
