"""The whole system with a real vLLM, as a user runs it: `up`, and agents under `run`. Tests share two."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.system import Process, Served, free_port, ok, write_config
from support.models import TEMPLATE
from support.paths import has

Json = dict[str, Any]
NAME = "speller"
LETTERS = "abcdefghijklmnopqrstuvwxyz ?"
GROUP, TASKS = 8, 4
LIGHT = ["--preload", "urllib.request"]

# The reward is the share of vowels: a random model writes few, and every answer says a little about how to get more.
AGENT = """
import json, os, time, urllib.error, urllib.request

def post(url, body, retries=9):  # as official clients do it, but more often
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code < 500 or not retries:
            raise
    time.sleep(0.5)
    return post(url, body, retries - 1)

messages = [{"role": "user", "content": json.loads(os.environ["LIGHTNING_TASK"])["prompt"]}]
asked = {"model": "policy", "messages": messages, "max_tokens": 12, "temperature": 1.0}
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)
text = answer["choices"][0]["message"]["content"] or ""
reward = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": sum(c in "aeiou" for c in text) / 12}
post(os.environ["LIGHTNING_URL"] + "/reward", reward)
"""


class System(Served):
    def __init__(
        self, directory: Path, model: Path, publish: str, *,
        policy: Json | None = None, trainer: Json | None = None, vllm: Json | None = None, **sections: Json,
    ) -> None:  # fmt: skip
        self.port, self.vllm_port = free_port(), free_port()
        server = Process(directory, "up", "--logs", str(directory / "logs"))
        super().__init__(f"http://127.0.0.1:{self.port}", directory, server=server)
        (directory / "agent.py").write_text(AGENT)  # once: an evaluation may read it at any time
        own = f"http://127.0.0.1:{self.vllm_port}/v1"
        write_config(
            directory, own, self.port,
            policy={"model": str(model), "publish": publish} | (policy or {}),
            vllm={"port": self.vllm_port, "max_model_len": 256, "kv_cache_gib": 1} | (vllm or {}),
            trainer={
                "group_size": GROUP, "tasks_per_step": TASKS, "learning_rate": 5e-3, "report_to": [],
                "group_timeout_s": 30, "collapse": {"action": "warn"},  # so large a rate moves far in a step
            } | (trainer or {}),
            **sections,
        )  # fmt: skip

    def start(self) -> None:
        self.server.start()
        self.wait_for("/readyz", 480)

    def stop(self) -> None:
        assert self.server.end(signal.SIGINT) in (0, 130), self.server.log.read_text()
        self.client.close()

    def run_agents(self, repeat: int, mode: str = "train") -> Json:
        """Let the agent work on every task, `GROUP` siblings each, `repeat` times over."""
        tasks = self.directory / "tasks.jsonl"
        lines = [{"task_id": f"{mode}-{time.time_ns()}-{i}", "prompt": LETTERS[i] * 3} for i in range(TASKS * repeat)]
        tasks.write_text("\n".join(map(json.dumps, lines)))
        return self.run_program(self.directory / "agent.py", tasks, *LIGHT, "--mode", mode)

    def run_program(self, agent: Path, tasks: Path, *options: str) -> Any:
        options = ("--tasks", str(tasks), "--group-size", str(GROUP), "--json", "--concurrency", "16", *options)
        return ok(self.run("run", *options, "--", sys.executable, agent)).json

    def waiting(self) -> list[Json]:
        """Rollouts that have ended and wait for the end of their step: vLLM on a CPU mixes adapters in a batch."""
        last = self.get("/policy")["last_step"] or {"step": 0, "metrics": {"publish_s": 0.0}}
        done = last["step"] if "publish_s" in last["metrics"] else last["step"] - 1
        found = self.get("/rollouts?limit=1000&mode=train")["data"]
        ended = [r for r in found if r["status"] != "running" and r["dropped"] is None]
        return [r for r in ended if r["step"] is None or r["step"] > done]

    def live(self) -> Json:
        number = self.get("/policy")["live_version"]
        return next(v for v in self.get("/policy/versions")["data"] if v["version"] == number)

    def steps(self) -> int:
        return int(self.get("/policy")["steps"])

    def promote(self, version: int) -> None:
        assert self.post("/policy/promote", {"version": version}).status == 200


@pytest.fixture(scope="session")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models import save_spelling_model  # imports torch

    return save_spelling_model(tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="session")
def merged(speller: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    yield from _running("merged", speller, tmp_path_factory.mktemp("merged"))


@pytest.fixture(scope="session")
def lora(speller: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    yield from _running("lora", speller, tmp_path_factory.mktemp("lora"))


def _running(publish: str, model: Path, directory: Path) -> Iterator[System]:
    template = directory / "template.jinja"
    template.write_text(TEMPLATE.strip())
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(template)]
    more: Json = {}
    if publish == "merged" and has("evaluation"):  # of new versions, between steps
        held_out = directory / "held_out.jsonl"
        held_out.write_text("".join(f'{{"prompt": "{letter * 3}"}}\n' for letter in "wxyz"))
        command = f"{sys.executable} {directory / 'agent.py'}"
        more["evaluation"] = {"tasks": str(held_out), "command": command, "every_steps": 2, "samples": 2}
    system = System(directory, model, publish, vllm={"max_model_len": 1024, "extra_args": tools}, **more)
    try:
        system.start()
        yield system
    finally:
        system.stop()
