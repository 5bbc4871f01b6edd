"""Writes a rollout as text that a model can learn from: its messages, tool calls, rewards and ending. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...proxy.dialects.transcript import read

MOST = 6_000  # characters of one text


def inputs(rollout: Mapping[str, Any]) -> str:
    """Return the agent's task: the first message that is no system prompt."""
    for turn in read(rollout["calls"])[:1]:
        for message in turn.shown:
            if message["role"] == "user":
                return _cut(_text(message["content"]))
    return "(no call was made)"


def outputs(rollout: Mapping[str, Any]) -> str:
    """Return the answers of the agent's models, and the results of its tools, in order."""
    turns = read(rollout["calls"])
    if not turns:
        return "(no call was made)"
    longest = max(turns, key=lambda turn: len(turn.messages))
    lines = [line for message in longest.messages for line in _lines(message)]
    return _cut("\n".join(lines) or "(nothing was said)")


def feedback(rollout: Mapping[str, Any]) -> str:
    """Return the outcome: the reward, its comments, failed tools, failed calls, how the rollout ended."""
    return _cut("\n".join(_feedback(rollout)))


def _feedback(rollout: Mapping[str, Any]) -> Iterator[str]:
    yield f"reward: {rollout['reward']}"
    newest = {(reward.get("call_id"), reward["name"]): reward for reward in rollout["rewards"]}  # oldest first
    for reward in newest.values():
        if reward["comment"]:
            yield f"{reward['source'] or reward['name']} says: {reward['comment']}"
    for call in rollout["calls"]:
        if call["error"]:
            yield f"a call failed: {call['error']}"
        for tool in call["tool_calls"]:
            if tool["is_error"]:
                yield f"the tool {tool['name']} failed: {_text(tool['result'])}"
    if rollout["status"] == "failed":
        yield f"the agent failed: {rollout['reason']}"


def _lines(message: Mapping[str, Any]) -> Iterator[str]:
    if message["role"] in ("system", "developer", "user"):
        return
    if text := _text(message.get("content")):
        yield f"{message['role']}: {text}"
    for tool in message.get("tool_calls") or ():
        yield f"calls {tool['function']['name']}({_text(tool['function']['arguments'])})"


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part.get("text", f"({part.get('type')})")) for part in content)
    return json.dumps(content, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST // 2]}\n…\n{text[-MOST // 2 :]}"
