"""`eval`: the whole command against a real proxy, agents as real processes and a played vLLM that says its name."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from contract.system import listening
from lightning_proxy.commands.eval import EvalRow, ks, parse_models, pass_at_k, report
from lightning_proxy.commands.run.run import RolloutResult
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.core.errors import ConfigError
from tests.conftest import System

Running = Callable[..., AbstractAsyncContextManager[System]]

# Version 1 does all tasks, the base model every other one, any other model none.
AGENT = """
import json, os, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)

task = json.loads(os.environ["LIGHTNING_TASK"])
asked = {"model": "policy", "messages": [{"role": "user", "content": "who are you?"}]}
said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)["choices"][0]["message"]["content"]
if "untrained_asks_for" in task:
    post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked | {"model": task["untrained_asks_for"]})
trained = said.startswith("by policy-v1") or said.endswith("with v1")
reward = 1.0 if trained else task["x"] % 2 if said.startswith("by base") else 0.0
post(os.environ["LIGHTNING_URL"] + "/reward", {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": reward})
"""


# Calls of models that are not trained do not count.
TASKS = [{"x": 0}, {"x": 1, "untrained_asks_for": "base"}, {"x": 2}, {"x": 3, "untrained_asks_for": "vendor/gpt-mini"}]


@asynccontextmanager
async def evaluating(running: Running, directory: Path, **more: Any) -> AsyncIterator[System]:
    """A system with another provider and policy version 1, while the base model is live."""

    async def chat(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": f"by {(await request.json())['model']}"}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    (directory / "agent.py").write_text(AGENT)
    (directory / "tasks.jsonl").write_text(
        "".join(json.dumps({"task_id": f"t{i}"} | task) + "\n" for i, task in enumerate(TASKS))
    )
    async with listening(app) as url:
        other = UpstreamConfig(name="provider", kind="openai", base_url=f"{url}/v1", models=["vendor/gpt-mini"])
        async with running(directory, publish="lora", others=[other], **more) as system:
            async with system.store() as store:
                assert await system.earlier_version(store, directory) == 1
            yield system


async def evaluate(system: System, directory: Path, *options: str) -> tuple[int, str, str]:
    which = ["eval", "--tasks", str(directory / "tasks.jsonl"), "--out", str(directory / "results.json"), *options]
    return await system.lightning(*which, "--", sys.executable, str(directory / "agent.py"))


async def test_versions_and_other_models_are_compared_with_the_first(running: Running, tmp_path: Path) -> None:
    async with evaluating(running, tmp_path) as system:
        done = await evaluate(system, tmp_path, "--models", "live,1,base,vendor/gpt-mini", "--samples", "2")
        rollouts = (await system.call("GET", "/rollouts?limit=1000"))[1]["data"]
    assert done[0] == 0, done
    found = json.loads((tmp_path / "results.json").read_text())
    rows = {row["model"]: row for row in found["rows"]}
    assert {name: row["mean_reward"] for name, row in rows.items()} == {
        "live": 0.5, "1": 1.0, "0": 0.5, "vendor/gpt-mini": 0.0,
    }  # fmt: skip
    assert [row["policy_versions"] for row in rows.values()] == [[0], [1], [0], [None]]
    assert rows["live"]["by_task"]["t1"]["rewards"] == [1.0, 1.0]
    versus = rows["1"]["versus"]
    told = {"model": "live", "difference": 0.5, "tasks": 4, "p": 0.5}
    assert versus == told | {"interval": versus["interval"]}
    assert rows["live"]["pass_at_k"]["2"]["value"] == 0.5
    assert (found["complete"], found["samples"], len(rollouts)) == (True, 2, 4 * 4 * 2)
    assert {r["mode"] for r in rollouts} == {"eval"}


async def test_rollouts_are_opened_for_a_model_by_the_control_api(running: Running, tmp_path: Path) -> None:
    async with evaluating(running, tmp_path) as system:
        answers = []
        for choice in ({"policy_version": 1}, {"model": "vendor/gpt-mini"}, {}):
            _, (opened,) = await system.call("POST", "/rollouts", {"task_id": "t", **choice})
            status, said = await system.chat(opened["rollout_id"])
            assert status == 200
            answers.append(said["choices"][0]["message"]["content"].split()[1])
        assert answers == ["policy-v1", "vendor/gpt-mini", "base"]
        for both, status in (({"policy_version": 1, "model": "base"}, 409), ({"policy_version": 9}, 404)):
            assert (await system.call("POST", "/rollouts", both))[0] == status
        assert await system.call("POST", "/rollouts", {"n": 0}) == (200, [])


def test_models_are_named_between_commas() -> None:
    assert [m.choice for m in parse_models("live, base,5,gpt-mini")] == [
        {}, {"policy_version": 0}, {"policy_version": 5}, {"model": "gpt-mini"},
    ]  # fmt: skip
    with pytest.raises(ConfigError):
        parse_models("0,base")


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


async def test_a_reward_that_only_compares_siblings_is_refused_at_once(running: Running, tmp_path: Path) -> None:
    rank = {"kind": "rank", "model": "hosted_vllm/m", "api_base": "http://127.0.0.1:9/v1"}
    async with evaluating(running, tmp_path, rewards={"use": [rank]}) as system:
        code, _, err = await evaluate(system, tmp_path)
        assert (code, (await system.call("GET", "/rollouts"))[1]["data"]) == (2, [])
        assert err.startswith("lightning-proxy: rank only compares siblings; `eval` needs an absolute reward, such as")
    posted = Config.model_validate({"judge": {"use": [rank | {"name": "order"}]}})
    assert posted.not_absolute(["order"]) and not posted.not_absolute(["order", "reward"])


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the one that passed
        (5, 2, 3, 9 / 10),  # of the 10 triples only that of the three others has none
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (4, 4, 1, 1.0),
    ],
)
def test_pass_at_k_is_the_chance_that_one_of_k_drawn_has_passed(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_is_shown_for_powers_of_two_and_all_samples() -> None:
    assert (ks(1), ks(4), ks(6)) == ([1], [1, 2, 4], [1, 2, 4, 6])
