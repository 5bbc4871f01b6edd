"""The whole system, run as a user runs it: `up`, agents under `run`, `eval`; on free ports, in its own directory."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from support.paths import EXAMPLES

CLI = [sys.executable, "-m", "lightning_proxy.cli"]
LETTERS = "abcdefghijklmnopqrstuvwxyz ?"
GROUP, TASKS = 8, 4
LIGHT = ["--preload", "urllib.request"]
PLANNER_EXECUTOR = EXAMPLES / "planner_executor"

# The reward is the share of vowels: a random model writes few, and every answer says a little about how to get more.
AGENT = """
import json, os, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)

messages = [{"role": "user", "content": json.loads(os.environ["LIGHTNING_TASK"])["prompt"]}]
asked = {"model": "policy", "messages": messages, "max_tokens": 12, "temperature": 1.0}
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)
text = answer["choices"][0]["message"]["content"] or ""
reward = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": sum(c in "aeiou" for c in text) / 12}
post(os.environ["LIGHTNING_URL"] + "/reward", reward)
"""


class System:
    """`lightning-proxy up` on free ports, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        publish: str,
        trainer: dict[str, Any],
        policy: dict[str, Any] | None = None,
        vllm: dict[str, Any] | None = None,
        others: Callable[[int], list[dict[str, Any]]] = lambda vllm_port: [],
    ) -> None:
        """`others`: further upstreams."""
        self.directory = directory
        self.port, self.vllm_port = free_port(), free_port()
        self.config = directory / "config.yaml"
        ours = {"name": "policy", "kind": "vllm", "base_url": f"http://127.0.0.1:{self.vllm_port}/v1"}
        settings = {
            "proxy": {"port": self.port},
            "store": {"url": f"sqlite:///{directory}/store.db"},
            "upstreams": [ours, *others(self.vllm_port)],
            "policy": {"model": str(model), "publish": publish, "directory": f"{directory}/policy"} | (policy or {}),
            "vllm": {"port": self.vllm_port, "max_model_len": 256, "kv_cache_gib": 1} | (vllm or {}),
            "trainer": {
                "group_size": GROUP, "tasks_per_step": TASKS, "learning_rate": 5e-3, "report_to": [],
                "poll_s": 0.1, "group_timeout_s": 30, **trainer,
            },
        }  # fmt: skip
        self.config.write_text(yaml.safe_dump(settings))
        self.process: subprocess.Popen[bytes] | None = None
        self.second: subprocess.Popen[bytes] | None = None

    def set_up_second_server(self) -> int:
        """Two servers behind two workers; returns the port of the server that `start_second_server` starts."""
        port = free_port()
        settings = yaml.safe_load(self.config.read_text())
        settings["upstreams"][0]["replicas"] = [f"http://127.0.0.1:{port}/v1"]
        settings["proxy"]["workers"] = 2
        self.config.write_text(yaml.safe_dump(settings))
        return port

    def start_second_server(self, port: int) -> None:
        with (self.directory / "second.log").open("ab") as log:
            self.second = subprocess.Popen(
                [*CLI, "--config", str(self.config), "vllm"], stdout=log, stderr=log, cwd=self.directory,
                env=os.environ | {"LIGHTNING_VLLM__PORT": str(port)}, start_new_session=True,
            )  # fmt: skip
        wait_until(lambda: served_weights(port), 240, "the second server is there")

    def kill_second_server(self) -> None:
        if self.second is not None:
            os.killpg(self.second.pid, signal.SIGKILL)
            self.second.wait()
            self.second = None

    def start(self) -> None:
        with (self.directory / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*CLI, "--config", str(self.config), "up", "--logs", str(self.directory / "logs")],
                stdout=log, stderr=log, cwd=self.directory, start_new_session=True,
            )  # fmt: skip
        wait_until(lambda: self.get("/readyz").get("status") == "ready", 480, "the system is ready")

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) in (0, 130), (self.directory / "up.log").read_text()

    def get(self, path: str) -> dict[str, Any]:
        assert self.process is None or self.process.poll() is None, (self.directory / "up.log").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            return {}

    def promote(self, version: int) -> None:
        body, headers = json.dumps({"version": version}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/policy/promote", body, headers)
        urllib.request.urlopen(request, timeout=60).close()

    def run_agents(self, repeat: int, mode: str = "train") -> dict[str, Any]:
        """Let the agent work on every task, `GROUP` siblings each, `repeat` times over."""
        agent, tasks = self.directory / "agent.py", self.directory / "tasks.jsonl"
        agent.write_text(AGENT)
        lines = [{"task_id": f"{mode}-{time.time_ns()}-{i}", "prompt": LETTERS[i] * 3} for i in range(TASKS * repeat)]
        tasks.write_text("\n".join(map(json.dumps, lines)))
        return self.run(agent, tasks, *LIGHT, "--mode", mode)

    def run(self, agent: Path, tasks: Path, *options: str, **environment: str) -> dict[str, Any]:
        """What `lightning-proxy run` says in the end."""
        done = subprocess.run(
            [*CLI, "--config", str(self.config), "run", "--tasks", str(tasks), "--group-size", str(GROUP), "--json",
             "--concurrency", "16", *options, "--", sys.executable, str(agent)],
            capture_output=True, text=True, cwd=self.directory, check=False,
            env=os.environ | {"COLUMNS": "80"} | environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary

    def evaluate(self, *models: str) -> list[dict[str, Any]]:
        """What `lightning-proxy eval` finds on the agent's last tasks, a row for each model.

        One program at a time: vLLM on a CPU mixes an adapter with the base model in one batch.
        """
        done = subprocess.run(
            [*CLI, "--config", str(self.config), "eval", "--tasks", "tasks.jsonl", "--models", ",".join(models),
             "--samples", "2", "--concurrency", "1", "--json", *LIGHT, "--", sys.executable, "agent.py"],
            capture_output=True, text=True, cwd=self.directory, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
        return rows

    def play(self, boards: str, *options: str) -> float:
        """The mean reward of the planner and the executor on the example's boards, trained on or held out."""
        agent, tasks = PLANNER_EXECUTOR / "agent.py", PLANNER_EXECUTOR / f"{boards}.jsonl"
        return float(self.run(agent, tasks, "--preload", "openai,openai.resources", *options)["mean_reward"])

    def measure(self) -> float:
        """The same on boards that nothing is trained on."""
        return self.play("held_out", "--mode", "eval", "--repeat", "2")

    def waiting(self) -> list[Any]:
        """Rollouts that have ended and whose step has not ended yet.

        What a step publishes is verified beside the live version, and vLLM on a CPU mixes an adapter with the base
        model in one batch.
        """
        last = self.get("/policy")["last_step"] or {"step": 0, "metrics": {"publish_s": 0.0}}
        done = last["step"] if "publish_s" in last["metrics"] else last["step"] - 1
        found = self.get("/rollouts?limit=1000&mode=train")["data"]
        ended = [r for r in found if r["status"] != "running" and r["dropped"] is None]
        return [r for r in ended if r["step"] is None or r["step"] > done]

    def live(self) -> dict[str, Any]:
        """The version that answers new rollouts."""
        number = self.get("/policy")["live_version"]
        return next(v for v in self.get("/policy/versions")["data"] if v["version"] == number)

    def steps(self) -> int:
        return int(self.get("/policy").get("steps", 0))


def served_weights(port: int) -> str:
    """The label of the weights that a server has; empty where there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/weight_info", timeout=30) as answer:
            return str(json.load(answer)["weight_version"])
    except OSError:
        return ""


def free_port() -> int:
    """A port below those that the system gives out by itself, or a test beside this one may get it meanwhile."""
    while True:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(listener.getsockname()[1])


def wait_until(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)
