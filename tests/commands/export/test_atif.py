"""`export --kind atif` and `import`: trajectories in Harbor's format, out and in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Done, lightning

Running = Callable[..., AbstractAsyncContextManager[Any]]
Json = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADDS = {"id": "k1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def run(tmp_path: Path, *arguments: str | Path) -> Done:
    config = tmp_path / "config.yaml"
    config.write_text(f"store: {{url: 'sqlite:///{tmp_path}/other.db'}}\n")
    return lightning("--config", config, *arguments)


def rows_of(text: str) -> list[Json]:
    facts = ("messages", "tools", "task_id", "mode", "status", "reward", "model")
    return [{fact: row[fact] for fact in facts} for row in map(json.loads, text.splitlines())]


async def test_what_goes_out_comes_in_as_the_same_conversation(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        asked: list[Json] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}]
        system.vllm.answer = lambda body: (
            {"role": "assistant", "content": "It is 4."}
            if body["messages"][-1]["role"] == "tool"
            else {"role": "assistant", "content": None, "tool_calls": [ADDS]}
        )
        for result in ([], [{"role": "tool", "tool_call_id": "k1", "content": "4"}]):
            asked += result
            url = "/rollouts/r1/tasks/t1/agents/adder/v1/chat/completions"
            _, answer = await system.call("POST", url, {"model": "policy", "messages": asked, "tools": [TOOL]})
            asked.append(answer["choices"][0]["message"])
        await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 0.5})
        _, rollout = await system.call("GET", "/rollouts/r1?requests=whole")
        _, sft, _ = await system.lightning("export", "-", "--kind", "sft")
        code, _, err = await system.lightning("export", tmp_path / "out.jsonl", "--kind", "atif")
        refused = await system.lightning("export", tmp_path / "out.parquet", "--kind", "atif")
    assert (code, "1 atif rows" in err) == (0, True), err
    assert (refused.returncode, "JSON Lines only" in refused.stderr) == (2, True)
    document = json.loads((tmp_path / "out.jsonl").read_text())
    assert (document["schema_version"], document["session_id"]) == ("ATIF-v1.6", "r1")
    assert (document["agent"]["name"], document["agent"]["tool_definitions"]) == ("adder", [TOOL])
    steps = document["steps"]
    assert [(step["step_id"], step["source"]) for step in steps] == [
        (1, "system"), (2, "user"), (3, "agent"), (4, "agent"),
    ]  # fmt: skip
    (called,) = steps[2]["tool_calls"]
    assert called == {"tool_call_id": "k1", "function_name": "add", "arguments": {"a": 2}}
    assert steps[2]["observation"] == {"results": [{"source_call_id": "k1", "content": "4"}]}
    for step, call in zip(steps[2:], rollout["calls"], strict=True):
        found, sampled = step["metrics"], call["response_token_ids"]
        assert (found["completion_token_ids"], len(found["logprobs"])) == (sampled, len(sampled))
        assert (found["prompt_token_ids"], found["completion_tokens"]) == (call["prompt_token_ids"], len(sampled))
        assert step["extra"]["call_id"] == call["call_id"]
    done = await asyncio.to_thread(run, tmp_path, "import", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    again = await asyncio.to_thread(run, tmp_path, "export", "-", "--kind", "sft")
    assert rows_of(again.stdout) == rows_of(sft)


HARBORS = {
    "schema_version": "ATIF-v1.7",
    "trajectory_id": "one",
    "agent": {"name": "an-agent", "version": "1.0.0", "model_name": "a-model", "extra": {}},
    "notes": "as an agent of Harbor writes it",
    "steps": [
        {"step_id": 1, "timestamp": "2026-01-02T03:04:05Z", "source": "user", "message": "Look at both files."},
        {"step_id": 2, "source": "agent", "message": "Copied.", "is_copied_context": True},
        {
            "step_id": 3,
            "source": "agent",
            "message": "I look.",
            "reasoning_content": "There are two.",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "read", "arguments": {"path": "a"}},
                {"tool_call_id": "c2", "function_name": "read", "arguments": {}},
            ],
            "observation": {
                "results": [
                    {"source_call_id": "c1", "content": "A"},
                    {"source_call_id": "c2", "content": [{"type": "text", "text": "B"}]},
                    {"content": "$ "},
                    {"subagent_trajectory_ref": [{"trajectory_id": "two"}]},
                ]
            },
            "metrics": {"prompt_tokens": 5, "completion_tokens": 3, "cost_usd": 0.1},
        },
        {"step_id": 4, "source": "agent", "message": "A and B.", "llm_call_count": 1},
    ],
    "final_metrics": {"total_steps": 4},
}


def test_a_trajectory_of_harbors_is_imitated_answer_by_answer(tmp_path: Path) -> None:
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps(HARBORS, indent=2))
    done = run(tmp_path, "import", file, "--reward", "0.5")
    assert (done.returncode, done.stderr) == (0, f"1 rollouts from {file}\n")
    (row,) = rows_of(run(tmp_path, "export", "-", "--kind", "sft").stdout)
    assert [(one["role"], one["content"]) for one in row["messages"]] == [
        ("user", "Look at both files."), ("assistant", "Copied."), ("assistant", "I look."),
        ("tool", "A"), ("tool", "B"), ("user", "$ "), ("assistant", "A and B."),
    ]  # fmt: skip
    assert row["messages"][2]["reasoning_content"] == "There are two."
    assert (row["model"], row["reward"]) == ("a-model", 0.5)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"steps": None}, "line 1: it is no trajectory: "),
        ({"agent": None}, "line 1: it is no trajectory: "),
        (
            {"steps": [{"step_id": 1, "source": "robot", "message": ""}]},
            "line 1: it is no trajectory: KeyError 'robot'",
        ),
        (
            {"steps": [{"step_id": 7, "source": "user", "message": [{"type": "image", "source": {"path": "a.png"}}]}]},
            "line 1: step 7 has more than text",
        ),
    ],
    ids=str,
)
def test_what_is_no_trajectory_is_one_line(tmp_path: Path, changed: Json, why: str) -> None:
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps(HARBORS | changed))
    done = run(tmp_path, "import", file)
    assert (done.returncode, done.stderr.count("\n"), why in done.stderr) == (2, 1, True), done.stderr
