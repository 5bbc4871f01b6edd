"""The same agents in front of a real vLLM, whose answers are dictated: every token recorded, every rollout one row."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
import yaml
from traffic.server import config_of

from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.core.config.root import Config
from support.agent_runs import Json, dictating, plan, stored, told
from support.clients import command_for
from support.in_process import proxy_of
from support.models import TEMPLATE

HERE = Path(__file__).parent
PROGRAMS = [
    "js/with_openai.mjs", "with_langchain.py", "with_openai_agents_chat.py", "with_pydantic_ai.py",
    "with_openai_agents.py", "with_openai_responses.py", "with_agent_framework.py",
]  # fmt: skip

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The root URL of a real vLLM that knows tools."""
    directory = tmp_path_factory.mktemp("vllm")
    (directory / "template.jinja").write_text(TEMPLATE.strip())
    port = free_port()
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    settings = {
        "upstreams": [{"name": "policy", "base_url": f"http://127.0.0.1:{port}/v1"}],
        "policy": {"model": str(prepare_model(cache_directory())), "publish": "merged"},
        "vllm": {
            "port": port, "max_model_len": 1024, "kv_cache_gib": 1,
            "extra_args": [*tools, "--chat-template", str(directory / "template.jinja")],
        },
    }  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "lightning_proxy.cli", "--config", str(directory / "config.yaml"), "vllm"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, start_new_session=True)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", process, directory / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_an_agent_of_this_framework_can_be_trained_on(program: str, vllm: str, tmp_path: Path) -> None:
    command = command_for(HERE / program)
    async with (
        dictating(vllm) as (dictated, upstream),
        proxy_of(exact(config_of(upstream, tmp_path))) as proxy,
        aiohttp.ClientSession(proxy) as session,
    ):
        runs = await plan(proxy, session)
        for n, run in enumerate(runs[:2]):
            await run(command, tmp_path / f"home-{n}")
        rollouts = await stored(session)
    for run in runs[:2]:
        calls = rollouts[str(run.rollout)]["calls"]
        assert len(calls) == len(dictated.asked[run.shown]) == 4
        assert [call["untrainable_reason"] for call in calls] == [None] * 4
        assert all(later["prompt_token_ids"][: len(seen)] == seen for seen, later in seen_and_later(calls))
        assert told(rollouts[str(run.rollout)]) == run.products


def exact(config: Config) -> Config:
    """The same, with later turns sent as the very tokens of the earlier ones."""
    return config.model_copy(update={"policy": config.policy.model_copy(update={"token_continuity": "exact"})})


def seen_and_later(calls: list[Json]) -> Iterator[tuple[list[int], Json]]:
    """The tokens of each call, and the call that goes on with them."""
    for call, later in pairwise(calls):
        yield [*call["prompt_token_ids"], *call["response_token_ids"]], later


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(1)
    pytest.fail(f"{url} is not there: {log.read_text()[-3000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
