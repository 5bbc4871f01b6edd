"""`doctor` on a system with a link broken; `doctor --learn` on one that learns, and on others broken on purpose."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from aiohttp import web

from contract.model import Faulty, ModelVllm
from contract.system import listening
from lightning_proxy.commands.doctor.doctor import Broken, Check, Report
from lightning_proxy.commands.doctor.learn import OWN_TASKS, learn
from lightning_proxy.commands.doctor.steps import LARGEST_P, likelier
from lightning_proxy.commands.put_back import journal_path
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.serving.swap import labels_of
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.lock import only_trainer
from support.command_line import lightning


async def checks(system: Any) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in (await system.lightning("doctor", "--json")).json}


async def test_it_says_whether_a_trainer_runs_and_what_a_step_needs(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for task in range(system.config.trainer.tasks_per_step):
            names = [f"r{task}-{i}" for i in range(system.config.trainer.group_size)]
            await store.rollouts.open([(RolloutName(name, f"t{task}"), f"hash of {name}") for name in names], {})
            for name in set(names) - {"r0-0"}:
                await store.rewards.post([Reward(name, 0.5)])
                await system.chat(name)
        found = await checks(system)
        assert found["trainer"]["outcome"] == "ok"
        assert found["next step"]["found"].endswith("; 1 more has begun, 1 rollout short")
        await store.rewards.post([Reward("r0-0", 0.5)])
        found = await checks(system)
        assert found["trainer"]["outcome"] == "warning" and found["next step"]["found"].endswith("it can be made")
        with only_trainer(tmp_path / "policy", system.config.store.path):
            assert (await checks(system))["trainer"]["found"] == "one runs on this store"


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_full_disk_is_a_failed_check(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/s.db'}}\n")
    if is_there:
        async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/s.db")):
            pass
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))  # as if there was no room for more
    try:
        found = (await asyncio.to_thread(lightning, "--config", path, "doctor", "--json")).json
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (store,) = [check for check in found if check["name"] == "store"]
    assert (store["outcome"], "full" in store["found"]) == ("failed", True), store


# doctor --learn


class LearningVllm(ModelVllm):
    """One that can be compared with itself; `loads`: the weights that it was given. Each attribute is a fault."""

    own_temperature = 1.0  # of which it says nothing
    forgets_adapters = False  # takes adapters, and does not have them

    def __init__(self, root: Path) -> None:
        self.loads: list[str] = []
        super().__init__(root)
        self.loads.clear()

    def _open(self, path: str) -> Any:
        self.loads.append(path)
        return super()._open(path)

    async def _load(self, request: web.Request) -> web.Response:
        return web.Response(text="ok") if self.forgets_adapters else await super()._load(request)

    def _sample(self, name: str, prompt: list[int], tokens: int, heat: float = 1.0) -> tuple[list[int], list[float]]:
        return super()._sample(name, prompt, tokens, heat * self.own_temperature)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "seed" not in body or body["model"] not in self._loaded:
            return await super()._complete(request)
        with torch.no_grad():  # what is likely at each place of the prompt, as if that was its answer
            found = self._loaded[body["model"]](input_ids=torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
        names, top = [f"token_id:{i}" for i in body["prompt"]], [dict(enumerate(row.tolist())) for row in found]
        likely = [{f"token_id:{i}": value for i, value in row.items()} for row in top]
        return web.json_response({"choices": [{"logprobs": {"tokens": names, "top_logprobs": likely}}]})


@dataclass
class Patient:
    """A configuration, and the server behind it."""

    directory: Path
    server: LearningVllm
    file: Path

    async def checks(self, *command: str) -> dict[str, Check]:
        """The checks by name, after a look that nothing is left."""
        report, adapters = Report(as_json=True, stops=True), {**self.server.adapters}
        try:
            await learn(load_config(self.file), OWN_TASKS, command, report)
        except Broken:
            assert report.checks[-1].outcome == "failed" or report.checks[-1].name == "as before"
        assert self.server.adapters == adapters
        assert not [*self.directory.rglob("lightning-doctor*")]
        assert not journal_path(load_config(self.file)).exists()
        return {check.name: check for check in report.checks}


@asynccontextmanager
async def patient(
    base: Path, directory: Path, publish: str = "lora", trainer: dict[str, Any] | None = None, **faults: Any
) -> AsyncIterator[Patient]:
    server = LearningVllm(base)
    for name, value in faults.items():
        assert hasattr(server, name)
        setattr(server, name, value)
    async with listening(server.app) as url:
        settings = {
            "proxy": {"port": 9}, "store": {"url": f"sqlite:///{directory}/store.db"},
            "upstreams": [{"name": "policy", "base_url": f"{url}/v1"}],
            "policy": {"model": str(base), "publish": publish, "directory": f"{directory}/policy"},
            "trainer": {"report_to": [], "dtype": "float32", "learning_rate": 0.01, **(trainer or {})},
        }  # fmt: skip
        file = directory / "config.yaml"
        file.write_text(yaml.safe_dump(settings))
        yield Patient(directory, server, file)


def test_only_what_follows_the_rewards_is_likelier() -> None:
    chance = random.Random(0)
    rewards = [[float(chance.random() < 0.5) for _ in range(8)] for _ in range(4)]
    noise = [[chance.gauss(0, 1) for _ in range(8)] for _ in range(4)]
    learnt = [[n + 3 * r for n, r in zip(ns, rs, strict=True)] for ns, rs in zip(noise, rewards, strict=True)]
    nats, p = likelier(list(zip(rewards, learnt, strict=True)))
    assert nats > 0 and p <= LARGEST_P
    assert likelier(list(zip(rewards, noise, strict=True)))[1] > LARGEST_P
    opposite = [[-change for change in changes] for changes in learnt]
    assert likelier(list(zip(rewards, opposite, strict=True)))[1] > 0.9
    assert likelier([([1.0, 1.0], [0.5, 0.1])]) == (0.0, 1.0)


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_a_system_that_learns_passes_and_is_left_as_it_was(base: Path, tmp_path: Path, publish: str) -> None:
    own = {"learning_rate": 1e-6 if publish == "lora" else 0.01}  # one that is too small is raised, and that is said
    async with patient(base, tmp_path, publish, own) as one:
        found = await one.checks()
        assert ("(yours is 1e-06)" in str(found["likelier"])) == (publish == "lora"), found["likelier"]
        assert {name: check for name, check in found.items() if check.outcome == "failed"} == {}
        assert {"agent", "calls", "rewards", "advantages", "ratios", "likelier", "new weights"} < found.keys()
        assert found["as before"].outcome == "ok"
        assert len(one.server.loads) > 0
        assert (one.server.label, one.server.paused) == ("default", False)
        assert not (tmp_path / "store.db").exists(), "nothing reaches the user's store"


@pytest.mark.parametrize(
    ("faults", "check", "outcome", "advice"),
    [
        ({"forgets_adapters": True}, "new weights", "failed", "--enable-lora"),
        ({"fault": Faulty.STALE}, "new weights", "failed", "lightning-proxy vllm"),
        ({"own_temperature": 1e-4}, "advantages", "failed", "temperature 1"),
        ({"stable_template": False}, "template", "warning", "--chat-template"),
        ({"own_temperature": 0.5}, "ratios", "failed", "--logprobs-mode processed_logprobs"),
        ({"refuses": {"/v1/load_lora_adapter": 404}}, "publishing", "failed", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    ],
)
async def test_what_is_broken_is_named_with_what_to_do(
    base: Path, tmp_path: Path, faults: dict[str, Any], check: str, outcome: str, advice: str
) -> None:
    async with patient(base, tmp_path, **faults) as one:
        found = (await one.checks())[check]
        assert (found.outcome, advice in (found.fix or "")) == (outcome, True), found


async def test_a_trainer_that_runs_is_left_alone(base: Path, tmp_path: Path) -> None:
    async with patient(base, tmp_path) as one:
        with only_trainer(tmp_path / "policy", tmp_path / "store.db"):
            settings = yaml.safe_load(one.file.read_text())
            del settings["policy"]["model"]  # what is to be stopped is told first
            one.file.write_text(yaml.safe_dump(settings))
            found = (await one.checks())["trainer"]
        assert (found.outcome, "another trainer works" in found.found) == ("failed", True)
        assert one.server.loads == []


@pytest.mark.long
async def test_merged_weights_are_not_replaced_while_rollouts_run(base: Path, tmp_path: Path) -> None:
    async with patient(base, tmp_path, "merged") as one:
        async with opened(load_config(one.file).store) as database:
            await Store(database).rollouts.open([(RolloutName("r1", "t"), "hash")], {})
        found = (await one.checks())["weights"]
        assert (found.outcome, "wait" in str(found.fix), one.server.loads) == ("failed", True, [])


AGENT = """
import json, os, urllib.request
body = {"model": os.environ["MODEL"], "max_tokens": 8, "temperature": 1.0,
        "messages": [{"role": "user", "content": json.loads(os.environ["LIGHTNING_TASK"])["prompt"]}]}
