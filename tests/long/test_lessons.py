"""Lessons on a real vLLM that take long: parts that are killed, two servers, several agents."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from contract.real import GROUP, LETTERS, TASKS, System
from contract.system import wait_until
from support.models import save_llama
from support.paths import EXAMPLES

PLANNER_EXECUTOR = EXAMPLES / "planner_executor"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # a minute each on two idle cores


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with one token a letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model") / "tiny"
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}?{% endfor %}"
    save_llama(
        directory, len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    fast.save_pretrained(directory)
    return directory


@pytest.fixture
def make_system(tmp_path: Path, tiny_model: Path) -> Iterator[Any]:
    made: list[System] = []

    def make(publish: str, policy: dict[str, Any] | None = None, **trainer: Any) -> System:
        made.append(System(tmp_path, tiny_model, publish, trainer=trainer, policy=policy))
        return made[-1]

    yield make
    for system in made:
        if system.server.running:
            system.server.end(signal.SIGKILL)


def test_parts_that_are_killed_go_on_where_they_were(make_system: Any) -> None:
    system: System = make_system("merged")
    system.start()
    before = system.run_agents(repeat=1, mode="eval")["mean_reward"]
    for kill_after in (0.0, 0.4, 1.0):
        system.run_agents(repeat=2)
        time.sleep(kill_after)
        kill(system, "train")  # `up` starts it again
    wait_until(lambda: not system.waiting(), 120, "every rollout was trained on or dropped")
    rollouts = system.get("/rollouts?limit=1000&mode=train")["data"]
    assert len(rollouts) == 3 * 2 * TASKS * GROUP
    assert all((r["step"] is None) != (r["dropped"] is None) for r in rollouts)
    wait_until(lambda: system.live()["step"] == system.steps(), 60, "the last step is published")
    assert system.live()["status"] == "live"
    kill(system, "vllm.entrypoints.openai.api_server")
    wait_until(lambda: system.call("GET", "/readyz").status != 200, 30, "vLLM is gone")
    system.wait_for("/readyz", 300)
    assert system.run_agents(repeat=1, mode="eval")["mean_reward"] > before + 0.2, "the live version is served again"
    system.stop()


def test_two_agents_with_adapters_of_their_own_are_each_answered_by_theirs(make_system: Any) -> None:
    settings = yaml.safe_load((PLANNER_EXECUTOR / "own_adapters.yaml").read_text())
    trainer = settings["trainer"] | {"learning_rate": 1e-2}
    system: System = make_system("lora", {"adapters": settings["policy"]["adapters"]}, **trainer)
    system.start()
    agent, tasks = PLANNER_EXECUTOR / "agent.py", PLANNER_EXECUTOR / "tasks.jsonl"
    done = 0
    for _ in range(2):  # at first by the base model
        before = done
        system.run_program(agent, tasks, "--preload", "openai,openai.resources", "--repeat", "2")
        wait_until(lambda: not system.waiting(), 60, "every rollout was trained on or dropped")
        wait_until(lambda: system.live()["step"] == system.steps(), 60, "the last step is published")
        done = system.steps()
    steps = [step["metrics"] for step in system.get("/policy/steps")["data"] if step["step"] > before]
    apart = [step["sampler_difference"] for step in steps if "sampler_difference" in step]
    assert 0 < max(apart) < 1e-3
    planner, executor = (file.read_bytes() for file in Path(system.live()["path"]).glob("*/adapter_model.safetensors"))
    assert planner != executor
    system.stop()


def kill(system: System, part: str) -> None:
    """kill -9 a part of the system, told by an argument of its command line."""
    for process in psutil.process_iter(["cmdline"]):
        argv = process.info["cmdline"] or []
        is_ours = str(system.config) in argv or str(system.vllm_port) in argv
        if is_ours and part in argv and "guard.py" not in "".join(argv):
            process.kill()
