"""`import`: conversations of others become rollouts of another model, which imitation learns from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.features.tune.lessons import LessonReader, Lessons
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.command_line import Done, lightning
from support.models import TEMPLATE, save_small_model
from support.sections import TrainerConfig

Json = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = [{"id": "k1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
WITH_TOOLS = {
    "messages": [
        {"role": "system", "content": "w3"},
        {"role": "user", "content": "w4"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "k1", "content": "w5"},
        {"role": "assistant", "content": "w6"},
    ],
    "tools": [TOOL],
    "task_id": "t1",
    "model": "gpt-5",
}
PLAIN = {"messages": [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}], "reward": 0.25}
FAILED = {"messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w8"}], "status": "failed"}


def written(tmp_path: Path, *rows: Json | str) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return path


def run(tmp_path: Path, *arguments: str | Path, store: str = "store.db") -> Done:
    config = tmp_path / f"{store}.yaml"
    config.write_text(f"store: {{url: 'sqlite:///{tmp_path}/{store}'}}\n")
    return lightning("--config", config, *arguments)


async def traces(tmp_path: Path) -> Lessons:
    tokenizer = AutoTokenizer.from_pretrained(save_small_model(tmp_path / "model"))
    tokenizer.chat_template = TEMPLATE.strip()
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        settings = TrainerConfig()
        trainer: Any = SimpleNamespace(settings=settings, tokenizer=tokenizer, max_tokens=512, vocabulary=None)
        return await LessonReader("sft", Store(database), trainer).read()


async def test_imported_conversations_are_imitated_answer_by_answer(tmp_path: Path) -> None:
    code, _, err = await asyncio.to_thread(
        run, tmp_path, "import", written(tmp_path, WITH_TOOLS, PLAIN, FAILED), "--model", "claude"
    )
    assert (code, "3 rollouts from " in err) == (0, True), err
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        store = Store(database)
        page, _ = await store.rollouts.page({}, 10)
        facts = {(r.task_id, r.status, r.reward, r.calls) for r in page}
        assert facts == {("t1", "completed", 1.0, 2), (None, "completed", 0.25, 1), (None, "failed", None, 1)}
        calls = [call for rollout in page for call in await store.calls.of(rollout.rollout_id)]
        assert {(c.model, c.policy_version, c.trainable) for c in calls} == {
            ("gpt-5", None, False), ("claude", None, False),
        }  # fmt: skip
        (tool_call,) = [tool for call in calls for tool in call.tool_calls]
        assert (tool_call.arguments, tool_call.result) == ('{"a":2}', "w5")
    found = await traces(tmp_path)
    assert len(found.rollout_ids) == 2, "nobody imitates what failed"
    assert found.metrics["calls_untokenised"] == 0
    assert all(any(row.mask) for one in found.train for row in one.rows)


async def test_rewards_outside_of_the_range_are_imported_by_no_means(tmp_path: Path) -> None:
    file = written(tmp_path, PLAIN, PLAIN | {"reward": 1e300})
    for arguments in ((), ("--reward", "-20000")):
        code, _, err = await asyncio.to_thread(run, tmp_path, "import", file, "--model", "claude", *arguments)
        assert (code != 0, "outside of rewards.range" in err) == (True, True)
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        assert (await Store(database).rollouts.page({}, 10))[0] == []
