"""Commands show and export whatever agents and upstreams have written."""

from __future__ import annotations

from typing import Any

from contract.scripted import CHAT, Scripted, said, user

GO = user("go")
VALUES: list[Any] = [None, 5.5, "x", [], {}, [None], [[]], [{}], {"a": 1}, [{"type": 5}], [{"type": "text"}]]


def ask(model: Scripted, rollout: str, messages: Any, answer: Any, **more: Any) -> None:
    model.ask(f"/rollouts/{rollout}{CHAT}", {"messages": messages, **more}, answer)


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
    for kind, file in (("transitions", "-"), ("transitions", "t.parquet"), ("sft", "-"), ("sft", "s.parquet")):
        done = model.proxy.run("export", file, "--kind", kind, "--mode", "all", "--status", "all")
        assert done.returncode == 0, (kind, file, done.stderr)
        assert file != "-" or '"good"' in done.stdout, kind
