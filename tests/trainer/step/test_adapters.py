"""Agents with adapters of their own: who uses which, what moves it, and which weights answer."""

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.vllm import vllm_program
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from support.ranks import batch, learner, shared_out

OWN = {"writer": ["writer", "rewriter"], "checker": ["checker"]}


def test_what_cannot_be_is_refused_with_its_keys(tmp_path: Path) -> None:
    for policy, message in (
        (
            "{adapters: {a1: [x, y], b1: [y]}}",
            "policy.adapters: each agent has one adapter, but these agents are named twice: y",
        ),
        ("{adapters: {default: [x]}}", "policy.adapters: 'default' is the adapter of agents that are in no list"),
        ("{adapters: {a1: []}}", "policy.adapters.a1: "),
        ("{adapters: {a.b: [x]}}", "policy.adapters.a.b"),
        ("{adapters: {a1: [x]}, publish: merged}", "policy.adapters needs policy.publish: lora"),
    ):
        (tmp_path / "config.yaml").write_text(f"policy: {policy}")
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(tmp_path / "config.yaml")


def test_vllm_has_room_for_every_adapter_of_as_many_versions(base: Path) -> None:
    policy = {"model": str(base), "publish": "lora", "adapters": OWN}
    argv = vllm_program(Config.model_validate({"policy": policy})).argv
    assert argv[argv.index("--max-loras") + 1] == "12"


async def test_calls_go_to_the_adapters_of_their_agents_or_else_the_shared_one(start: Any, tmp_path: Path) -> None:
    async def ask(rollout: str, agent: str | None, model: str = "policy") -> str:
        named = {} if agent is None else {"X_Agent_Name": agent}
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        answer = await system.post(f"/rollouts/{rollout}/v1/chat/completions", body, **named)
        return str(answer["choices"][0]["message"]["content"]).split()[1]

    async with start(publish="lora", adapters=OWN) as system, system.store() as store:
        version = await system.earlier_version(store, tmp_path)  # with no agent's adapter
        await system.post("/policy/promote", {"version": version})
        found = [await ask("early", "planner", "base"), await ask("early", "planner"), await ask("early", "writer")]
        assert found == ["base", "policy-v1", "policy-v1"], "who asks for the base model gets it"
        version = await system.earlier_version(store, tmp_path, ["writer", "checker"])
        await system.post("/policy/promote", {"version": version})
        found = [await ask("r", agent) for agent in ("writer", "rewriter", "checker", "planner", None)]
        assert found == ["policy-v2.writer", "policy-v2.writer", "policy-v2.checker", "policy-v2", "policy-v2"]
        assert await ask("early", "writer") == "policy-v1", "a rollout keeps the version that it began with"
        for name, versions in (("early", [0, 1, 1, 1]), ("r", [2] * 5)):
            assert [call["policy_version"] for call in (await system.get(f"/rollouts/{name}"))["calls"]] == versions
        served = {"writer": "policy-v2.writer", "checker": "policy-v2.checker"}
        live, listed = await system.get("/policy"), await system.get("/policy/versions")
        assert (live["served_model"], live["adapters"]) == ("policy-v2", served)
        assert [v["adapters"] for v in listed["data"]] == [{}, {}, served]


@pytest.mark.parametrize("adapters", [{}, {"editor": ["writer"], "checker": ["checker"]}])
def test_a_checkpoint_of_other_adapters_is_refused(base: Path, tmp_path: Path, adapters: dict[str, list[str]]) -> None:
    learner(base, tmp_path / "a", OWN).save(tmp_path / "1")
    other = learner(base, tmp_path / "b", adapters)
    with pytest.raises(ConfigError, match=r'policy\.adapters, .*\["checker", "writer"\] → '):
        other.load(tmp_path / "1")
    (tmp_path / "1" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"policy\.adapters.*missing|missing.*policy\.adapters"):
        other.load(tmp_path / "1")


def test_a_change_of_adapter_is_said(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner(base, tmp_path / "a", OWN).save(tmp_path / "1")
    learner(base, tmp_path / "b", {"writer": ["writer"], "checker": ["checker", "rewriter"]}).load(tmp_path / "1")
    assert 'policy.adapters {"writer": ["writer", "rewriter"]' in caplog.text


@pytest.mark.parametrize("name", ["mlp", "weight", "lora"])
def test_an_adapter_named_as_a_part_of_the_model_is_refused(base: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy.adapters: '{name}' is also the name of a part of the model"):
        learner(base, tmp_path, {name: ["writer"]})


def test_what_was_served_is_scored_by_the_adapter_that_is_asked_for(directory: Path, tmp_path: Path) -> None:
    trained, asked = learner(directory / "model", tmp_path, OWN), [(0, 5, 6, 7)]
    before = trained.logprobs(asked)
    trained.remember_served("writer")
    trained.step(shared_out(batch(1), ("writer",)))
    moved = trained.logprobs(asked, "writer")
    assert trained.logprobs(asked) == before != moved
    assert trained.logprobs(asked, "writer", served=True) == before
    assert trained.logprobs(asked, "writer") == moved, "the newest weights are back"
