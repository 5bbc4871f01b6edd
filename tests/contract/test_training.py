"""CONTRACT.md, sections 4 and 5: rollouts become steps and versions, and new weights are verified before they count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.model import Faulty, ModelVllm, save_model
from contract.system import Proxy, in_this_process

Json = dict[str, Any]
TRAINER: Json = {
    "group_size": 4, "tasks_per_step": 2, "learning_rate": 0.05, "report_to": [], "dtype": "float32", "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(params=["merged", "lora"])
def proxy(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Proxy]:
    policy = {"model": str(model), "publish": request.param}
    with in_this_process(tmp_path, ModelVllm(model), policy=policy, trainer=TRAINER) as one:
        yield one


def play(proxy: Proxy, prefix: str, tasks: int = 2, mode: str = "train") -> list[str]:
    """Rollouts of whole groups, rewarded by their share of even tokens."""
    names = []
    for task in range(tasks):
        for sibling in range(TRAINER["group_size"]):
            name = f"{prefix}-{task}-{sibling}"
            path = f"/rollouts/{name}/tasks/{prefix}-{task}/v1/chat/completions"
            body = {"model": "policy", "messages": [{"role": "user", "content": "abc"[task]}], "max_tokens": 6}
            assert proxy.post(path, body, X_Rollout_Mode=mode).status == 200
            (call,) = proxy.rollout(name)["calls"]
            even = sum(token % 2 == 0 for token in call["response_token_ids"]) / 6
            assert proxy.post("/reward", {"rollout_id": name, "reward": even + sibling / 100}).status == 200
            names.append(name)
    return names


def test_a_step_publishes_a_verified_version_that_answers_the_next_call(proxy: Proxy) -> None:
    names = play(proxy, "first")
    evaluated = play(proxy, "held", mode="eval")
    done = proxy.run("train", "--once")
    assert done.returncode == 0, done.stderr
    assert {proxy.rollout(name)["step"] for name in names} == {1}
    assert {proxy.rollout(name)["step"] for name in evaluated} == {None}, "eval is never trained on"
    (step,) = proxy.get("/policy/steps")["data"]
    assert (step["step"], step["metrics"]["rollouts_trained"]) == (1, 8)
    versions = {one["version"]: one for one in proxy.get("/policy/versions")["data"]}
    assert versions[1]["verified"] and proxy.get("/policy")["live_version"] == 1
    answer = proxy.chat("next")
    assert answer.headers["x-policy-version"] == "1"


@pytest.mark.parametrize("fault", Faulty, ids=[fault.name.lower() for fault in Faulty])
def test_weights_that_the_server_does_not_serve_are_not_live(proxy: Proxy, fault: Faulty) -> None:
    play(proxy, "first")
    assert isinstance(proxy.vllm, ModelVllm)
    proxy.vllm.fault = fault
    done = proxy.run("train", "--once")
    assert done.returncode != 0
    proxy.vllm.fault = None
    assert proxy.get("/policy")["live_version"] == 0
    assert proxy.chat("next").headers["x-policy-version"] == "0"
