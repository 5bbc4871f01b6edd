"""CONTRACT.md, sections 4 and 5: the whole loop on a real vLLM: `up`, an agent under `run`, rewards, new weights."""

from __future__ import annotations

import pytest

from contract.real import System
from contract.system import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize("publish", [
    pytest.param("merged", marks=pytest.mark.xdist_group("merged vllm")),
    pytest.param("lora", marks=[pytest.mark.xdist_group("lora vllm"), pytest.mark.long]),
])  # fmt: skip
def test_an_agent_gets_better_while_it_keeps_working(request: pytest.FixtureRequest, publish: str) -> None:
    system: System = request.getfixturevalue(publish)
    before = system.run_agents(repeat=1, mode="eval")["mean_reward"]
    for _ in range(12):
        summary = system.run_agents(repeat=2)
        assert summary["failed"] == 0
        if summary["mean_reward"] > before + 0.3:
            break
    after = system.run_agents(repeat=1, mode="eval")["mean_reward"]
    assert before < 0.35
    assert after > before + 0.25, (before, after)
    wait_until(lambda: not system.waiting(), 60, "every rollout was trained on or dropped")
    if publish == "merged":
        wait_until(lambda: is_best_of_several(system), 60, "versions were evaluated between steps")
    versions = system.get("/policy/versions")["data"]
    assert not [version for version in versions if version["status"] == "failed"]
    steps = [step["metrics"] for step in system.get("/policy/steps")["data"]]
    assert any(step["sampler_difference"] for step in steps), "agents were answered by the live version"
    assert all(step["sampler_difference"] < 0.01 and not step["skipped"] for step in steps), steps
    wait_until(lambda: system.get("/status")["verified"]["deviations"] is not None, 60, "the live version says how")
    rollouts = system.get("/rollouts?limit=1000&status=completed")["data"]
    calls = [call for one in rollouts for call in system.rollout(one["rollout_id"])["calls"]]
    assert all(call["status"] == "ok" and call["trainable"] for call in calls)
    assert len({v for call in calls for v in call["policy_versions"]}) > 1
    written = [file for part in ("logs", "policy") for file in (system.directory / part).rglob("*") if file.is_file()]
    assert written and not [file for file in written if file.stat().st_mode & 0o077], "only their owner reads them"
    system.promote(0)
    again = system.run_agents(repeat=1, mode="eval")["mean_reward"]
    assert again < before + 0.15, "the base model answers again"


def is_best_of_several(system: System) -> bool:
    """Whether several versions were evaluated between steps, and none of them is above the one named as the best.

    The agents' own held-out rollouts count for the best, too.
    """
    versions = system.get("/policy/versions")["data"]
    rewards = [v["evaluation"]["reward"] for v in versions if v["evaluation"] and v["evaluation"]["ended_at"]]
    best = system.get("/policy")["best"]
    return len(rewards) > 1 and best["judged"] == "evaluation" and best["reward"] >= max(rewards)
