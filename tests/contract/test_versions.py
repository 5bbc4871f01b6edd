"""CONTRACT.md, section 5: versions are listed, compared on held-out tasks and by what was recorded, and exported."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from contract.model import TRAINER, ModelVllm, play
from contract.system import Done, Json, Process, Proxy, in_this_process, wait_until
from support.models import save_small_model

# Version 1 does all tasks, the base model every other one.
AGENT = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return answer.headers

task = json.loads(os.environ["LIGHTNING_TASK"])
body = {"model": task.get("asks_for", "policy"), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
version = int(post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["X-Policy-Version"] or -1)
if task.get("fails"):
    sys.exit("gave up")
reward = 1.0 if version == 1 else task["x"] % 2
if not task.get("silent"):
    post(os.environ["LIGHTNING_URL"] + "/reward", {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": reward})
"""


class Evaluation:
    """`eval` over tasks of its own."""

    def __init__(self, proxy: Proxy, directory: Path, *tasks: Json) -> None:
        self.proxy, self.directory, self.out = proxy, directory, directory / "results.json"
        (directory / "agent.py").write_text(AGENT)
        lines = [json.dumps({"task_id": f"{directory.name[-20:]}-{i}"} | task) for i, task in enumerate(tasks)]
        (directory / "tasks.jsonl").write_text("\n".join(lines))

    def arguments(self, models: str, *options: str) -> list[str]:
        files = ["--tasks", str(self.directory / "tasks.jsonl"), "--out", str(self.out)]
        return [*files, "--models", models, *options, "--", sys.executable, str(self.directory / "agent.py")]

    def run(self, models: str, *options: str) -> Done:
        return self.proxy.run("eval", *self.arguments(models, *options))

    def rows(self) -> dict[str, Any]:
        return {row["model"]: row for row in json.loads(self.out.read_text())["rows"]}

    def rollouts(self) -> list[Json]:
        listed = self.proxy.get("/rollouts?limit=1000&mode=eval")["data"]
        return [one for one in listed if one["task_id"].startswith(self.directory.name[-20:])]


