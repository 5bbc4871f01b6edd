"""Agents with adapters of their own: who uses which, what moves it, and which weights answer."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.vllm import vllm_program
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample
from lightning_proxy.trainer.weights import Weights
from support.models import VOCABULARY
from support.sections import PolicyConfig, TrainerConfig

OWN = {"writer": ["writer", "rewriter"], "checker": ["checker"]}


# Which agent uses which adapter ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("{adapters: {a1: [x, y], b1: [y]}}", "policy.adapters: an agent has one adapter, but this is named twice: y"),
        ("{adapters: {default: [x]}}", "policy.adapters: 'default' is the adapter of agents that no list names"),
        ("{adapters: {a1: []}}", "policy.adapters.a1: "),
        ("{adapters: {a.b: [x]}}", "policy.adapters.a.b"),
        ("{adapters: {a1: [x]}, publish: merged}", "policy.adapters needs policy.publish: lora"),
    ],
)
def test_what_cannot_be_is_refused_with_its_keys(tmp_path: Path, policy: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(f"policy: {policy}")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "config.yaml")
    assert message in error.value.message


def test_vllm_has_room_for_every_adapter_of_as_many_versions(base: Path) -> None:
    policy = {"model": str(base), "publish": "lora", "adapters": OWN}
    argv = vllm_program(Config.model_validate({"policy": policy})).argv
    assert argv[argv.index("--max-loras") + 1] == "12"


# What a call is answered by ----------------------------------------------------------------------------------------


async def test_calls_of_one_rollout_go_to_the_adapters_of_their_agents(running: Any, tmp_path: Path) -> None:
    async def ask(rollout: str, agent: str | None) -> str:
        named = {} if agent is None else {"X_Agent_Name": agent}
        _, answer = await system.chat(rollout, **named)
        return str(answer["choices"][0]["message"]["content"]).split()[1]

    async with running(tmp_path, publish="lora", adapters=OWN) as system, system.store() as store:
        assert await ask("early", "writer") == "base"
        version = await system.earlier_version(store, tmp_path, ["writer", "checker"])
        await system.call("POST", "/policy/promote", {"version": version})
        asked = ("writer", "rewriter", "checker", "planner", None)
        found = [await ask("r", agent) for agent in asked]
        assert found == ["policy-v1.writer", "policy-v1.writer", "policy-v1.checker", "policy-v1", "policy-v1"]
        assert await ask("early", "writer") == "base", "a rollout keeps the version that it began with"
        _, rollout = await system.call("GET", "/rollouts/r")
        assert [call["policy_version"] for call in rollout["calls"]] == [1] * 5
        served = {"writer": "policy-v1.writer", "checker": "policy-v1.checker"}
        _, live = await system.call("GET", "/policy")
        _, versions = await system.call("GET", "/policy/versions")
        assert (live["served_model"], live["adapters"]) == ("policy-v1", served)
        assert [v["adapters"] for v in versions["data"]] == [{}, served]


async def test_a_version_without_an_agents_adapter_answers_it_with_the_shared_one(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path, publish="lora", adapters=OWN) as system, system.store() as store:
        version = await system.earlier_version(store, tmp_path)
        await system.call("POST", "/policy/promote", {"version": version})
        _, answer = await system.chat("r", X_Agent_Name="writer")
        assert answer["choices"][0]["message"]["content"].startswith("by policy-v1 ")


# What is trained ---------------------------------------------------------------------------------------------------


def trainer(base: Path, where: Path, adapters: Any = OWN, **settings: Any) -> LightningTrainer:
    given = {"learning_rate": 1e-2, "lora_rank": 4, "report_to": [], "dtype": "float32", **settings}
    policy = PolicyConfig(model=str(base), directory=where, adapters=adapters, publish="lora")
    return LightningTrainer(TrainerConfig.model_validate(given), policy)


def rows(adapter: str, rollouts: int, seed: int, calls: int = 1) -> tuple[Sample, ...]:
    """A row of each call of these rollouts; all rows of all adapters begin with the same prompt."""
    rng, found = random.Random(seed), []
    for rollout in range(rollouts):
        for _ in range(calls):
            answer = tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, 6)))
            n = len(answer)
            logprobs = (0.0,) * 3 + tuple(-math.log(VOCABULARY) + rng.gauss(0, 0.5) for _ in answer)
            advantages = (0.0,) * 3 + (rng.choice([-1.0, 1.0]),) * n
            found.append(
                Sample(
                    f"r{rollout}", "t", (0, 5, 6, *answer), (0,) * 3 + (1,) * n, logprobs, advantages,
                    (1.0,) * (3 + n), adapter=adapter,
                )
            )  # fmt: skip
    return tuple(found)


def batch(step: int, *parts: tuple[Sample, ...]) -> Batch:
    return Batch(step, tuple(s for part in parts for s in part), ())


def apart(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


def test_log_probabilities_are_those_of_the_adapter_that_is_asked_for(base: Path, tmp_path: Path) -> None:
    learner = trainer(base, tmp_path)
    asked = [(0, 5, 6, 7)]
    before = learner.logprobs(asked)
    learner.remember_served("writer")
    learner.step(batch(1, rows("writer", 4, 1)))
    assert learner.logprobs(asked) == before
    moved = learner.logprobs(asked, adapter="writer")
    assert moved != before
    assert learner.logprobs(asked, "writer", served=True) == before
    assert learner.logprobs(asked, adapter="writer") == moved


def test_all_adapters_and_their_optimizer_states_are_resumed_exactly(base: Path, tmp_path: Path) -> None:
    given = [batch(step, rows("default", 4, step), rows("writer", 4, 10 + step)) for step in (1, 2, 3)]
    first = trainer(base, tmp_path / "a")
    for one in given[:2]:
        first.step(one)
    first.save(tmp_path / "2")
    in_another_order = {name: OWN[name] for name in reversed(OWN)}
    again = trainer(base, tmp_path / "b", in_another_order, seed=7)
    assert again.load(tmp_path / "2") == 2
    assert first.step(given[2])["loss"] == again.step(given[2])["loss"]
    for name in first.weight_sets.names:
        assert apart(first.adapter(name), again.adapter(name)) == 0.0


@pytest.mark.parametrize("adapters", [{}, {"writer": ["writer"]}, {"editor": ["writer"], "checker": ["checker"]}])
@pytest.mark.parametrize("configuration", [True, False])
def test_a_checkpoint_of_other_adapters_is_refused(
    base: Path, tmp_path: Path, adapters: dict[str, list[str]], configuration: bool
) -> None:
    trainer(base, tmp_path / "a").save(tmp_path / "1")
    if not configuration:
        (tmp_path / "1" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"policy\.adapters") as error:
        trainer(base, tmp_path / "b", adapters).load(tmp_path / "1")
    said = '["checker", "writer"] → ' if configuration else "missing"
    assert said in error.value.message


def test_an_agent_may_change_its_adapter_and_that_is_said(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(base, tmp_path / "a").save(tmp_path / "1")
    trainer(base, tmp_path / "b", {"writer": ["writer"], "checker": ["checker", "rewriter"]}).load(tmp_path / "1")
    assert 'policy.adapters {"writer": ["writer", "rewriter"]' in caplog.text


@pytest.mark.parametrize("name", ["mlp", "weight", "lora"])
def test_an_adapter_named_as_a_part_of_the_model_is_refused(base: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy.adapters: '{name}' is also the name of a part of the model"):
        trainer(base, tmp_path, {name: ["writer"]})
