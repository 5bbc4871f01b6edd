"""Conversations with a real vLLM, through a proxy that sends turns as exact tokens and through one that sends text.

The model may say one sentence only, but in which tokens is sampled: seldom those that its text is tokenised as again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import yaml
from openai.lib.streaming.chat import ChatCompletionStreamState

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.policy.operator import key_file
from lightning_proxy.proxy.power.server import power_server
from lightning_proxy.proxy.store.database import opened
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import ModelCall
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.types import Sampling
from support.adapters import save_adapter
from support.paths import EXAMPLES
from support.whole_system import CLI, System, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("lora vllm"), pytest.mark.timeout(900)]

Json = dict[str, Any]
ADDITION = EXAMPLES / "addition" / "agent.py"
SENTENCE = "The astonishingly quick fox jumps over 1234 lazy dogs, doesn't it?"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Reykjavik"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass
class Served:
    """One vLLM behind both proxies, by `policy.token_continuity`."""

    config: Path
    url: dict[str, str]
    store: dict[str, Path]

    def client(self, way: str, rollout: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url[way]}/rollouts/{rollout}/v1", api_key="unused")

    def calls(self, way: str, rollout: str) -> list[ModelCall]:
        async def read() -> list[ModelCall]:
            async with opened(StoreConfig(url=f"sqlite:///{self.store[way]}")) as database:
                return await Store(database).calls.of(rollout)

        return asyncio.run(read())

    def rows(self, way: str, rollout: str) -> int:
        calls = self.calls(way, rollout)
        assert all(call.trainable for call in calls), [call.untrainable_reason for call in calls]
        plain = {"sampled": lambda _: Sampling()}  # their grammar is of no account here
        return len(rollout_samples(calls, [1.0] * len(calls), task_id=None, max_tokens=10_000, **plain).samples)

    def outcomes(self, way: str) -> dict[str, int]:
        text = urllib.request.urlopen(f"{self.url[way]}/metrics").read().decode()
        lines = (line for line in text.splitlines() if line.startswith("lightning_token_continuity_total{"))
        return {line.split('"')[1]: int(float(line.split()[1])) for line in lines}

    def serve_adapter(self, way: str, directory: Path) -> None:
        """Make an adapter live, as the policy version that the trainer would have published it as."""

        async def record() -> int:
            async with opened(StoreConfig(url=f"sqlite:///{self.store[way]}")) as database:
                store = Store(database)
                version = await store.versions.new("lora", 1, {})
                await store.versions.saved(version, str(directory), f"continuity-v{version}")
                await store.versions.set_live(version)
                await store.versions.set_live(0)
                return version

        self.promote(way, asyncio.run(record()))

    def promote(self, way: str, version: int) -> None:
        body = json.dumps({"version": version}).encode()
        headers = {"content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{self.url[way]}/policy/promote", body, headers)).close()


@pytest.fixture(scope="module")
def served(lora: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two proxies of their own in front of the shared vLLM."""
    directory = tmp_path_factory.mktemp("continuity")
    found = Served(lora.config, {}, {})
    parts: list[subprocess.Popen[bytes]] = []
    (directory / "policy").mkdir()
    shutil.copy(key_file(lora.directory / "policy"), key_file(directory / "policy"))
    try:
        for way in ("exact", "text"):
            port, found.store[way] = free_port(), directory / f"{way}.db"
            found.url[way] = f"http://127.0.0.1:{port}"
            environment = {
                "LIGHTNING_PROXY__PORT": str(port),
                "LIGHTNING_STORE__URL": f"sqlite:///{found.store[way]}",
                "LIGHTNING_POLICY__TOKEN_CONTINUITY": way,
                "LIGHTNING_POLICY__DIRECTORY": str(directory / "policy"),
            }
            with (directory / "log").open("ab") as log:
                command = [*CLI, "--config", str(lora.config), "serve"]
                parts.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment))
        for url in found.url.values():
            wait_until_ready(f"{url}/readyz", directory / "log")
        yield found
    finally:
        for started in parts:
            started.send_signal(signal.SIGINT)
        for started in parts:
            started.wait(60)


def say(client: openai.OpenAI, messages: list[Any], text: str, *, stream: bool, **more: Any) -> Any:
    """The answer's choice; a streamed one as the client assembles it. `text`: what the model is to say."""
    asked: Json = {"model": "policy", "messages": messages, "temperature": 1.0, "max_tokens": 200} | more
    asked["extra_body"] = {"structured_outputs": {"choice": [text]}}
    if not stream:
        return client.chat.completions.create(**asked).choices[0]
    state = ChatCompletionStreamState(input_tools=more.get("tools", openai.NOT_GIVEN))
    for chunk in client.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0]


