"""`doctor` on a system with a link broken; `doctor --learn` on one that learns, and on others broken on purpose."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import ClientTimeout, web

from contract.model import Faulty, ModelVllm
from contract.system import Done, Forked, Json, Proxy, in_this_process, played, write_config
from lightning_proxy.commands.doctor.steps import LARGEST_P, likelier
from lightning_proxy.commands.put_back import LearnJournal, journal_path, put_back_left
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.records import RolloutName
from lightning_proxy.serving.swap import labels_of
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.lock import only_trainer

pytestmark = pytest.mark.sqlite  # locks and journals are beside the file


def checks(done: Done) -> dict[str, Json]:
    return {check["name"]: check for check in done.json}


def test_it_says_whether_a_trainer_runs_and_what_a_step_needs(tmp_path: Path) -> None:
    with in_this_process(tmp_path, trainer={"group_size": 2, "tasks_per_step": 2}) as proxy:
        opened = [proxy.post("/rollouts", {"task_id": task, "n": 2}).json for task in ("t1", "t2")]
        *names, last = [one["rollout_id"] for siblings in opened for one in siblings]
        for name in names:
            proxy.chat(name)
            proxy.reward(name, 0.5)
        found = checks(proxy.run("doctor", "--json"))
        assert found["trainer"]["outcome"] == "ok"
        assert found["next step"]["found"].endswith("; 1 more has begun, 1 rollout short")
        proxy.reward(last, 0.5)
        found = checks(proxy.run("doctor", "--json"))
        assert found["trainer"]["outcome"] == "warning" and found["next step"]["found"].endswith("step can be taken")
        with only_trainer(tmp_path / "policy", tmp_path / "store.db"):
            assert checks(proxy.run("doctor", "--json"))["trainer"]["found"] == "a trainer is running on this store"


def test_a_full_disk_is_a_failed_check(tmp_path: Path) -> None:
    write_config(tmp_path, "http://127.0.0.1:9/v1", 9)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))  # as if there was no room for more
    try:
        store = checks(Proxy("", tmp_path).run("doctor", "--json"))["store"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (store["outcome"], "full" in store["found"]) == ("failed", True), store


# doctor --learn


class LearningVllm(ModelVllm):
    """One that can be compared with itself; `loads`: the weights that it was given. Each attribute is a fault."""

    own_temperature = 1.0  # of which it says nothing
    forgets_adapters = False  # takes adapters, and does not have them

    def __init__(self, root: Path) -> None:
        self.loads: list[str] = []
        self.loading: Callable[[str], None] = lambda path: None
        super().__init__(root)
        self.loads.clear()

    def _open(self, path: str) -> Any:
        self.loads.append(path)
        self.loading(path)
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
        likely = [{f"token_id:{i}": value for i, value in enumerate(row)} for row in found.tolist()]
        logprobs = {"tokens": [f"token_id:{i}" for i in body["prompt"]], "top_logprobs": likely}
        return web.json_response({"choices": [{"logprobs": logprobs}]})


@contextmanager
def _patient(
    base: Path, directory: Path, publish: str = "lora", learning_rate: float = 0.01, **faults: Any
) -> Iterator[Proxy]:
    """The configuration of a system without a proxy, and the server behind it."""
    server = LearningVllm(base)
    for name, value in faults.items():
        assert hasattr(server, name)
        setattr(server, name, value)
    trainer = {"report_to": [], "dtype": "float32", "learning_rate": learning_rate}
    with played(server) as url:
        write_config(directory, f"{url}/v1", 9, policy={"model": str(base), "publish": publish}, trainer=trainer)
        yield Proxy("", directory, server)


@pytest.fixture
def patient(base: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[Proxy]]:
    return partial(_patient, base, tmp_path)


def learn(one: Proxy, *command: str) -> dict[str, Json]:
    """The checks by name, after a look that nothing is left."""
    adapters = {**one.vllm.adapters}
    found = checks(one.run("doctor", "--learn", "--json", *command))
    assert one.vllm.adapters == adapters and not [*one.directory.rglob("*doctor*")]
    return found


def failed(check: Json, told: str) -> bool:
    return check["outcome"] == "failed" and told in check["found"] + check["fix"]


def test_only_what_follows_the_rewards_is_likelier() -> None:
    chance = np.random.default_rng(0)
    rewards, noise = chance.integers(2, size=(4, 8)).astype(float), chance.normal(size=(4, 8))

    def of(changes: Any) -> tuple[float, float]:
        return likelier([*zip(rewards, changes, strict=True)])

    assert of(noise + 3 * rewards)[0] > 2 and of(noise + 3 * rewards)[1] <= LARGEST_P < of(noise)[1]
    assert of(noise - 3 * rewards)[1] > 0.9
    assert likelier([([1.0, 1.0], [0.5, 0.1])]) == (0.0, 1.0)


@pytest.mark.parametrize("publish", ["lora", "merged"])
def test_a_system_that_learns_passes_and_is_left_as_it_was(patient: Any, publish: str) -> None:
    rate = 1e-6 if publish == "lora" else 0.01  # one that is too small is raised, and that is said
    with patient(publish, rate) as one:
        found = learn(one)
        assert ("(yours is 1e-06)" in found["likelier"]["found"]) == (publish == "lora"), found["likelier"]
        assert {name for name, check in found.items() if check["outcome"] == "failed"} == set(), found
        assert {"agent", "calls", "rewards", "advantages", "ratios", "likelier", "new weights"} < found.keys()
        assert found["as before"]["outcome"] == "ok"
        assert len(one.vllm.loads) > 0
        assert (one.vllm.label, one.vllm.paused) == ("default", False)
        assert not (one.directory / "store.db").exists(), "nothing reaches the user's store"


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
def test_what_is_broken_is_named_with_what_to_do(
    patient: Any, faults: Json, check: str, outcome: str, advice: str
) -> None:
    with patient(**faults) as one:
        found = learn(one)[check]
        assert (found["outcome"], advice in found["fix"]) == (outcome, True), found


def test_a_trainer_that_runs_is_left_alone(patient: Any) -> None:
    with patient() as one, only_trainer(one.directory / "policy", one.directory / "store.db"):
        without_model = one.config.read_text().replace(f"model: {one.vllm.root}", "")
        one.config.write_text(without_model)  # what is to be stopped is told first
        assert failed(learn(one)["trainer"], "another trainer is using")
        assert one.vllm.loads == []


@pytest.mark.long
async def test_merged_weights_are_not_replaced_while_rollouts_run(patient: Any) -> None:
    with patient("merged") as one:
        async with opened(load_config(one.config).store) as database:
            await Store(database).rollouts.open([(RolloutName("r1", "t"), "hash")], {})
        assert failed((await asyncio.to_thread(learn, one))["weights"], "wait")
        assert one.vllm.loads == []


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
def test_the_users_own_agent_works(patient: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "policy")
    with patient() as one:
        (one.directory / "agent.py").write_text(AGENT)
        found = learn(one, "--", "python", "agent.py")
        assert found["agent"]["found"].startswith("32 rollouts of 4 tasks made 32 calls")
        assert found["as before"]["outcome"] == found["new weights"]["outcome"] == "ok"


async def test_the_version_that_was_live_is_served_again(patient: Any) -> None:
    with patient("merged") as one:
        async with opened(load_config(one.config).store) as database:
            versions = Store(database).versions
            assert await versions.new("merged", 1, {}) == 1
            await versions.saved(1, str(one.vllm.root), "base")
            await versions.set_live(1, 1, verified=True)
            one.vllm.label = mine = labels_of(await versions.live())[0]
        found = await asyncio.to_thread(learn, one)
        assert (found["new weights"]["outcome"], found["as before"]["outcome"]) == ("ok", "ok")
        assert "lightning-doctor" in one.vllm.loads[-2]
        assert (one.vllm.loads[-1], one.vllm.label) == (str(one.vllm.root), mine)


def test_weights_that_are_not_put_back_are_told(patient: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr("lightning_proxy.commands.doctor.learn.put_back", nothing)
    with patient("merged") as one:
        assert failed(learn(one)["as before"], "the server's answers differ from those before")


@pytest.mark.parametrize("publish", ["lora", pytest.param("merged", marks=pytest.mark.long)])
def test_a_doctor_that_is_killed_leaves_nothing_after_the_next_one(patient: Any, publish: str) -> None:
    with patient(publish) as one:
        killed, loads = Forked(one, "doctor", "--learn"), threading.Event()
        one.vllm.loading = lambda path: "lightning-doctor" in path and loads.set()
        assert loads.wait(120)
        killed.signal(signal.SIGKILL)
        assert killed.wait().returncode == -9
        assert [*one.directory.glob("*-doctor.json")]
        assert checks(one.run("doctor", "--json"))["learn"]["found"] == (
            "an earlier `doctor --learn` was killed; its changes are undone now"
        )
        assert one.vllm.adapters == {} and not [*one.directory.rglob("*doctor*")]
        if publish == "merged":
            assert (one.vllm.loads[-1], one.vllm.label) == (str(one.vllm.root), "default")


async def test_a_vllm_that_answers_too_late_is_not_taken_for_one_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.serving.vllm.ClientTimeout", lambda **_: ClientTimeout(total=0.2))
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        write_config(tmp_path, f"http://127.0.0.1:{deaf.getsockname()[1]}/v1", 9)
        config = load_config(tmp_path / "config.yaml")
        LearnJournal("lightning-doctor", False, ()).write(journal_path(config))
        await put_back_left(config, said.append)
        assert "not undone yet" in said[-1]
    await put_back_left(config, said.append)
    assert "vLLM is not running" in said[-1] and len(said) == 2
    await put_back_left(config, said.append)
    assert len(said) == 2
