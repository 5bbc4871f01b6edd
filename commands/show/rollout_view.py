"""Shows rollouts of the control API in a terminal: a table, one rollout as a line or in full, or two compared."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from io import StringIO
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.json_text import dumps
from ...core.tools import calls_in
from ...proxy.dialects.transcript import additions, body, chat_turns
from ..formats import cut, duration, facts, number, plain, table

CUT_AT = 600
NUMBERS_WIDTH = 55  # of the other columns of the table
COLOURS = {"completed": "green", "failed": "red", "discarded": "dim", "running": "yellow"}
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}

WIDE = 10_000
STYLES = {"+": "green", "-": "red", "@": "cyan"}
CONTEXT = 2

Json = dict[str, Any]


def rollouts_table(rollouts: Sequence[Json], now: float, width: int | None) -> Table:
    """Return a table with one line per rollout. Ids and tasks are cut to fit `width`, unless it is None."""
    rows = (
        (
            r["rollout_id"], r["task_id"], r["mode"], Text(r["status"], COLOURS.get(r["status"], "")),
            number(r["reward"]), r["calls"], r["tokens"], r["policy_version"], duration(now - r["created_at"]),
        )
        for r in rollouts
    )  # fmt: skip
    heads = ("reward", "calls", "tokens", "v", "age")
    shown = table("rollout", "task", "mode", "status", right=heads, rows=rows, padding=(0, 1))
    if width is not None:
        names = max(width - NUMBERS_WIDTH, 20)
        shown.columns[0].max_width, shown.columns[1].max_width = names * 2 // 3, names // 3
    return shown


def rollout_line(rollout: Json) -> Text:
    """Return one rollout in one line, as `tail` prints it."""
    facts = f"task {rollout['task_id'] or '-'}  reward {number(rollout['reward'])}"
    line = f"{time.strftime('%H:%M:%S')} {rollout['status']:<10} {rollout['rollout_id']}  {facts}"
    return plain(f"{line}  calls {rollout['calls']}  tokens {rollout['tokens']}", COLOURS.get(rollout["status"], ""))


def rollout_detail(rollout: Json, full: bool) -> RenderableType:
    """Return a view of the rollout: a header, then each call's new messages and answer, and other events."""
    return Group(facts(_facts(rollout)), *_conversation(rollout, full))


def rollout_diff(a: Json, b: Json) -> RenderableType:
    """Return a diff of what `rollouts show` writes for the two, without latencies."""
    changes = list(unified_diff(_lines(a), _lines(b), "A", "B", lineterm="", n=CONTEXT))[2:]
    return Group(*(plain(line, STYLES.get(line[0], "")) for line in changes or ["the rollouts are the same"]))


def _lines(rollout: Json) -> list[str]:
    """The rollout as `rollouts show` writes it, without the latency of its calls, which always differs."""
    bare = rollout | {"calls": [call | {"latency_ms": None} for call in rollout["calls"]]}
    console = Console(width=WIDE, file=StringIO(), record=True, highlight=False, color_system=None)
    console.print(rollout_detail(bare, full=True))
    return [line.rstrip() for line in console.export_text(styles=False).split("\n")]


