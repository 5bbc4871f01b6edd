"""A real small model answers better with a prompt that `optimize` found among those that a script proposes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from contract.real import LIGHT, System
from contract.system import CLI
from lightning_proxy.commands.demo.model import cache_directory, prepare_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OWN = "You are a helpful assistant."
PROPOSED = (
    "Answer with just the number.",
    "You are a calculator. You answer with one number and nothing else.",
    "You are a calculator. Answer only with a number, as in: What is 2+2? 4. What is 3+5? 8. What is 9+1? 10. "
    "What is 6+7? 13.",
    "Be brief. Only say the result.",
)
# The most likely answer earns 1 if its first eight tokens have the sum.
AGENT = f"""
import json, os, urllib.request

def post(url, body):
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)

task = json.loads(os.environ["LIGHTNING_TASK"])
messages = [{{"role": "system", "content": {OWN!r}}}, {{"role": "user", "content": task["question"]}}]
asked = {{"model": "policy", "messages": messages, "max_tokens": 8, "temperature": 0}}
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)
said = answer["choices"][0]["message"]["content"]
reward = {{"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": float(task["answer"] in said.split("+")[-1])}}
post(os.environ["LIGHTNING_URL"] + "/reward", reward | {{"comment": "the sum is " + task["answer"]}})
"""


@contextmanager
def proposing() -> Iterator[str]:
    """A model that proposes one prompt after the other, to whatever it is asked."""
    proposals = itertools.cycle(PROPOSED)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            said = f"<prompt>{next(proposals)}</prompt>" if "<critique>" in asked else "It does not say what is wanted."
            choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            data = json.dumps(body | {"usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_a_small_model_gains_from_proposed_prompts(tmp_path: Path) -> None:
    system = System(tmp_path, prepare_model(cache_directory()), "merged")
    (tmp_path / "agent.py").write_text(AGENT)
    sums = [{"question": f"What is {a}+{b}?", "answer": str(a + b)} for a in range(10) for b in range(10)]
    for name, tasks in (("sums", sums[::2]), ("held_out", sums[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    system.start()
    try:
        body = json.dumps({"name": "sums", "text": OWN, "match": {"role": "system"}}).encode()
        headers = {"Content-Type": "application/json"}
        address = f"http://127.0.0.1:{system.port}/prompts"
        urllib.request.urlopen(urllib.request.Request(address, body, headers)).close()
        with proposing() as url:
            done = subprocess.run(
                [*CLI, "--config", str(system.config), "optimize", "--method", "apo", "--prompt", "sums", "--tasks",
                 "sums.jsonl", "--held-out", "held_out.jsonl", "--reflect", "openai/m", "--reflect-url", url,
                 "--budget", "200", "--validation", "24", "--branch", "4", "--rounds", "1", "--json", *LIGHT,
                 "--", sys.executable, "agent.py"],
                capture_output=True, text=True, cwd=tmp_path, check=False,
                env=os.environ | {"OPENAI_API_KEY": "none"},
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        print(found)
        assert found["held_out"]["interval"]["low"] > 0
        assert system.get(f"/prompts/sums?version={found['version']}")["text"] == PROPOSED[2]
    finally:
        system.stop()
