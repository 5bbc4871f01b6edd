"""Rollouts that a trainer can learn from: whole groups, rewarded by their share of even tokens."""

from __future__ import annotations

from typing import Any

from contract.system import Answer, Proxy

Json = dict[str, Any]
GROUP = 4
TRAINER: Json = {
    "group_size": GROUP, "tasks_per_step": 2, "learning_rate": 0.05, "report_to": [], "dtype": "float32", "threads": 1,
    "max_staleness": 1000,
}  # fmt: skip


def ask(proxy: Proxy, name: str, task: str, mode: str = "train", tokens: int = 6, **fields: Any) -> Answer:
    """Ask the policy in a rollout of a task."""
    body = {"model": "policy", "messages": [{"role": "user", "content": task}], "max_tokens": tokens, **fields}
    return proxy.post(f"/rollouts/{name}/tasks/{task}/v1/chat/completions", body, X_Rollout_Mode=mode)


def play(proxy: Proxy, prefix: str, tasks: int = 2, mode: str = "train", tokens: int = 6, **fields: Any) -> list[str]:
    """Whole groups of rollouts; returns their names."""
    names = []
    for task in range(tasks):
        for sibling in range(GROUP):
            names.append(name := f"{prefix}-{task}-{sibling}")
            assert ask(proxy, name, f"{prefix}-{task}", mode, tokens, **fields).status == 200
            (call,) = proxy.rollout(name)["calls"]
            even = sum(token % 2 == 0 for token in call["response_token_ids"]) / tokens
            assert proxy.post("/reward", {"rollout_id": name, "reward": even + sibling / 100}).status == 200
    return names


def versions(proxy: Proxy) -> dict[int, Json]:
    return {found["version"]: found for found in proxy.get("/policy/versions")["data"]}


def by_weights(proxy: Proxy) -> dict[int, set[str]]:
    """By version, which weights answered; calls during which a version went live are left out."""
    found: dict[int, set[str]] = {}
    for rollout in proxy.get("/rollouts?limit=1000")["data"]:
        for call in proxy.rollout(rollout["rollout_id"])["calls"]:
            assert call["status"] == "ok", call
            if call["policy_versions"] == [call["policy_version"]]:
                found.setdefault(call["policy_version"], set()).add(call["response"]["system_fingerprint"])
    return found