def converse(client: openai.OpenAI, *, stream: bool) -> list[str | None]:
    """Four turns, one of them cut short and one stopped by a string; what the agent was told."""
    messages: list[Any] = [{"role": "system", "content": "You are brief."}]
    told = []
    for turn, more in enumerate(({}, {"max_tokens": 6}, {"stop": ["lazy"], "logprobs": True}, {"top_p": 0.9})):
        messages.append({"role": "user", "content": f"Say it again, {turn} times."})
        choice = say(client, messages, SENTENCE, stream=stream, **more)
        assert choice.finish_reason == ("length" if turn == 1 else "stop")
        assert (choice.logprobs is not None) == ("logprobs" in more)
        messages.append(choice.message.model_dump(exclude_none=True))
        told.append(choice.message.content)
    return told


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_one_row_only_as_exact_tokens(served: Served, stream: bool) -> None:
    name = f"talk-{stream}"
    told = {way: converse(served.client(way, name), stream=stream) for way in served.url}
    for texts in told.values():
        assert [texts[0], texts[2], texts[3]] == [SENTENCE, SENTENCE[: SENTENCE.index("lazy")], SENTENCE]
        assert SENTENCE.startswith(texts[1] or "-")
    assert served.rows("exact", name) == 1
    assert served.rows("text", name) > 1
    for call in served.calls("exact", name):
        assert call.usage and call.usage["prompt_tokens"] == len(call.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_their_results_stay_in_the_row(served: Served, stream: bool) -> None:
    name = f"tools-{stream}"
    for way in served.url:
        client, messages = served.client(way, name), [{"role": "user", "content": "How is it in Reykjavik?"}]
        for _ in range(2):
            choice = say(client, messages, CALL, stream=stream, tools=[WEATHER])
            (call,) = choice.message.tool_calls
            assert (call.function.name, choice.finish_reason) == ("get_weather", "tool_calls")
            assert call.function.arguments.replace(" ", "") == '{"city":"Reykjavik"}'
            messages.append(choice.message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
        assert say(client, messages, SENTENCE, stream=stream, tools=[WEATHER]).message.content == SENTENCE
    assert served.rows("exact", name) == 1
    assert served.rows("text", name) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_over_messages_is_one_row_only_as_exact_tokens(served: Served, stream: bool) -> None:
    shape = {"format": {"type": "json_schema", "schema": {"enum": [SENTENCE]}}}
    for way in served.url:
        client = anthropic.Anthropic(base_url=f"{served.url[way]}/rollouts/messages-{stream}", api_key="unused")
        messages: list[Any] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"Say it again, {turn} times."})
            asked: Json = {"model": "policy", "max_tokens": 200, "messages": messages, "system": "You are brief."}
            asked["extra_body"] = {"output_config": shape}
            if stream:
                with client.messages.stream(**asked) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**asked)
            assert (json.loads(message.content[0].text), message.stop_reason) == (SENTENCE, "end_turn")
            messages.append({"role": "assistant", "content": message.content})
    assert served.rows("exact", f"messages-{stream}") == 1
    assert served.rows("text", f"messages-{stream}") > 1


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_over_responses_is_one_row_only_as_exact_tokens(
    served: Served, stream: bool, by_id: bool
) -> None:
    name = f"responses-{stream}-{by_id}"
    for way in served.url:
        client, items, previous = served.client(way, name), [], None
        for turn in range(3):
            said: list[Any] = [{"role": "user", "content": f"Say it again, {turn} times."}]
            items += said
            asked: Json = {"model": "policy", "max_output_tokens": 200, "instructions": "You are brief."}
            asked |= {"input": said, "previous_response_id": previous} if by_id and previous else {"input": items}
            asked["extra_body"] = {"structured_outputs": {"choice": [SENTENCE]}}
            if stream:
                *_, last = client.responses.create(**asked, stream=True)
                response = last.response
            else:
                response = client.responses.create(**asked)
            assert (response.output_text, response.status) == (SENTENCE, "completed")
            items += [item.model_dump(exclude_none=True) for item in response.output]
            previous = response.id
    assert served.rows("exact", name) == 1
    assert served.rows("text", name) > 1


def test_a_response_that_nobody_gave_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="resp_unknown"):
        served.client("exact", "nobody").responses.create(
            model="policy", input="Hello.", previous_response_id="resp_unknown"
        )


def test_a_conversation_with_an_adapter_is_one_row_too(served: Served, speller: Path, tmp_path: Path) -> None:
    served.serve_adapter("exact", save_adapter(speller, tmp_path / "v1"))
    before = served.outcomes("exact")
    try:
        converse(served.client("exact", "adapted"), stream=True)
    finally:
        served.promote("exact", 0)
    assert served.rows("exact", "adapted") == 1
    assert {call.policy_version for call in served.calls("exact", "adapted")} == {1}
    after = served.outcomes("exact")
    assert {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k)} == {"first": 1, "exact": 3}


def test_the_end_of_a_turn_is_there_once(served: Served) -> None:
    client, messages = served.client("exact", "ends"), []
    for more in ({}, {"max_tokens": 3}, {}):
        messages.append({"role": "user", "content": "Again."})
        messages.append(say(client, messages, SENTENCE, stream=False, **more).message.model_dump(exclude_none=True))
    last = served.calls("exact", "ends")[-1]
    start, end = last.prompt_token_ids[0], last.response_token_ids[-1]
    marks = [token for token in last.prompt_token_ids if token in (start, end)]
    assert marks == [start, end] * 5 + [start]


