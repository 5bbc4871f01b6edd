"""docs/tutorial.md with its files and commands as they stand there; the providers are played, the ports free ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from contract.system import free_port, listening
from frameworks.agent_runs import SHAPES, key_of
from support.paths import ROOT

NAMES = ("before", "imitated", "reinforced")  # of the files of evaluations
KEYS = {"/v1/chat/completions": "YOUR-OPENAI-KEY", "/v1/messages": "YOUR-ANTHROPIC-KEY"}
WORDY = 10  # every sum of this worth is answered in a sentence, which is worth less


def reply(request: dict[str, Any]) -> str:
    found = re.search(r"(\d+)\+(\d+)", str(request["messages"][-1]["content"]))
    assert found is not None
    total = int(found[1]) + int(found[2])
    return f"The answer is {total}." if total == WORDY else str(total)


async def answer(request: web.Request) -> web.Response:
    asked = await request.json()
    if key_of(request) != KEYS[request.path]:
        return web.json_response({"error": {"message": "wrong key"}}, status=401)
    return web.json_response(SHAPES[request.path](reply(asked)) | {"model": asked["model"]})


async def models(_: web.Request) -> web.Response:
    names = ("gpt-4.1-mini", "claude-haiku-4-5")
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


@asynccontextmanager
async def serving_provider() -> AsyncIterator[str]:
    app = web.Application()
    for path in KEYS:
        app.router.add_post(path, answer)
    app.router.add_get("/v1/models", models)
    async with listening(app) as url:
        yield url


pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Each part says when it begins; a command that fails ends all.
PART = 'echo "part {number} begins at $SECONDS s"\n{commands}'


def here(text: str, provider: str) -> str:
    """The document's text with addresses of this machine."""
    for address in ("https://api.openai.com", "https://api.anthropic.com"):
        assert address in text
        text = text.replace(address, provider)
    for port in ("8080", "8100"):
        text = text.replace(port, str(free_port()))
    return text


async def test_the_tutorial_leads_from_a_providers_traffic_to_a_better_small_model(tmp_path: Path) -> None:
    async with serving_provider() as provider:
        blocks = FENCE.findall(here((ROOT / "docs" / "tutorial.md").read_text(), provider))
        for language, text in blocks:
            if language != "sh":
                (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text)
        commands = [text for language, text in blocks if language == "sh"]
        parts = [PART.format(number=number, commands=text) for number, text in enumerate(commands)]
        bin_first = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        shell = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", "\n".join(parts),
            cwd=tmp_path, env=os.environ | bin_first, start_new_session=True,
        )  # fmt: skip
        try:
            assert await shell.wait() == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            await shell.wait()
    found = {name: json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in NAMES}
    before, imitated = ({row["model"]: row["mean_reward"] for row in found[name]} for name in NAMES[:2])
    print(before, imitated, found["reinforced"])
    assert before["gpt-4.1-mini"] > 0.8
    assert imitated["live"] > before["live"] + 0.3
    (reinforced, _) = found["reinforced"]
    assert min(reinforced["policy_versions"]) > 1
    assert len((tmp_path / "good.jsonl").read_text().splitlines()) > 100
