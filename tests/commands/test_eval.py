"""`eval`: the whole command against a real proxy, agents as real processes and a played vLLM that says its name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from contract.system import listening
from lightning_proxy.commands.eval import EvalRow, ks, pass_at_k, report
from lightning_proxy.commands.run.run import RolloutResult
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.upstreams import UpstreamConfig

# Version 1 does all tasks, the base model every other one, any other model none.
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
client.emit_reward(1.0 if said.startswith("by policy-v1") else task["x"] % 2 if said.startswith("by base") else 0.0)
"""


# Calls of models that are not trained do not count.
TASKS = [{"x": 0}, {"x": 1, "untrained_asks_for": "base"}, {"x": 2}, {"x": 3, "untrained_asks_for": "vendor/gpt-mini"}]


async def test_other_models_are_compared_with_the_first_and_rollouts_are_opened_for_them(
    running: Any, tmp_path: Path
) -> None:
    async def chat(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": f"by {(await request.json())['model']}"}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    agent, tasks, out = tmp_path / "agent.py", tmp_path / "tasks.jsonl", tmp_path / "results.json"
    agent.write_text(AGENT)
    tasks.write_text("".join(json.dumps({"task_id": f"t{i}"} | task) + "\n" for i, task in enumerate(TASKS)))
    async with listening(app) as url:
        other = UpstreamConfig(name="provider", kind="openai", base_url=f"{url}/v1", models=["vendor/gpt-mini"])
        async with running(tmp_path, publish="lora", others=[other]) as system:
            async with system.store() as store:
                assert await system.earlier_version(store, tmp_path) == 1
            options = ["--tasks", tasks, "--models", "live,1,vendor/gpt-mini", "--out", out]
            done = await system.lightning("eval", *options, "--", sys.executable, agent)
            assert done[0] == 0, done
            for choice, by in (({"policy_version": 1}, "policy-v1"), ({"model": "vendor/gpt-mini"}, "vendor/gpt-mini")):
                _, (opened,) = await system.call("POST", "/rollouts", {"task_id": "t", **choice})
                _, said = await system.chat(opened["rollout_id"])
                assert said["choices"][0]["message"]["content"].split()[1] == by
            for both, status in (({"policy_version": 1, "model": "base"}, 409), ({"policy_version": 9}, 404)):
                assert (await system.call("POST", "/rollouts", both))[0] == status
            assert await system.call("POST", "/rollouts", {"n": 0}) == (200, [])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["mean_reward"], row["policy_versions"]) for row in rows] == [
        ("live", 0.5, [0]), ("1", 1.0, [1]), ("vendor/gpt-mini", 0.0, [None]),
    ]  # fmt: skip
    assert [(row["versus"]["model"], row["versus"]["difference"]) for row in rows[1:]] == [
        ("live", 0.5),
        ("live", -0.5),
    ]


def test_rows_are_compared_on_the_tasks_that_both_have() -> None:
    def row(name: str, rewards: dict[str, list[float]]) -> EvalRow:
        results = [RolloutResult("r", task, 0, None, reward) for task, own in rewards.items() for reward in own]
        return EvalRow(name, results)

    first, second = row("0", {"a": [0.0, 1.0], "b": [1.0]}), row("1", {"b": [0.4], "c": [1.0]})
    found = report([first, second, row("2", {})], {})
    assert [r["model"] for r in found["rows"]] == ["0", "1"]
    assert (found["rows"][0]["mean_reward"], found["rows"][0]["pass_at_k"]["1"]["value"]) == (0.75, 0.75)
    assert list(found["rows"][0]["pass_at_k"]) == ["1"]  # task b has one rollout only
    assert (found["rows"][1]["versus"]["difference"], found["rows"][1]["versus"]["tasks"]) == (pytest.approx(-0.6), 1)
    assert found["rows"][1]["pass_at_k"]["1"]["value"] == 0.5


async def test_a_reward_that_only_compares_siblings_is_refused_at_once(running: Any, tmp_path: Path) -> None:
    rank = {"kind": "rank", "model": "hosted_vllm/m", "api_base": "http://127.0.0.1:9/v1"}
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t"}\n')
    async with running(tmp_path, rewards={"use": [rank]}) as system:
        code, _, err = await system.lightning("eval", "--tasks", tmp_path / "tasks.jsonl", "--", "true")
        assert (code, (await system.call("GET", "/rollouts"))[1]["data"]) == (2, [])
        assert err.startswith("lightning-proxy: rank only compares siblings; `eval` needs an absolute reward, such as")
    posted = Config.model_validate({"judge": {"use": [rank | {"name": "order"}]}})
    assert posted.not_absolute(["order"]) and not posted.not_absolute(["order", "reward"])


def test_pass_at_k_is_the_chance_that_one_of_k_drawn_has_passed() -> None:
    """Of 4 with one that passed, 3 of the 6 pairs hold it; of 5 with two, one of 10 triples holds neither."""
    for n, c, k, expected in (
        (4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (5, 2, 3, 9 / 10), (4, 0, 4, 0.0), (4, 1, 4, 1.0), (4, 4, 1, 1.0),
    ):  # fmt: skip
        assert pass_at_k(n, c, k) == pytest.approx(expected)
    assert (ks(1), ks(4), ks(6)) == ([1], [1, 2, 4], [1, 2, 4, 6])