urllib.request.urlopen(urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)).read()
"""


@pytest.mark.long
async def test_the_users_own_agent_works(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    monkeypatch.setenv("MODEL", "policy")
    async with patient(base, tmp_path) as one:
        found = await one.checks("python", str(agent))
        assert found["agent"].found.startswith("32 rollouts of 4 tasks made 32 calls")
        assert found["as before"].outcome == found["new weights"].outcome == "ok"


async def test_the_version_that_was_live_is_served_again(base: Path, tmp_path: Path) -> None:
    async with patient(base, tmp_path, "merged") as one:
        async with opened(load_config(one.file).store) as database:
            versions = Store(database).versions
            assert await versions.new("merged", 1, {}) == 1
            await versions.saved(1, str(base), "base")
            await versions.set_live(1, 1, verified=True)
            mine = labels_of(await versions.live())[0]
        one.server.label = mine
        found = await one.checks()
        assert (found["new weights"].outcome, found["as before"].outcome) == ("ok", "ok")
        assert "lightning-doctor" in one.server.loads[-2]
        assert (one.server.loads[-1], one.server.label) == (str(base), mine)


async def test_weights_that_are_not_put_back_are_told(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr("lightning_proxy.commands.doctor.learn.put_back", nothing)
    async with patient(base, tmp_path, "merged") as one:
        found = (await one.checks())["as before"]
    assert (found.outcome, "the server's answers differ from before" in found.found) == ("failed", True)


@pytest.mark.parametrize("publish", ["lora", pytest.param("merged", marks=pytest.mark.long)])
async def test_a_doctor_that_is_killed_leaves_nothing_after_the_next_one(
    base: Path, tmp_path: Path, publish: str
) -> None:
    async with patient(base, tmp_path, publish) as one:
        command = [sys.executable, "-m", "lightning_proxy.cli", "--config", str(one.file), "doctor"]
        killed = await asyncio.create_subprocess_exec(*command, "--learn", stdout=DEVNULL)
        while not any("lightning-doctor" in load for load in one.server.loads):
            assert killed.returncode is None
            await asyncio.sleep(0.05)
        killed.kill()
        await killed.wait()
        assert journal_path(load_config(one.file)).exists()
        mended = await asyncio.create_subprocess_exec(*command, "--json", stdout=PIPE)
        told = json.loads((await mended.communicate())[0])
        assert [check["found"] for check in told if check["name"] == "learn"] == [
            "a doctor was killed while it tried whether this system learns: what it had changed is put back"
        ]
        assert one.server.adapters == {}
        assert not [*tmp_path.rglob("*doctor*")]
        if publish == "merged":
            assert (one.server.loads[-1], one.server.label) == (str(base), "default")
