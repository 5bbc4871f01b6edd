"""Commands show and export whatever agents and upstreams have written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from support.command_line import Done, lightning
from support.scripted import CHAT, Proxy, scripted

pytestmark = pytest.mark.asyncio(loop_scope="module")
HALF = "\ud83d"
VALUES: list[Any] = [None, 5.5, "x", [], {}, [None], [[]], [{}], {"a": 1}, [{"type": 5}], [{"type": "text"}]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxies(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sequence[Proxy]]:
    async with scripted(tmp_path_factory.mktemp("odd")) as found:
        yield found


@pytest.fixture
def proxy(proxies: Sequence[Proxy]) -> Proxy:
    return proxies[0]


async def ran(proxy: Proxy, tmp_path: Path, *command: str) -> Done:
    config = {"store": {"url": proxy.config.store.url}, "proxy": {"port": int(proxy.url.rpartition(":")[2])}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return await asyncio.to_thread(lightning, *command, cwd=tmp_path)


async def test_a_result_without_an_id_is_of_the_call_without_one(proxy: Proxy, tmp_path: Path) -> None:
    made = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    asked = [{"role": "user", "content": "go"}]
    calls = {"role": "assistant", "content": None, "tool_calls": made}
    results = [{"role": "tool", "content": text} for text in ("5", "6")]
    await proxy.ask(f"/rollouts/no-ids{CHAT}", {"messages": asked}, calls)
    done = {"role": "assistant", "content": "done"}
    await proxy.ask(f"/rollouts/no-ids{CHAT}", {"messages": [*asked, calls, *results]}, done)
    rows = map(json.loads, (await ran(proxy, tmp_path, "export", "--kind", "atif", "-")).stdout.splitlines())
    (row,) = [row for row in rows if row["session_id"] == "no-ids"]
    ids = [call["tool_call_id"] for call in row["steps"][1]["tool_calls"]]
    found = row["steps"][1]["observation"]["results"]
    assert [(one["source_call_id"], one["content"]) for one in found] == [(ids[0], "5"), (ids[1], "6")]
    assert len(set(ids)) == 2 and all(ids)


async def test_half_a_character_is_shown_anywhere(proxy: Proxy, tmp_path: Path) -> None:
    cut = {"role": "user", "content": f"é {HALF}"}
    function = {"name": f"f{HALF}", "arguments": HALF}
    answer = {"role": "assistant", "content": HALF, "tool_calls": [{"id": HALF, "function": function}]}
    await proxy.ask(f"/rollouts/half{CHAT}", {"messages": [cut], "model": f"m{HALF}"}, answer)
    await proxy.post("/rollouts", {"metadata": {HALF: HALF}})
    shown = [await ran(proxy, tmp_path, "rollouts", "show", "half", *more) for more in ((), ("--json",))]
    listed = [await ran(proxy, tmp_path, "rollouts", "list", *more) for more in ((), ("--json",))]
    assert [done.returncode for done in (*shown, *listed)] == [0, 0, 0, 0]
    assert "\\ud83d" in shown[0].stdout
    (call,) = json.loads(shown[1].stdout)["calls"]
    assert call["request"]["messages"] == [cut] and call["response"]["choices"][0]["message"] == answer
    assert {HALF: HALF} in [rollout["metadata"] for rollout in json.loads(listed[1].stdout)["data"]]


async def test_odd_records_are_exported_or_left_out_with_the_reason(proxy: Proxy, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "go"}
    for i, value in enumerate(VALUES):
        function = {"name": value, "arguments": value}
        calls = [{"id": value, "type": value, "function": function}]
        result = {"role": "tool", "tool_call_id": value, "content": value}
        odd = {"role": "assistant", "content": value, "reasoning_content": value, "tool_calls": calls}
        for name, messages, answer in (
            ("answer", [asked], odd),
            ("calls", [asked], {"role": "assistant", "content": "a", "tool_calls": value}),
            ("request", [asked, odd, result], {"role": "assistant", "content": "a"}),
            ("message", [asked, value], {"role": "assistant", "content": "a"}),
            ("all", value, value),
        ):
            await proxy.ask(f"/rollouts/odd-{name}-{i}{CHAT}", {"messages": messages, "temperature": value}, answer)
    await proxy.ask(f"/rollouts/good{CHAT}", {"messages": [asked]}, {"role": "assistant", "content": "a"})
    for kind in ("transitions", "sft", "atif"):
        for file in ("-", f"{kind}.parquet")[: 1 if kind == "atif" else 2]:
            done = await ran(proxy, tmp_path, "export", file, "--kind", kind, "--mode", "all", "--status", "all")
            assert done.returncode == 0, (kind, file, done.stderr)
            if file == "-":
                assert '"good"' in done.stdout, kind
