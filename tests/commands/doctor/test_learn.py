"""`doctor --learn` on a system that learns, and on systems that are broken on purpose."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from aiohttp import web

from contract.system import listening
from lightning_proxy.commands.doctor.doctor import Broken, Check, Report
from lightning_proxy.commands.doctor.learn import OWN_TASKS, learn
from lightning_proxy.commands.doctor.steps import LARGEST_P, likelier
from lightning_proxy.commands.put_back import journal_path
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.records import RolloutName
from lightning_proxy.serving.swap import labels_of
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.lock import only_trainer
from support.models import VOCABULARY, save_small_model
from support.training import HonestServer

Json = dict[str, Any]
USER, ASSISTANT = 4, 5


class ChattingServer(HonestServer):
    """Words are tokens. Each attribute is a fault, set by a test."""

    greedy = False  # always the same answer
    drops_tokens = False  # earlier answers are not as they were
    own_temperature = 1.0  # of which it says nothing
    plain = False  # without operator routes
    forgets_adapters = False  # takes adapters, and does not have them
    deaf = False  # takes new weights, and answers with the old ones

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.loads: list[str] = []

    def load(self, name: str, path: str) -> None:
        self.loads.append(f"{name} {path}")
        if self.forgets_adapters and name != "base":
            return
        self.models[name] = self.models["base"] if self.deaf else self.open(path)

    async def handle(self, request: web.Request) -> web.Response:
        path, body = request.path, json.loads(await request.text() or "{}")
        if self.plain and (not path.startswith(("/v1/", "/tokenize")) or "lora" in path):
            return web.json_response({"detail": "Not Found"}, status=404)
        if (
            path == "/v1/load_lora_adapter"
            and not Path(body.get("lora_path", ""), "adapter_model.safetensors").exists()
        ):
            return web.json_response({"error": {"message": "it does not contain tensors"}}, status=500)
        if path == "/v1/unload_lora_adapter":
            self.models.pop(body["lora_name"], None)
            return web.json_response({})
        if path == "/v1/models":
            answer = json.loads((await super().handle(request)).body)  # type: ignore[arg-type]
            answer["data"][0]["max_model_len"] = 512
            return web.json_response(answer)
        if path == "/v1/chat/completions/render":
            return web.json_response({"token_ids": self.prompt(body["messages"]), "sampling_params": {}})
        if path == "/tokenize":
            tokens = self.prompt(body["messages"]) if "messages" in body else self.tokens(body["prompt"])
            return web.json_response({"tokens": tokens})
        if path == "/v1/chat/completions":
            return await self.chat(body)
        if path == "/v1/completions" and body["model"] in self.models and not isinstance(body["prompt"], str):
            return await self.complete(body)
        return await super().handle(request)

    def tokens(self, text: str) -> list[int]:
        """A word wN is token N, any other word some token."""
        return [int(w[1:]) if w[0] == "w" and w[1:].isdigit() else 6 + len(w) % 8 for w in text.split()]

    def prompt(self, messages: Sequence[Json]) -> list[int]:
        ids = [0]
        for i, message in enumerate(messages):
            said = self.tokens(message["content"])
            if self.drops_tokens and message["role"] == "assistant" and i + 1 < len(messages):
                said = said[1:]
            ids += [USER if message["role"] == "user" else ASSISTANT, *said]
        return [*ids, ASSISTANT]

    async def chat(self, body: Json) -> web.Response:
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": f"The model {body['model']} does not exist."}}, status=404)
        prompt = self.prompt(body["messages"])
        ids, tops = await asyncio.to_thread(self.continued, body["model"], prompt, body)
        entries = [{"token": f"w{i}", "logprob": top[i]} for i, top in zip(ids, tops, strict=True)]
        for entry, top in zip(entries, tops, strict=True):
            best = sorted(top, key=lambda i: -top[i])[: body.get("top_logprobs") or 0]
            entry["top_logprobs"] = [{"token": f"w{i}", "logprob": top[i]} for i in best]
        message = {"role": "assistant", "content": " ".join(f"w{i}" for i in ids)}
        choice = {"index": 0, "message": message, "finish_reason": "length", "token_ids": ids}
        choice["logprobs"] = {"content": entries}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return web.json_response(answer | {"usage": usage, "prompt_token_ids": prompt})

    async def complete(self, body: Json) -> web.Response:
        ids, tops = await asyncio.to_thread(self.continued, body["model"], body["prompt"], body)
        logprobs: Json = {"token_logprobs": [top[i] for i, top in zip(ids, tops, strict=True)]}
        logprobs["tokens"] = [f"token_id:{i}" for i in ids]
        logprobs["top_logprobs"] = [{f"token_id:{i}": value for i, value in top.items()} for top in tops]
        return web.json_response({"choices": [{"token_ids": ids, "logprobs": logprobs}]})

    @torch.no_grad()
    def continued(self, model: str, prompt: Sequence[int], body: Json) -> tuple[list[int], list[dict[int, float]]]:
        """The sampled tokens, and at each place the log-probability of every token."""
        ids, tops, heat = list(prompt), [], (body.get("temperature") or 1.0) * self.own_temperature
        seed = body.get("seed")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(body.get("max_tokens") or 4):
            logits = self.models[model](input_ids=torch.tensor([ids])).logits[0, -1].float()
            found = (logits / heat).log_softmax(-1)
            picked = found.argmax() if self.greedy else torch.multinomial(found.exp(), 1, generator=generator)
            ids.append(int(picked))
            tops.append(dict(enumerate(found.tolist()[:VOCABULARY])))
        return ids[len(prompt) :], tops


@asynccontextmanager
async def chatting(base: Path, **faults: Any) -> AsyncIterator[tuple[ChattingServer, str]]:
    """Yields the server and its base URL."""
    server = ChattingServer(base)
    for name, value in faults.items():
        assert hasattr(server, name)
        setattr(server, name, value)
    async with listening(server.app) as url:
        yield server, f"{url}/v1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("base"))


@dataclass
class Patient:
    """A configuration, and the server behind it."""

    directory: Path
    server: ChattingServer
    file: Path
    before: list[str] = field(default_factory=list)

    async def checks(self, *command: str) -> dict[str, Check]:
        """The checks by name, after a look that nothing is left."""
        report, models = Report(as_json=True, stops=True), [*self.server.models]
        try:
            await learn(load_config(self.file), OWN_TASKS, command, report)
        except Broken:
            assert report.checks[-1].outcome == "failed" or report.checks[-1].name == "as before"
        assert [*self.server.models] == models
        assert not [*self.directory.rglob("lightning-doctor*")]
        assert not journal_path(load_config(self.file)).exists()
        return {check.name: check for check in report.checks}


@asynccontextmanager
async def patient(
    base: Path, directory: Path, publish: str = "lora", trainer: dict[str, Any] | None = None, **faults: Any
) -> AsyncIterator[Patient]:
    async with chatting(base, **faults) as (server, url):
        settings = {
            "proxy": {"port": 9}, "store": {"url": f"sqlite:///{directory}/store.db"},
            "upstreams": [{"name": "policy", "base_url": url}],
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
        ({"deaf": True}, "new weights", "failed", "lightning-proxy vllm"),
        ({"greedy": True}, "advantages", "failed", "temperature 1"),
        ({"drops_tokens": True}, "template", "warning", "--chat-template"),
        ({"own_temperature": 0.5}, "ratios", "failed", "--logprobs-mode processed_logprobs"),
        ({"plain": True}, "publishing", "failed", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else None,
)
async def test_what_is_broken_is_named_with_what_to_do(
    base: Path, tmp_path: Path, faults: dict[str, Any], check: str, outcome: str, advice: str
) -> None:
    async with patient(base, tmp_path, **faults) as one:
        found = (await one.checks())[check]
        assert (found.outcome, advice in (found.fix or "")) == (outcome, True), found


async def test_a_trainer_that_is_not_installed_is_named(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    async with patient(base, tmp_path) as one:
        found = (await one.checks())["trainer"]
        assert (found.outcome, "lightning-proxy[train]" in found.found) == ("failed", True)


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
        assert (one.server.loads[-1], one.server.label) == (f"base {base}", mine)


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
        assert [*one.server.models] == ["base"]
        assert not [*tmp_path.rglob("*doctor*")]
        if publish == "merged":
            assert (one.server.loads[-1], one.server.label) == (f"base {base}", "default")


def test_it_can_be_read_by_programs(base: Path, tmp_path: Path) -> None:
    from support.command_line import lightning

    file = tmp_path / "config.yaml"
    file.write_text("upstreams: [{name: gpt, kind: openai, base_url: 'http://127.0.0.1:9/v1'}]\nproxy: {port: 9}\n")
    done = lightning("--config", file, "doctor", "--learn", "--json")
    assert done.returncode == 1
    assert [check["name"] for check in json.loads(done.stdout)] == ["policy"]
    assert lightning("--config", file, "doctor", "--learn", "--tasks", "json").returncode == 2