TASKS: list[Json] = [{"x": 0}, {"x": 1}, {"x": 2}, {"x": 3}]
Trained = Callable[[str], AbstractContextManager[Proxy]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A proxy with a trained version 1, which is live."""
    model = save_small_model(tmp_path_factory.mktemp("model") / "base")

    @contextmanager
    def start(publish: str) -> Iterator[Proxy]:
        policy = {"model": str(model), "publish": publish}
        directory = tmp_path_factory.mktemp(publish)
        with in_this_process(directory, ModelVllm(model), policy=policy, trainer=TRAINER) as proxy:
            play(proxy, "trained")
            ok(proxy.run("train", "--once"))
            yield proxy

    return start


@pytest.fixture(scope="module")
def lora(trained: Trained) -> Iterator[Proxy]:
    with trained("lora") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def merged(trained: Trained) -> Iterator[Proxy]:
    with trained("merged") as proxy:
        yield proxy


def ok(done: Done) -> Done:
    assert done.returncode == 0, done
    return done


def told(done: Done) -> str:
    return " ".join((done.stdout + done.stderr).split())


def test_versions_are_compared_on_held_out_tasks(lora: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(lora, tmp_path, *TASKS)
    ok(held_out.run("0,live", "--samples", "2"))
    found = json.loads(held_out.out.read_text())
    assert (found["complete"], found["samples"]) == (True, 2)
    base, live = held_out.rows().values()
    assert (base["mean_reward"], live["mean_reward"]) == (0.5, 1.0)
    assert (base["policy_versions"], live["policy_versions"]) == ([0], [1])
    assert (base["pass_at_k"]["2"]["value"], live["pass_at_k"]["1"]["value"]) == (0.5, 1.0)
    versus = live["versus"]
    assert (versus["model"], versus["difference"], versus["tasks"], versus["p"]) == ("0", 0.5, 4, 0.5)
    assert len(held_out.rollouts()) == 2 * 4 * 2 and lora.get("/policy")["live_version"] == 1
    shown = ok(held_out.run("0,1")).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0].startswith("model reward 95 % pass@1") and lines[1].startswith("0 0.500 ") and "\x1b" not in shown
    assert any(line.startswith("1 +0.500 ") for line in lines)


def test_failed_rollouts_and_those_without_a_reward_count_as_0(lora: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(lora, tmp_path, {"x": 1}, {"x": 1, "fails": True}, {"x": 1, "silent": True}, {"x": 1})
    ok(held_out.run("1"))
    row = held_out.rows()["1"]
    assert (row["failed"], row["without_reward"], row["mean_reward"]) == (1, 2, 0.5)


def test_what_cannot_answer_is_said_before_anything_starts(lora: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(lora, tmp_path, *TASKS)
    for models, why in {
        "live,7": "no policy version 7",
        "live,nobody": "no upstream serves the model 'nobody'",
        "0,base": "each once",
        "live,": "each once",
    }.items():
        done = held_out.run(models)
        assert done.returncode in (1, 2) and why in told(done) and held_out.rollouts() == []


def test_an_agent_that_asks_for_a_model_by_name_is_found_out(lora: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(lora, tmp_path, {"x": 1}, {"x": 1, "asks_for": "base"})
    done = held_out.run("1", "--concurrency", "1")
    assert done.returncode == 1 and "was answered by version 0" in told(done) and not held_out.rows()["1"]["complete"]


@torch.no_grad()
def logits(directory: Path, base: Path) -> Any:
    if (directory / "adapter_config.json").exists():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
    else:
        assert AutoTokenizer.from_pretrained(directory).get_vocab()
        model = AutoModelForCausalLM.from_pretrained(directory)
    return model(torch.tensor([[0, 5, 6, 7]])).logits


@pytest.mark.parametrize("publish", ["lora", "merged"])
def test_a_version_leaves_as_a_directory_with_the_weights_that_were_served(
    publish: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    proxy: Proxy = request.getfixturevalue(publish)
    assert isinstance(proxy.vllm, ModelVllm)
    base, version = proxy.vllm.root, ok(proxy.run("policy", "list", "--json")).json["data"][1]
    served = logits(Path(version["path"]), base)
    assert not torch.allclose(served, logits(base, base), atol=1e-4), "it was trained"
    for form in ("adapter", "merged"):
        ok(proxy.run("policy", "export", "1", tmp_path / form, "--as", form))
        assert (tmp_path / form / "adapter_config.json").exists() == (form == "adapter")
        torch.testing.assert_close(logits(tmp_path / form, base), served, atol=1e-5, rtol=1e-4)
        files = [tmp_path / form, *(tmp_path / form).rglob("*")]
        assert not [file for file in files if file.stat().st_mode & 0o077], "only their owner reads them"
        assert str(base) not in (tmp_path / form / "README.md").read_text()


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(lora: Proxy, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for code, why, version, directory in (
        (2, "version 0 is the base model itself", "0", "new"),
        (1, "no policy version 9", "9", "new"),
        (2, "choose a new directory", "1", "full"),
        (1, "cannot write", "1", "full/x/new"),
    ):
        done = lora.run("policy", "export", version, tmp_path / directory)
        assert (done.returncode, done.stderr.count("\n"), why in done.stderr) == (code, 1, True), done
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "x"]


def test_where_weights_are_merged_versions_answer_in_turn_and_the_live_one_is_live_again(
    merged: Proxy, tmp_path: Path
) -> None:
    held_out = Evaluation(merged, tmp_path, *TASKS)
    refused = held_out.run("0,1")
    assert refused.returncode == 1 and "--promote" in refused.stderr and held_out.rollouts() == []
    assert "no policy version 9" in held_out.run("live,9", "--promote").stderr
    done = ok(held_out.run("live,0", "--promote"))
    live, base = held_out.rows().values()
    assert (live["policy_versions"], base["policy_versions"]) == ([1], [0])
    assert (live["mean_reward"], base["mean_reward"]) == (1.0, 0.5)
    assert merged.get("/policy")["live_version"] == 1 and "1 is live again" in told(done)


def test_ctrl_c_leaves_what_was_done_and_puts_the_live_version_back(merged: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(merged, tmp_path, *TASKS * 20)
    process = Process(merged.directory, "eval", *held_out.arguments("0", "--promote", "--concurrency", "1"))
    process.start()
    wait_until(lambda: sum(one["reward"] is not None for one in held_out.rollouts()) >= 5, 60, "some are done")
    assert merged.get("/policy")["live_version"] == 0
    assert (process.end(signal.SIGINT), merged.get("/policy")["live_version"]) == (130, 1)
    row = held_out.rows()["0"]
    assert not row["complete"] and 0 < row["rollouts"] < 80
