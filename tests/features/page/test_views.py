"""What the page's views draw over a proxy, in node: no browser is needed. tests/long/test_page.py looks at the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lightning_proxy.core.records import Limits
from lightning_proxy.features.page.proxy import FILES
from lightning_proxy.store.training import CallCredit
from support.rewarded import record, train
from support.views import (
    HERE,
    HOSTILE,
    VIEWS,
    byte_tokenizer,
    drawn,
    in_node,
    learned,
    needs_node,
    say_everything,
    unpacked,
)

pytestmark = needs_node
Running = Callable[..., AbstractAsyncContextManager[Any]]
# What a view of text may be made of, and what may be set on it.
INERT = {
    "a", "article", "b", "button", "code", "dd", "div", "dl", "dt", "footer", "form", "h1", "h2", "h3", "header", "i",
    "input", "kbd", "label", "li", "main", "ol", "option", "p", "path", "pre", "section", "select", "small", "span",
    "svg", "table", "tbody", "td", "th", "thead", "time", "tr", "ul",
}  # fmt: skip


async def test_each_view_shows_what_it_is_for_and_is_in_the_list_once_it_has_something(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system:
        found = dict(zip(VIEWS, await drawn(system, tmp_path, *VIEWS), strict=True))
        others = VIEWS.keys() - {"rollouts", "rollouts/run-004-2-1", "versions?a=0&b=5", "rate"}
        assert [view for view in others if "lightning-proxy" not in found[view]["text"]] == [], "a command that helps"
        assert f"OPENAI_BASE_URL={system.url}/v1" in found["rollouts"]["text"]
        assert found["overview"]["views"] == ["overview", "rollouts"]
    async with learned(running, tmp_path) as system:
        found = dict(zip(VIEWS, await drawn(system, tmp_path, *VIEWS), strict=True))
        assert [view for view, words in VIEWS.items() if words not in found[view]["text"]] == []
        listed = {re.split(r"[/?]", view)[0] for view in VIEWS} - {"prompts"}  # there is none
        assert set(found["overview"]["views"]) == listed


async def test_nothing_that_an_agent_or_a_model_says_is_more_than_text(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await say_everything(system)
        views = ("overview", "rollouts", "tasks", "rollouts/javascript:hurt", ("rollouts/javascript:hurt", "JSON"))
        found = await drawn(system, tmp_path, *views, "%E0%A4%A", "rollouts/%00", "__proto__", "versions?a=x&b=y")
        for one in found:
            assert set(one["tags"]) <= INERT
            assert not [name for name in one["attributes"] if name.startswith("on")]
            assert not [to for to in one["links"] if not to.startswith("#/")]
        assert all(text[:900] in found[3]["text"] for text in HOSTILE if text.isascii() and text.isprintable())


async def test_a_rollout_is_shown_with_its_contexts_and_credit(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await record_contexts(system)
        (shown,) = await drawn(system, tmp_path, "rollouts/r1")
        lanes = (
            "0 lead new, rejected", "1 lead retries 0, advantage +0.5", "2 helper delegates 1, advantage −0.25",
            "3 lead continues 1, returns 2, advantage +0.5", "4 lead continues 3", "5 lead compacts 4, advantage +0.5",
        )  # fmt: skip
        assert [lane for lane in lanes if lane not in shown["text"]] == []
        assert shown["boxes"] == ["box out", "box up", "box down", "box up", "box out", "box up"]
        assert shown["text"].count("calls ask") == 1, "what the call before has shown is not shown again"
        for words in ("left out: a summary", "left out: another attempt was used", "begins the rollout's first row"):
            assert words in shown["text"]


async def record_contexts(system: Any) -> None:
    """A rollout with a rejected first answer, a sub-agent, and a summary that a step leaves out."""

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    order = "Read the appendix and say what is in it."
    ask = {
        "id": f"call_{1:024x}",
        "type": "function",
        "function": {"name": "ask", "arguments": json.dumps({"order": order})},
    }
    calls = {"role": "assistant", "content": None, "tool_calls": [ask]}
    report, summary = said("The appendix says that the parser was moved."), said("So far: the parser was moved away.")
    task = [{"role": "system", "content": "You lead."}, {"role": "user", "content": "Find why the build fails."}]
    result = {"role": "tool", "tool_call_id": ask["id"], "content": report["content"]}
    known = [*task, calls, result, said("The parser is missing, it seems to me now.")]
    turns = [
        ("lead", task, said("The compiler is too old, I would say.")),
        ("lead", task, calls),
        ("helper", [{"role": "system", "content": "You help."}, {"role": "user", "content": order}], report),
        ("lead", known[:-1], known[-1]),
        ("lead", [*known, {"role": "user", "content": "Sum up."}], summary),
        ("lead", [*task, {"role": "user", "content": summary["content"]}], said("Include it from its new place.")),
    ]
    for agent, messages, answer in turns:
        system.vllm.answer = lambda _, answer=answer: answer
        body = {"model": "policy", "messages": messages}
        assert (await system.call("POST", "/rollouts/r1/v1/chat/completions", body, X_Agent_Name=agent))[0] == 200
    await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 1.0})
    placed = [(1, 0.5, 0, "first"), (2, -0.25, 1, "new"), (3, 0.5, 0, "merged"), (5, 0.5, 2, "new")]
    credit = [CallCredit("r1", seq, 1.0, advantage, row, why) for seq, advantage, row, why in placed]
    async with system.store() as store:
        await store.steps.claim(["r1"], 0, credit=credit)


async def test_a_call_shows_what_is_new_in_it_and_its_tokens_as_text(running: Running, tmp_path: Path) -> None:
    ids_of = byte_tokenizer(tmp_path)
    async with running(tmp_path, policy={"model": str(tmp_path)}) as system, system.store() as store:
        await record(store, "good", ["<img src=x>\u202e€\x00", "b"], 1.0, ids_of)
        await record(store, "bad", ["c"], 0.0, ids_of)
        await train(store)
        (shown,) = await drawn(system, tmp_path, ("rollouts/good", "tokens"))
        assert "<img src=x>⋮⋮\\u202e⋮⋮€\\u0000" in shown["text"]
        turns = [{"role": "user", "content": "one"}]
        for turn in ("two", "three"):
            _, answer = await system.call(
                "POST", "/rollouts/r/v1/chat/completions", {"model": "policy", "messages": turns}
            )
            turns += [answer["choices"][0]["message"], {"role": "user", "content": turn}]
        await system.call("POST", "/rollouts/r/v1/chat/completions", {"model": "policy", "messages": turns})
        short, whole = await drawn(system, tmp_path, "rollouts/r", ("rollouts/r", "show each request whole"))
        assert [short["text"].count(f"user{words}") for words in ("one", "two", "three")] == [1, 1, 1]
        assert short["text"].count("show 1 earlier message") == 2 and "show 4 earlier messages" in whole["text"]


async def test_the_overview_and_the_versions_say_each_number_and_of_what(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for reward in (0.0, 1.0):
            await system.chat(f"r{reward:g}", X_Task_Id="t1")
            await system.call("POST", "/reward", {"rollout_id": f"r{reward:g}", "reward": reward})
        step = await store.steps.claim([], 0)
        rewards = {"reward_mean": 0.9, "reward_std": 0.3, "reward_min": 0.0, "reward_max": 1.0, "merge_rate": 0.5}
        await store.steps.trained(step, None, {"version": 1, **rewards})
        await store.versions.set_live(await store.versions.new("merged", step, {}), step)
        overview, versions, tasks = await drawn(system, tmp_path, "overview", "versions", "tasks")
        for words in ("last reward0.9± 0.3", "verifiednot verified yet", "waiting for the trainer2 of 64 rollouts"):
            assert words in overview["text"]
        assert "mean 0.9 (0.6 to 1)" in overview["text"], "the band ends where rewards end"
        assert "00.20.40.60.81" in overview["text"], "the axis begins at 0"
        assert "not verified yet" in versions["text"] and "in between" in tasks["text"]


async def test_a_team_is_shown_no_number_that_it_is_not_given_and_offered_nothing_that_it_may_not(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path, publish="lora", api_keys=["agent"]) as system, system.store() as store:
        team, _ = await store.keys.create("team", "agent", Limits(), recording=True, scope="own")
        await store.steps.trained(await store.steps.claim([], 0), None, {"reward_mean": 0.5, "entropy": 2.0})
        await system.candidate(store, tmp_path)
        for key, sees_all in (("agent", True), (team, False)):
            overview, versions = await drawn(system, tmp_path, "overview", "versions", key=key)
            assert "training rollouts" in overview["text"] and "candidate" in versions["text"]
            assert ("last reward" in overview["text"]) == sees_all
            assert ("Promote…" in versions["buttons"]) == sees_all
        _, (opened,) = await system.call("POST", "/rollouts", {"task_id": "t1"}, Authorization="Bearer agent")
        own = opened["rollout_id"]
        views = ("overview", "rollouts", "tasks", "versions", f"rollouts/{own}")
        *_, rollout = shown = await drawn(system, tmp_path, *views, key=opened["api_key"])
        assert "this key is for rollout" in shown[0]["text"] and own in rollout["text"]


async def test_the_test_of_a_version_is_shown_as_its_evidence_grows(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.features.promotion.gate.LOOK_S", 0.05)
    policy = {"promotion": "gated", "gate": {"metrics": {"reward": 0.1, "answer_tokens": 0.2}}}
    async with running(tmp_path, publish="lora", policy=policy, trainer={"group_size": 4}) as system:
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        for rollout, task in ((f"t{task}-{i}", f"t{task}") for task in range(12) for i in range(4)):
            if rollout == "t2-0":
                (under_way,) = await drawn(system, tmp_path, "versions")
            await system.chat(rollout, X_Task_Id=task)
            _, detail = await system.call("GET", f"/rollouts/{rollout}")
            reward = float(detail["calls"][0]["policy_version"] != version)
            await system.call("POST", "/reward", {"rollout_id": rollout, "reward": reward})
        for words in (f"Version {version} is tested against 0", "−1", "answer_tokens", "undecided"):
            assert words in under_way["text"]
        (decided,) = await drawn(system, tmp_path, "versions")
        assert "rejected" in decided["text"] and "is tested against" not in decided["text"]


READ = """
import { json } from "node:stream/consumers";
globalThis.document = { addEventListener() {} };
const { requestMessages, answerMessages } = await import(`${process.argv[2]}/messages.mjs`);
const told = ({ role, blocks }) => blocks.map(({ kind, content }) => `${role} ${kind} ${content}`);
const read = ([asked, answer]) => [...requestMessages(asked), ...answerMessages(answer)].flatMap(told);
console.log(JSON.stringify((await json(process.stdin)).map(read)));
"""
TOOL = {"name": "add", "arguments": '{"a": 1}'}
CALL = 'assistant call {\n  "a": 1\n}'
SHOWN: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "chat": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}]},
        {"choices": [{"message": {"role": "assistant", "content": "two", "tool_calls": [{"function": TOOL}]}}]},
        ["user text one", "assistant text two", CALL],
    ),
    "completions": ({"prompt": "one"}, {"choices": [{"text": "two"}]}, ["prompt text one", "assistant text two"]),
    "responses": (
        {"instructions": "be short", "input": [{"type": "function_call_output", "call_id": "c", "output": "one"}]},
        {"output": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
                    {"type": "function_call", **TOOL}]},
        ["system text be short", "tool result one", "assistant thought hm", "assistant text two", CALL],
    ),
    "messages": (
        {"system": "be short", "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "one"}]}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "two"},
                                          {"type": "tool_use", "name": "add", "input": {"a": 1}}]},
        ["system text be short", "user result one", "assistant thought hm", "assistant text two", CALL],
    ),
    "an error": ({"messages": []}, {"error": {"message": "busy"}}, ["error error busy"]),
}  # fmt: skip


async def test_all_recorded_apis_are_read_as_messages_and_no_json_breaks_it(tmp_path: Path) -> None:
    (tmp_path / "read.mjs").write_text(READ)
    dice, names = Random(0), re.findall(r"\w+", (FILES / "messages.mjs").read_text())

    def some(depth: int) -> Any:
        if not depth or dice.random() < 0.2:
            return dice.choice([None, True, 1.5, dice.choice(names)])
        if dice.random() < 0.3:
            return [some(depth - 1) for _ in range(2)]
        return {dice.choice(names): some(depth - 1) for _ in range(4)}

    pairs = [(request, response) for request, response, _ in SHOWN.values()]
    odd = [(some(3), some(3)) for _ in range(2000)]
    found = await in_node(tmp_path / "read.mjs", unpacked(tmp_path), said=[*pairs, *odd])
    assert found[: len(SHOWN)] == [shown for _, _, shown in SHOWN.values()]
    assert len(found) == len(SHOWN) + len(odd) and HERE.is_file()
