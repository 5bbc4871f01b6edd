"""A real small model answers sums by two prompts, and the gate finds the better one."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from support.whole_system import CLI, LIGHT, System

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OWN = "You are a helpful assistant."
BETTER = (
    "You are a calculator. Answer only with a number, as in: What is 2+2? 4. What is 3+5? 8. What is 9+1? 10. "
    "What is 6+7? 13."
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
post(os.environ["LIGHTNING_URL"] + "/reward", reward)
"""


class Prompts:
    """The prompt `sums` of a running system, and the agent whose message it replaces."""

    def __init__(self, system: System, directory: Path) -> None:
        self._system, self._directory = system, directory
        (directory / "agent.py").write_text(AGENT)
        sums = [{"question": f"What is {a}+{b}?", "answer": str(a + b)} for a in range(10) for b in range(10)]
        order = random.Random(0)
        self._tasks = itertools.chain.from_iterable(order.sample(sums, len(sums)) for _ in itertools.count())

    def post(self, path: str, body: dict[str, Any]) -> Any:
        url = f"http://127.0.0.1:{self._system.port}/prompts{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [*CLI, "--config", str(self._system.config), *arguments],
            capture_output=True, text=True, cwd=self._directory, check=False, env=os.environ,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tested(self, version: int) -> dict[str, Any]:
        """Let the agent work until the test of a version is decided; return the test."""
        for _ in range(60):
            tasks = itertools.islice(self._tasks, 20)
            (self._directory / "sums.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
            self.command("run", "--tasks", "sums.jsonl", "--group-size", "2", *LIGHT, "--", sys.executable, "agent.py")
            test: dict[str, Any] = self._system.get("/prompts/sums")["versions"][version - 1]["promotion"]
            if test["status"] != "testing":
                return test
        raise AssertionError(test)


def test_the_better_prompt_goes_live_and_the_worse_one_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {"group_size": 2, "tasks_per_step": 100_000}  # no step: the weights stay as they are
    system = System(tmp_path, prepare_model(cache_directory()), "merged", trainer)
    prompts = Prompts(system, tmp_path)
    monkeypatch.setenv("LIGHTNING_PROMPTS__PROMOTION", "gated")
    system.start()
    try:
        prompts.post("", {"name": "sums", "text": OWN})
        assert prompts.post("", {"name": "sums", "text": BETTER, "promote": True})["test"]["version"] == 2
        better = prompts.tested(2)
        print(better, prompts.command("prompts", "list"), sep="\n")
        assert better["status"] == "promoted" and system.get("/prompts/sums")["live_version"] == 2
        prompts.post("/sums/test", {"version": 1})
        worse = prompts.tested(1)
        print(worse, prompts.command("prompts", "list"), sep="\n")
        assert worse["status"] == "rejected" and system.get("/prompts/sums")["live_version"] == 2
    finally:
        system.stop()
