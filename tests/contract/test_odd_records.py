"""Commands show and export whatever agents and upstreams have written."""

from __future__ import annotations

import json
from typing import Any

from contract.scripted import CHAT, Scripted, said, user

GO = user("go")
VALUES: list[Any] = [None, 5.5, "x", [], {}, [None], [[]], [{}], {"a": 1}, [{"type": 5}], [{"type": "text"}]]


def ask(model: Scripted, rollout: str, messages: Any, answer: Any, **more: Any) -> None:
    model.ask(f"/rollouts/{rollout}{CHAT}", {"messages": messages, **more}, answer)


def test_a_result_without_an_id_is_of_the_call_without_one(model: Scripted) -> None:
    made = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    results = [{"role": "tool", "content": text} for text in ("5", "6")]
    ask(model, "no-ids", [GO], said(None, tool_calls=made))
    ask(model, "no-ids", [GO, said(None, tool_calls=made), *results], said("done"))
    rows = map(json.loads, model.proxy.run("export", "--kind", "atif", "-").stdout.splitlines())
    (row,) = [row for row in rows if row["session_id"] == "no-ids"]
    ids = [call["tool_call_id"] for call in row["steps"][1]["tool_calls"]]
    found = row["steps"][1]["observation"]["results"]
    assert [(one["source_call_id"], one["content"]) for one in found] == [(ids[0], "5"), (ids[1], "6")]
    assert len(set(ids)) == 2 and all(ids)


def test_odd_records_are_exported_or_left_out_with_the_reason(model: Scripted) -> None:
    for i, value in enumerate(VALUES):
        calls = [{"id": value, "type": value, "function": {"name": value, "arguments": value}}]
        odd = said(value, reasoning_content=value, tool_calls=calls)
        for name, messages, answer in (
            ("answer", [GO], odd),
            ("calls", [GO], said("a", tool_calls=value)),
            ("request", [GO, odd, {"role": "tool", "tool_call_id": value, "content": value}], said("a")),
            ("message", [GO, value], said("a")),
            ("all", value, value),
        ):
            ask(model, f"odd-{name}-{i}", messages, answer, temperature=value)
    ask(model, "good", [GO], said("a"))
    for kind, file in (
        ("transitions", "-"),
        ("transitions", "t.parquet"),
        ("sft", "-"),
        ("sft", "s.parquet"),
        ("atif", "-"),
    ):
        done = model.proxy.run("export", file, "--kind", kind, "--mode", "all", "--status", "all")
        assert done.returncode == 0, (kind, file, done.stderr)
        assert file != "-" or '"good"' in done.stdout, kind
