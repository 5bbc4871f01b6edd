"""Shows rollouts of the control API in a terminal: a table, one in full, or two compared."""

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
from ..formats import cut, duration, number, plain

CUT_AT = 600
NUMBERS_WIDTH = 55  # of the other columns of the table
COLOURS = {"completed": "green", "failed": "red", "discarded": "dim", "running": "yellow"}
LEFT_OUT = "not bold dim strike"
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}

WIDE = 10_000
STYLES = {"+": "green", "-": "red", "@": "cyan"}
CONTEXT = 2


def rollouts_table(rollouts: Sequence[dict[str, Any]], now: float, width: int | None) -> Table:
    """Return one line per rollout. Long ids and tasks are cut to fit the width; None: not cut, for programs."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    names = None if width is None else max(width - NUMBERS_WIDTH, 20)
    table.add_column("rollout", max_width=names and names * 2 // 3, no_wrap=True)
    table.add_column("task", max_width=names and names // 3, no_wrap=True)
    for name in ("mode", "status"):
        table.add_column(name, no_wrap=True)
    for name in ("reward", "calls", "tokens", "v", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rollouts:
        status = Text(r["status"], COLOURS.get(r["status"], ""))
        version = "-" if r["policy_version"] is None else str(r["policy_version"])
        numbers = (number(r["reward"]), str(r["calls"]), str(r["tokens"]), version)
        cells = (plain(r["rollout_id"]), plain(r["task_id"] or "-"), r["mode"], status)
        table.add_row(*cells, *numbers, duration(now - r["created_at"]))
    return table


def rollout_line(rollout: dict[str, Any]) -> Text:
    """Return one rollout in one line, as `tail` prints it."""
    line = Text(time.strftime("%H:%M:%S "), "dim")
    line.append(f"{rollout['status']:<10}", COLOURS.get(rollout["status"], ""))
    line.append(f"{rollout['rollout_id']}  ", "bold")
    facts = f"task {rollout['task_id'] or '-'}  reward {number(rollout['reward'])}"
    return line.append(f"{facts}  calls {rollout['calls']}  tokens {rollout['tokens']}")


def rollout_detail(rollout: dict[str, Any], full: bool, credit: Sequence[dict[str, Any]] = ()) -> RenderableType:
    """Return the rollout: a header, then each call's new messages and answer, and events between.

    `credit`: of its calls, as its training rows have it, if a step took it.
    """
    credited = {one["call_id"]: one for one in credit}
    parts: list[RenderableType] = [_header(rollout)]
    events = deque(rollout.get("events", ()))
    turns = additions(chat_turns(rollout["calls"]))
    for call, (turn, added) in zip(rollout["calls"], turns, strict=True):
        while events and events[0]["seq"] <= call["seq"]:
            parts += [Text(""), *_event(events.popleft(), full)]
        cost = rollout.get("costs", {}).get("of_calls", {}).get(call["call_id"])
        fate, style = _fate(call, credited.get(call["call_id"]))
        parts += [Text(""), _call_line(call, cost).append_text(plain(f" · {fate}", style))]
        parts += [line for message in added for line in _message(message, full)]
        parts += [line for message in turn.answer for line in _message_lines(message, full, style=style)]
        if not turn.answer:
            parts.append(plain(f"  no answer: {call['error'] or call['status']}", "red"))
        parts += _tools(call, full)
    for event in events:
        parts += [Text(""), *_event(event, full)]
    return Group(*parts)


def _event(event: dict[str, Any], full: bool) -> Iterator[RenderableType]:
    """One event that the agent posted."""
    names = " · ".join(filter(None, (event["agent"], event["name"])))
    yield Text(f"── {event['kind']} ", "bold").append_text(plain(names, "not bold"))
    if event["kind"] == "action":
        label, style = ("failed", "red") if event["is_error"] else ("result", "yellow")
        yield _line("arguments", "yellow", _json(event["arguments"]), full)
        yield _line(label, style, _json(event["result"]), full)
    else:
        yield _line("", "", _json(event["value"]), full)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _header(rollout: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    versions = sorted({v for call in rollout["calls"] for v in call["policy_versions"]})
    not_yet = rollout["dropped"] or ("never: an evaluation" if rollout["mode"] == "eval" else "not yet")
    trained = f"by step {rollout['step']}" if rollout["step"] is not None else not_yet
    is_of_calls = rollout["reward"] is not None and rollout.get("own_reward", 0.0) is None
    facts = [
        ("rollout", rollout["rollout_id"]),
        ("task", rollout["task_id"] or "-"),
        ("mode", rollout["mode"]),
        ("status", " · ".join(filter(None, (rollout["status"], rollout["reason"])))),
        ("reward", number(rollout["reward"]) + ", that of its calls" * is_of_calls),
        ("trained", trained),
        ("policy version", ", ".join(map(str, versions)) or "-"),
        ("calls, tokens", f"{len(rollout['calls'])}, {rollout['tokens']}"),
    ]
    if (costs := rollout.get("costs")) is not None:
        facts.append(("used", f"{_used(costs)}, {costs['usd']:.4g} USD{' + ?' * (costs['unpriced'] > 0)}"))
    for name, value in facts:
        table.add_row(name, plain(value))
    for reward in rollout["rewards"]:
        table.add_row("  posted", plain(_reward(reward)))
    return table


def _reward(reward: dict[str, Any]) -> str:
    whom = f"call {reward['call_id'][:8]}" if reward["call_id"] else "rollout"
    more = " · ".join(filter(None, (reward["source"], reward["comment"])))
    return f"{reward['name']} {reward['reward']:g} for the {whom}" + (f" ({more})" if more else "")


def _used(cost: dict[str, Any]) -> str:
    """Tokens of input and output; those that came from a cache or were reasoning apart."""
    cached, reasoning = cost["cached_tokens"], cost["reasoning_tokens"]
    read = f"{cost['input_tokens']}{f' ({cached} cached)' * (cached > 0)}"
    return f"{read} + {cost['output_tokens']} tokens{f' ({reasoning} reasoning)' * (reasoning > 0)}"


def _call_line(call: dict[str, Any], cost: dict[str, Any] | None = None) -> Text:
    versions = ", ".join(map(str, call["policy_versions"])) or "-"
    shared = (call.get("prompt_of") or {"tokens": 0})["tokens"]
    seen = f"{shared + len(call['prompt_token_ids'])} + {len(call['response_token_ids'])} tokens"
    tokens = seen if cost is None else _used(cost)
    latency = "-" if call["latency_ms"] is None else duration(call["latency_ms"] / 1000)
    facts = [f"version {versions}", tokens, call["finish_reason"] or call["status"], latency]
    if call["agent"]:
        facts.insert(0, call["agent"])
    if call["reward"] is not None:
        facts.append(f"reward {call['reward']:g}")
    return Text(f"── call {call['seq']} ", "bold").append_text(plain(" · ".join(facts), "not bold"))


def _fate(call: dict[str, Any], credit: dict[str, Any] | None) -> tuple[str, str]:
    """Whether a call is trained on, in words, and the style that its answer is shown in."""
    if not call["trainable"]:
        return f"not trainable: {call['untrainable_reason']}", "not bold red"
    if credit is not None and credit["row"] is not None:
        return f"trained, advantage {credit['advantage']:+.3g}", "not bold green"
    if call.get("rejected"):
        return f"{'left out' if credit else 'rejected'}: another attempt was used in its place", LEFT_OUT
    return ("trainable", "not bold green") if credit is None else ("left out", LEFT_OUT)


def _message(message: dict[str, Any], full: bool) -> Iterator[RenderableType]:
    """A message of the request, with the tool calls that no call of this rollout made."""
    yield from _message_lines(message, full, even_empty=not message.get("tool_calls"))
    for call in calls_in(message):
        yield _line("called", "yellow", f"{call.name}({call.arguments})", full)


def _message_lines(
    message: dict[str, Any], full: bool, even_empty: bool = False, style: str = ""
) -> Iterator[RenderableType]:
    role = str(message.get("role") or message.get("type", "?"))
    if thought := message.get("reasoning_content"):
        yield _line("thinks", "dim", str(thought), full)
    if even_empty or body(message):
        yield _line(role, style or ROLES.get(role, ""), body(message), full)


def _tools(call: dict[str, Any], full: bool) -> Iterator[RenderableType]:
    """The tool calls of an answer. Their results are shown as messages of the next call, failures here."""
    for tool in call["tool_calls"]:
        yield _line("calls", "yellow", f"{tool['name']}({tool['arguments']})", full)
        if tool["is_error"]:
            yield _line("", "red", f"{tool['name']} failed", full)


def _line(label: str, style: str, value: str, full: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=9, justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(plain(label, style), plain(value if full else cut(value, CUT_AT)))
    return grid


def rollout_diff(a: dict[str, Any], b: dict[str, Any]) -> RenderableType:
    """Return a table of both rollouts' numbers, and the lines of their conversations that differ."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    for name in ("A", "B"):
        table.add_column(name, overflow="fold")
    for (fact, first), (_, second) in zip(_facts(a), _facts(b), strict=True):
        style = "" if first == second else "yellow"
        table.add_row(fact, plain(first, style), plain(second, style))
    changes = list(unified_diff(_lines(a), _lines(b), "A", "B", lineterm="", n=CONTEXT))[2:]
    lines = [plain(line, STYLES.get(line[0], "")) for line in changes]
    return Group(table, Text(""), *(lines or [Text("the conversations are the same", "dim")]))


