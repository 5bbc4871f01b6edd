"""`eval`: the whole command against a real proxy, agents as real processes and a played vLLM that says its name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from contract.system import in_this_process, ok
from contract.vllm import PlayedVllm
from lightning_proxy.commands.eval import EvalRow, ks, pass_at_k, report
from lightning_proxy.commands.run.run import RolloutResult
from lightning_proxy.core.config.root import Config

# The base model does every other task, any other model none.
AGENT = """
import json, os, urllib.request
from lightning_proxy import client

def said_by(model):
    body = {"model": model, "messages": [{"role": "user", "content": "who are you?"}]}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

task, said = client.task(), said_by("policy")
if "untrained_asks_for" in task:
    said_by(task["untrained_asks_for"])
client.emit_reward(task["x"] % 2 if said.startswith("by base") else 0.0)
"""


OTHER = "vendor/gpt-mini"
# Calls of models that are not trained do not count.
TASKS = """\
{"task_id": "t0", "x": 0}
{"task_id": "t1", "x": 1, "untrained_asks_for": "base"}
{"task_id": "t2", "x": 2}
{"task_id": "t3", "x": 3, "untrained_asks_for": "vendor/gpt-mini"}
"""


def test_another_model_is_compared_with_the_first_and_rollouts_are_opened_for_it(tmp_path: Path) -> None:
    agent, tasks, out = tmp_path / "agent.py", tmp_path / "tasks.jsonl", tmp_path / "results.json"
    agent.write_text(AGENT)
    tasks.write_text(TASKS)
    server = PlayedVllm(tmp_path)
    server.adapters[OTHER] = "its own"
    upstreams = [{"name": "policy", "kind": "vllm"}, {"name": "provider", "kind": "openai", "models": [OTHER]}]
    with in_this_process(tmp_path, server, upstreams=upstreams) as proxy:
        options = ["--tasks", tasks, "--models", f"live,{OTHER}", "--out", out]
        ok(proxy.run("eval", *options, "--", sys.executable, agent))
        (opened,) = proxy.post("/rollouts", {"task_id": "t", "model": OTHER}).json
        answer = proxy.chat(opened["rollout_id"]).json
        assert OTHER in answer["choices"][0]["message"]["content"]
        assert proxy.post("/rollouts", {"policy_version": 0, "model": OTHER}).status == 409
        assert proxy.post("/rollouts", {"policy_version": 9}).status == 404
        assert proxy.post("/rollouts", {"n": 0}).json == []
    first, other = json.loads(out.read_text())["rows"]
    assert (first["model"], first["mean_reward"], first["policy_versions"]) == ("live", 0.5, [0])
    assert (other["model"], other["mean_reward"], other["policy_versions"]) == (OTHER, 0.0, [None])
    assert (other["versus"]["model"], other["versus"]["difference"]) == ("live", -0.5)


def test_rows_are_compared_on_the_tasks_that_both_have() -> None:
    results = {"0": [("a", 0.0), ("a", 1.0), ("b", 1.0)], "1": [("b", 0.4), ("c", 1.0)], "2": []}
    rows = [
        EvalRow(name, [RolloutResult("r", task, 0, None, reward) for task, reward in own])
        for name, own in results.items()
    ]
    first, second = report(rows, {})["rows"]
    assert (first["model"], first["mean_reward"]) == ("0", 0.75)
    assert {k: chance["value"] for k, chance in first["pass_at_k"].items()} == {"1": 0.75}, "b has one rollout only"
    assert (second["versus"]["difference"], second["versus"]["tasks"]) == (pytest.approx(-0.6), 1)
    assert second["pass_at_k"]["1"]["value"] == 0.5


@pytest.mark.feature("judge")
def test_a_reward_that_only_compares_siblings_is_refused_at_once(tmp_path: Path) -> None:
    rank = {"kind": "rank", "model": "hosted_vllm/m", "api_base": "http://127.0.0.1:9/v1"}
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t"}\n')
    with in_this_process(tmp_path, judge={"use": [rank]}) as proxy:
        done = proxy.run("eval", "--tasks", tmp_path / "tasks.jsonl", "--", "true")
        assert (done.returncode, proxy.get("/rollouts")["data"]) == (2, [])
        told = "lightning-proxy: rank only compares siblings; `eval` needs an absolute reward, such as"
        assert done.stderr.startswith(told)
    posted = Config.model_validate({"judge": {"use": [rank | {"name": "order"}]}})
    assert posted.not_absolute(["order"]) and not posted.not_absolute(["order", "reward"])


def test_pass_at_k_is_the_chance_that_one_of_k_drawn_has_passed() -> None:
    """Of 4 with one that passed, 3 of the 6 pairs hold it; of 5 with two, one of 10 triples holds neither."""
    for n, c, k, expected in (
        (4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (5, 2, 3, 9 / 10), (4, 0, 4, 0.0), (4, 1, 4, 1.0), (4, 4, 1, 1.0),
    ):  # fmt: skip
        assert pass_at_k(n, c, k) == pytest.approx(expected)
    assert (ks(1), ks(4), ks(6)) == ([1], [1, 2, 4], [1, 2, 4, 6])
