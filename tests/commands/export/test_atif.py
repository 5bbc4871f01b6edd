"""`export --kind atif` and `import`: trajectories in Harbor's format, out and in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.command_line import Done, lightning

Json = dict[str, Any]


def run(tmp_path: Path, *arguments: str | Path) -> Done:
    config = tmp_path / "config.yaml"
    config.write_text(f"store: {{url: 'sqlite:///{tmp_path}/other.db'}}\n")
    return lightning("--config", config, *arguments)


def rows_of(text: str) -> list[Json]:
    facts = ("messages", "tools", "task_id", "mode", "status", "reward", "model")
    return [{fact: row[fact] for fact in facts} for row in map(json.loads, text.splitlines())]


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