def test_answers_have_the_shape_that_they_have_as_text(served: Served) -> None:
    answers = {}
    for way in served.url:
        client, messages = served.client(way, "shape"), [{"role": "user", "content": "Hello."}]
        messages.append(say(client, messages, SENTENCE, stream=False).message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "Again."})
        asked: Json = {"model": "policy", "messages": messages, "temperature": 0, "max_tokens": 5, "logprobs": True}
        whole = client.chat.completions.create(**asked)
        streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [keys(chunk.model_dump()) for chunk in streamed]  # a chunk has more than one token on a busy machine
        answers[way] = [keys(whole.model_dump()), *(shape for shape, _ in groupby(chunks))]
    assert answers["exact"] == answers["text"]


def test_an_edited_history_goes_as_text_and_errors_are_vllms_own(served: Served) -> None:
    before = served.outcomes("exact")
    client, messages = served.client("exact", "edits"), [{"role": "user", "content": "Hello."}]
    say(client, messages, SENTENCE, stream=False)
    messages += [{"role": "assistant", "content": "Something else."}, {"role": "user", "content": "Again."}]
    say(client, messages, SENTENCE, stream=False)
    after = served.outcomes("exact")
    assert {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k)} == {"first": 1, "edited": 1}
    messages = [{"role": "user", "content": "Hello."}]
    messages.append(say(client, messages, SENTENCE, stream=False).message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "no " * 2000})
    errors = []
    for way in served.url:
        with pytest.raises(openai.BadRequestError) as caught:
            served.client(way, "edits").chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        errors.append(caught.value.body)
    assert errors[0] == errors[1]
    assert "maximum context length" in str(errors[0])


def keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    return [keys(item) for item in value[:1]] if isinstance(value, list) else type(value).__name__


def wait_until_ready(url: str, log: Path) -> None:
    for _ in range(480):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"not ready: {log.read_text()[-3000:]}")


@pytest.mark.long
async def test_power_sampling_finds_answers_that_the_model_holds_for_likelier(served: Served) -> None:
    """By vLLM's own routes between messages and tokens: text, tokens and log-probabilities are of one answer."""
    questions = ["What is the capital of France?", "Name a colour.", "Count to five.", "Say hello."]

    def ask(model: str, **more: Any) -> None:
        def one(question: str) -> Any:
            messages: list[Any] = [{"role": "user", "content": question}]
            client = served.client("text", f"likely-{model}".replace(":", "-"))
            return client.chat.completions.create(model=model, messages=messages, max_tokens=12, logprobs=True, **more)

        with ThreadPoolExecutor(len(questions)) as pool:
            for answer in pool.map(one, questions):
                for choice in answer.choices:
                    tokens = [entry.token for entry in choice.logprobs.content]
                    assert (choice.message.content or "") == "".join(tokens).removesuffix("<|im_end|>")

    def likelihoods(model: str) -> list[float]:
        calls = served.calls("text", f"likely-{model}".replace(":", "-"))
        return [sum(choice.logprobs) for call in calls for choice in call.choices]

    config = yaml.safe_load(served.config.read_text())
    by_name = {upstream["name"]: UpstreamConfig(**upstream) for upstream in config["upstreams"]}
    await asyncio.to_thread(ask, "policy", n=8, temperature=1.0)
    async with power_server(by_name["power"], by_name["policy"], Path(config["policy"]["directory"])):
        await asyncio.to_thread(ask, "power:4", temperature=0.3)
    before, after = [await asyncio.to_thread(likelihoods, model) for model in ("policy", "power:4")]
    assert (len(before), len(after)) == (32, 4)
    assert sum(after) / len(after) > sum(before) / len(before) + 2


def test_an_agent_is_evaluated_with_the_base_model_and_with_power_sampling(served: Served, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps({"a": a, "b": 2}) for a in range(3)))
    command = [sys.executable, "-m", "lightning_proxy.cli", "--config", str(served.config), "eval"]
    command += ["--tasks", str(tasks), "--models", "base,power:4", "--samples", "2", "--json", "--concurrency", "6"]
    command += ["--preload", "openai,openai.resources"]
    env = os.environ | {"LIGHTNING_PROXY__PORT": served.url["text"].rpartition(":")[2]}
    done = subprocess.run([*command, "--", sys.executable, str(ADDITION)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    base, power = json.loads(done.stdout)["rows"]
    for row in (base, power):
        assert [reason for task in row["by_task"].values() for reason in task["failures"]] == []
        assert (row["rollouts"], row["failed"], row["without_reward"], row["complete"]) == (6, 0, 0, True)
        assert row["tokens"] > 0
    assert (base["policy_versions"], power["policy_versions"]) == ([0], [None])
    assert power["versus"]["tasks"] == 3