def _facts(rollout: dict[str, Any]) -> list[tuple[str, str]]:
    versions = sorted({version for call in rollout["calls"] for version in call["policy_versions"]})
    named = {reward["name"]: f"{reward['name']} {number(reward['reward'])}" for reward in rollout["rewards"]}
    return [
        ("rollout", rollout["rollout_id"]),
        ("task", rollout["task_id"] or "-"),
        ("mode", rollout["mode"]),
        ("status", " · ".join(filter(None, (rollout["status"], rollout["reason"])))),
        ("reward", number(rollout["reward"])),
        ("rewards", ", ".join(named.values()) or "-"),
        ("version", ", ".join(map(str, versions)) or "-"),
        ("calls", str(len(rollout["calls"]))),
        ("tokens", str(rollout["tokens"])),
    ]


def _lines(rollout: dict[str, Any]) -> list[str]:
    """The conversation as `rollouts show` writes it, without the numbers of its calls, which always differ."""
    bare = rollout | {"calls": [call | {"latency_ms": None} for call in rollout["calls"]]}
    console = Console(width=WIDE, file=StringIO(), record=True, highlight=False, color_system=None)
    console.print(rollout_detail(bare, full=True), soft_wrap=False)
    written = [line.rstrip() for line in console.export_text(styles=False).split("\n")]
    start = next((i for i, line in enumerate(written) if line.startswith("──")), len(written))
    return written[start:]
