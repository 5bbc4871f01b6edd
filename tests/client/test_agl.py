"""An agent class in the form of Agent Lightning 1.0 runs as it is, under `lightning-proxy run`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from contract.system import Json, Proxy, in_this_process, ok
from lightning_proxy.client.agl import value_at

AGENT = """
import os
import httpx
from openai import AsyncOpenAI

class ChatAgent:
    async def run(self) -> None:
        key, events = os.environ["AGL_KEY"], os.environ["AGL_EVENT_URL"]
        async with AsyncOpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=key) as llm:
            messages = [{"role": "user", "content": os.environ["QUESTION"]}]
            said = await llm.chat.completions.create(model="auto", messages=messages)
        for kind, data in (
            ("agent_output", {"answer": said.choices[0].message.content}),
            ("reward", {"value": 0.25, "reason": "first"}),
            ("reward", {"value": float(os.environ["ANSWER"])}),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            httpx.post(events, json={"event_type": kind, "data": data}, headers=headers).raise_for_status()
"""


def ran(proxy: Proxy, task: str, *program: str | Path) -> Json:
    """The rollout of a program on a task."""
    tasks = proxy.directory / "tasks.jsonl"
    tasks.write_text(f"{task}\n")
    ok(proxy.run("run", "--tasks", tasks, "--group-size", "1", "--", sys.executable, *program))
    (listed,) = proxy.get("/rollouts")["data"]
    return dict(proxy.rollout(listed["rollout_id"]))


def test_its_call_its_rewards_and_its_events_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "my_agent.py").write_text(AGENT)
    task = '{"task_id": "t", "question": "1+1", "of": {"answer": [1]}}'
    agent = ["-m", "lightning_proxy.client.agl", "my_agent.ChatAgent"]
    with in_this_process(tmp_path, policy={"alias": "auto"}) as proxy:
        rollout = ran(proxy, task, *agent, "QUESTION=input.question", "ANSWER=input.of.answer.0")
        body = {"event_type": "reward", "data": {"value": "high"}}
        refused = proxy.post("/agl/api/rollouts/r1/attempt/0/events", body)
    told = "data.value: Input should be a valid number, got 'high'"
    assert (refused.status, refused.error["message"]) == (422, told)
    assert (rollout["status"], rollout["task_id"], rollout["reward"]) == ("completed", "t", 1.0)
    rewards = [(one["reward"], one["comment"], one["source"]) for one in rollout["rewards"]]
    assert rewards == [(0.25, "first", "agl"), (1.0, None, "agl")]
    (call,), (event,) = rollout["calls"], rollout["events"]
    assert (call["request"]["messages"][0]["content"], call["policy_version"]) == ("1+1", 0)
    assert (event["kind"], event["name"]) == ("note", "agent_output")
    assert event["value"]["answer"].startswith("by base")


EMITTERS = """
from lightning_proxy.client import agl

agl.emit_message("thinking")
agl.emit_object({"found": {1}}, attributes={"by": "tool"})
agl.emit_annotation({"kind": "easy"})
agl.emit_exception(ValueError("wrong"))
agl.emit_reward({"right": 1, "format": 0.5}, primary_key="right", attributes={"by": "me"})
"""


def test_its_emitters_note_and_reward(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(EMITTERS)
    with in_this_process(tmp_path) as proxy:
        rollout = ran(proxy, '{"task_id": "t"}', tmp_path / "agent.py")
    assert (rollout["status"], rollout["reward"]) == ("completed", 1.0)
    assert {one["name"]: (one["reward"], one["comment"]) for one in rollout["rewards"]} == {
        "format": (0.5, '{"by": "me"}'), "reward": (1.0, '{"by": "me"}'),
    }  # fmt: skip
    message, found, annotation, error = [(one["name"], one["value"]) for one in rollout["events"]]
    assert (message, annotation) == (("message", "thinking"), ("annotation", {"kind": "easy"}))
    assert found == ("object", {"value": {"found": "{1}"}, "attributes": {"by": "tool"}})
    assert error[1]["exception.type"] == "ValueError" and error[1]["exception.message"] == "wrong"


@pytest.mark.parametrize(
    ("path", "value"),
    [("input", '{"q": ["é", 2]}'), ("input.q.0", "é"), ("input.q.1", "2"), ("inputs", "inputs"), ("a.b", "a.b")],
)
def test_a_variable_is_a_place_in_the_task_or_a_text(path: str, value: str) -> None:
    assert value_at({"q": ["é", 2]}, path) == value