def _facts(rollout: Json) -> Iterator[tuple[str, str]]:
    versions = sorted({version for call in rollout["calls"] for version in call["policy_versions"]})
    not_yet = rollout["dropped"] or ("never: an evaluation" if rollout["mode"] == "eval" else "not yet")
    is_of_calls = rollout["reward"] is not None and rollout.get("own_reward", 0.0) is None
    yield "rollout", rollout["rollout_id"]
    yield "task", rollout["task_id"] or "-"
    yield "mode", rollout["mode"]
    yield "status", " · ".join(filter(None, (rollout["status"], rollout["reason"])))
    yield "reward", number(rollout["reward"]) + ", from its calls" * is_of_calls
    yield "trained", not_yet if rollout["step"] is None else f"by step {rollout['step']}"
    yield "policy version", ", ".join(map(str, versions)) or "-"
    yield "calls, tokens", f"{len(rollout['calls'])}, {rollout['tokens']}"
    if (costs := rollout.get("costs")) is not None:
        more = f" + ? for {costs['unpriced']} calls" if costs["unpriced"] else ""
        yield "used", f"{costs['input_tokens']} + {costs['output_tokens']} tokens, {costs['usd']:.4g} USD{more}"
    posted = []
    for reward in rollout["rewards"]:
        whom = f"call {reward['call_id'][:8]}" if reward["call_id"] else "rollout"
        more = ", ".join(filter(None, (reward["source"], reward["comment"])))
        posted.append(f"{reward['name']} {reward['reward']:g} for the {whom}" + f" ({more})" * bool(more))
    if posted:
        yield "posted", "\n".join(posted)


def _conversation(rollout: Json, full: bool) -> Iterator[RenderableType]:
    def line(label: str, style: str, value: Any) -> RenderableType:
        text = value if isinstance(value, str) else dumps(value)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(min_width=9, justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(plain(label, style), plain(text if full else cut(text, CUT_AT)))
        return grid

    def said(message: Json, style: str = "") -> Iterator[RenderableType]:
        role = str(message.get("role") or message.get("type", "?"))
        if thought := message.get("reasoning_content"):
            yield line("thinks", "dim", str(thought))
        if body(message) or not (style or message.get("tool_calls")):
            yield line(role, style or ROLES.get(role, ""), body(message))

    def happened(event: Json) -> Iterator[RenderableType]:
        yield _heading(event["kind"], " · ".join(filter(None, (event["agent"], event["name"]))))
        if event["kind"] != "action":
            yield line("", "", event["value"])
            return
        yield line("arguments", "yellow", event["arguments"])
        yield line(*(("failed", "red") if event["is_error"] else ("result", "yellow")), event["result"])

    events = deque(rollout.get("events", ()))
    for call, (turn, added) in zip(rollout["calls"], additions(chat_turns(rollout["calls"])), strict=True):
        while events and events[0]["seq"] <= call["seq"]:
            yield from happened(events.popleft())
        fate, style = "trainable", "not bold green"
        if not call["trainable"]:
            fate, style = f"not trainable: {call['untrainable_reason']}", "not bold red"
        elif call.get("rejected"):
            fate, style = "rejected: another attempt was used in its place", "not bold dim strike"
        yield _heading(f"call {call['seq']}", _numbers(call)).append_text(plain(f" · {fate}", style))
        for message in added:
            yield from said(message)
            for tool in calls_in(message):  # calls that no call of this rollout made
                yield line("called", "yellow", f"{tool.name}({tool.arguments})")
        for message in turn.answer:
            yield from said(message, style)
        if not turn.answer:
            yield plain(f"  no answer: {call['error'] or call['status']}", "red")
        for made in call["tool_calls"]:  # results are messages of the next call
            yield line("calls", "yellow", f"{made['name']}({made['arguments']})")
            if made["is_error"]:
                yield line("", "red", f"{made['name']} failed")
    for event in events:
        yield from happened(event)


def _heading(what: str, more: str) -> Text:
    return Text(f"\n── {what} ", "bold").append_text(plain(more, "not bold"))


def _numbers(call: Json) -> str:
    versions = ", ".join(map(str, call["policy_versions"])) or "-"
    prompt = (call.get("prompt_of") or {"tokens": 0})["tokens"] + len(call["prompt_token_ids"])
    tokens = f"{prompt} + {len(call['response_token_ids'])} tokens"
    latency = "-" if call["latency_ms"] is None else duration(call["latency_ms"] / 1000)
    reward = None if call["reward"] is None else f"reward {call['reward']:g}"
    facts = (call["agent"], f"version {versions}", tokens, call["finish_reason"] or call["status"], latency, reward)
    return " · ".join(filter(None, facts))
