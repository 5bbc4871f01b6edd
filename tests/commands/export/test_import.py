"""`import`: conversations of others become rollouts of another model, which imitation learns from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.trainer.sft.traces import TraceReader, Traces
from support.command_line import Done, lightning
from support.sections import TrainerConfig
from support.small_model import save_small_model
from support.tool_template import TEMPLATE

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


def spelled(row: Json) -> str:
    return json.dumps(row["messages"], sort_keys=True)


async def traces(tmp_path: Path) -> Traces:
    tokenizer = AutoTokenizer.from_pretrained(save_small_model(tmp_path / "model"))
    tokenizer.chat_template = TEMPLATE.strip()
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        reader = TraceReader(TrainerConfig.model_validate({"sft": {"held_out": 0}}), Store(database), tokenizer, 512)
        return await reader.read()


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
    assert all(any(sample.mask) for sample in found.train)


def test_what_was_exported_comes_in_again_as_it_was(tmp_path: Path) -> None:
    assert run(tmp_path, "import", written(tmp_path, WITH_TOOLS, PLAIN))[0] == 0
    _, out, _ = run(tmp_path, "export", "-", "--kind", "sft")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [*map(spelled, rows)] in ([*map(spelled, pair)] for pair in ((WITH_TOOLS, PLAIN), (PLAIN, WITH_TOOLS)))
    (tmp_path / "out.jsonl").write_text(out)
    assert run(tmp_path, "import", tmp_path / "out.jsonl", store="other.db")[0] == 0
    _, again, _ = run(tmp_path, "export", "-", "--kind", "sft", store="other.db")
    facts = ("messages", "tools", "task_id", "reward", "model")
    others = [{fact: json.loads(line)[fact] for fact in facts} for line in again.splitlines()]
    assert sorted(map(str, others)) == sorted(str({fact: row[fact] for fact in facts}) for row in rows)


def test_a_second_import_adds_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN, WITH_TOOLS, PLAIN)
    assert run(tmp_path, "import", path).stderr == f"2 rollouts from {path}, 1 were there already\n"
    assert run(tmp_path, "import", path).stderr == f"0 rollouts from {path}, 3 were there already\n"


OPEN = json.dumps(PLAIN)[:-1] + ", "
TRAJECTORY = {
    "schema_version": "ATIF-v1.6",
    "agent": {"name": "a"},
    "steps": [{"step_id": 1, "source": "user", "message": "q"}, {"step_id": 2, "source": "agent", "message": "a"}],
}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "line 2: "),
        ({"prompt": "a"}, "line 2: it is no object with `messages`"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: no message of the assistant"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "line 2: message 1 has no role"),
        ({**PLAIN, "reward": "good"}, "line 2: `reward` is no finite number"),
        ({**PLAIN, "task_id": "a b"}, "line 2: task_id must be"),
        ({**PLAIN, "mode": "test"}, "line 2: `mode` is train or eval"),
        ({**PLAIN, "task_id": []}, "line 2: task_id must be"),
        ({**PLAIN, "reward": True}, "line 2: `reward` is no finite number"),
        ({**PLAIN, "reward": 10**400}, "line 2: `reward` is no finite number"),
        ({**PLAIN, "reward": 20_000}, "conversation 2: reward: 20000 is outside of rewards.range"),
        (f'{OPEN}"reward": NaN}}', "line 2: NaN is not JSON"),
        (f'{OPEN}"reward": 1e999}}', "line 2: `reward` is no finite number"),
        ("[" * 100_000 + "]" * 100_000, "line 2: nested too deeply"),
        (f'{OPEN}"x": {"[" * 5000}{"]" * 5000}}}', "line 2: nested too deeply"),
        ({**TRAJECTORY, "extra": 5}, "line 2: it is no trajectory"),
        ({**TRAJECTORY, "agent": []}, "line 2: it is no trajectory"),
        (
            {"messages": [*PLAIN["messages"], {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "line 2: message 3: `tool_calls` are no calls",
        ),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_imported(tmp_path: Path, row: Json | str, why: str) -> None:
    code, _, err = run(tmp_path, "import", written(tmp_path, PLAIN, row))
    assert (code, err.count("\n")) == (2, 1)
    assert why in err
    assert not (tmp_path / "store.db").exists()


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    for path in (tmp_path / "nowhere", tmp_path / "binary"):
        code, _, err = run(tmp_path, "import", path)
        assert (code, err.count("\n"), str(path) in err) == (2, 1, True), err


async def test_functions_of_older_files_become_tools_with_their_results(tmp_path: Path) -> None:
    def called(name: str) -> Json:
        return {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": "{}"}}

    row = {
        "messages": [
            {"role": "user", "content": "w1"},
            called("f"),
            {"role": "function", "name": "f", "content": "one"},
            called("f"),
            {"role": "function", "name": "f", "content": "two"},
            {"role": "assistant", "content": "w2"},
        ],
        "functions": [{"name": "f", "parameters": {}}],
    }
    bom = "\ufeff"
    file = written(tmp_path, bom + json.dumps(row) + "\r", bom + json.dumps(PLAIN))
    done = await asyncio.to_thread(run, tmp_path, "import", file)
    assert done.returncode == 0, done.stderr
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        store = Store(database)
        page, _ = await store.rollouts.page({}, 10)
        (calls,) = [of for one in page if len(of := await store.calls.of(one.rollout_id)) == 3]
    made = [[(tool.name, tool.result) for tool in call.tool_calls] for call in calls]
    assert made == [[("f", "one")], [("f", "two")], []]
    assert calls[2].request["tools"] == [{"type": "function", "function": row["functions"][0]}]  # type: ignore[index]
    roles = [message["role"] for message in calls[2].request["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


@pytest.mark.parametrize("call", [{"arguments": "{}"}, "f", ["f"]])
def test_a_function_call_that_is_none_is_named(tmp_path: Path, call: Any) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "function_call": call}]}
    done = run(tmp_path, "import", written(tmp_path, row))
    assert done.returncode != 0 and "line 1" in done.stderr and "Traceback" not in done.stderr


async def test_rewards_outside_of_the_range_are_imported_by_no_means(tmp_path: Path) -> None:
    file = written(tmp_path, PLAIN, PLAIN | {"reward": 1e300})
    for arguments in ((), ("--reward", "-20000")):
        code, _, err = await asyncio.to_thread(run, tmp_path, "import", file, "--model", "claude", *arguments)
        assert (code != 0, "outside of rewards.range" in err) == (True, True)
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        assert (await Store(database).rollouts.page({}, 10))[0] == []
