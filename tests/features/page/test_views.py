"""What the page's views draw over a proxy, in node: no browser is needed. tests/long/test_page.py looks at the rest."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest

from lightning_proxy.core.records import Limits
from lightning_proxy.features.page import proxy as page
from lightning_proxy.features.page.proxy import FILES
from lightning_proxy.store.training import CallCredit
from support.rewarded import record, train
from support.views import HOSTILE, VIEWS, byte_tokenizer, drawn, in_node, learned, say_everything, unpacked

# What a view of text may be made of, and what may be set on it.
INERT = {
    "a", "article", "b", "button", "code", "dd", "div", "dl", "dt", "footer", "form", "h1", "h2", "h3", "header", "i",
    "input", "kbd", "label", "li", "main", "ol", "option", "p", "path", "pre", "section", "select", "small", "span",
    "svg", "table", "tbody", "td", "th", "thead", "time", "tr", "ul",
}  # fmt: skip


async def test_each_view_shows_what_it_is_for_and_is_in_the_list_once_it_has_something(
    start: Any, tmp_path: Path
) -> None:
    async with start() as system:
        found = dict(zip(VIEWS, await drawn(system, tmp_path, *VIEWS), strict=True))
        others = VIEWS.keys() - {"rollouts", "rollouts/multiply-4-1", "versions?a=0&b=5", "rate"}
        assert [view for view in others if "lightning-proxy" not in found[view]["text"]] == [], "a command that helps"
        assert f"OPENAI_BASE_URL={system.url}/v1" in found["rollouts"]["text"]
        assert found["overview"]["views"] == ["overview", "rollouts"]
    async with learned(start) as system:
        found = dict(zip(VIEWS, await drawn(system, tmp_path, *VIEWS), strict=True))
        assert [view for view, words in VIEWS.items() if words not in found[view]["text"]] == []
        listed = {re.split(r"[/?]", view)[0] for view in VIEWS} - {"prompts"}  # there is none
        assert set(found["overview"]["views"]) == listed


async def test_nothing_that_an_agent_or_a_model_says_is_more_than_text(start: Any, tmp_path: Path) -> None:
    async with start() as system:
        await say_everything(system)
        views = ("overview", "rollouts", "tasks", "rollouts/javascript:hurt", ("rollouts/javascript:hurt", "JSON"))
        found = await drawn(system, tmp_path, *views, "%E0%A4%A", "rollouts/%00", "__proto__", "versions?a=x&b=y")
        for one in found:
            assert set(one["tags"]) <= INERT
            assert not [name for name in one["attributes"] if name.startswith("on")]
            assert not [to for to in one["links"] if not to.startswith("#/")]
        assert all(text[:900] in found[3]["text"] for text in HOSTILE if text.isascii() and text.isprintable())


async def test_a_rollout_is_shown_with_its_contexts_and_credit(start: Any, tmp_path: Path) -> None:
    """Its first answer is rejected, another agent helps."""
    said = [{"role": "assistant", "content": f"This is answer {i}, which is long enough."} for i in range(4)]
    task = [{"role": "system", "content": "You lead."}, {"role": "user", "content": "Find why the build fails."}]
    help_ = [{"role": "user", "content": "Read the appendix."}]
    async with start() as system:
        for i, messages in enumerate((task, task, help_, [*task, said[1], *help_])):
            system.vllm.answer = lambda _, i=i: said[i]
            path = f"/rollouts/r1/agents/{'helper' if messages is help_ else 'lead'}/v1/chat/completions"
            await system.post(path, {"model": "policy", "messages": messages})
        await system.post("/reward", {"rollout_id": "r1", "reward": 1.0})
        placed = [(1, 0.5, 0, "first"), (2, -0.25, 1, "new"), (3, 0.5, 0, "merged")]
        async with system.store() as store:
            await store.steps.claim(["r1"], 0, credit=[CallCredit("r1", seq, 1.0, *rest) for seq, *rest in placed])
        (shown,) = await drawn(system, tmp_path, "rollouts/r1")
    for words in (
        "0 lead new, rejected", "1 lead retries 0, advantage +0.5", "2 helper new, advantage −0.25",
        "3 lead continues 1, advantage +0.5", "left out: another attempt was used", "begins the rollout's first row",
    ):  # fmt: skip
        assert words in shown["text"]
    assert shown["boxes"] == ["box out", "box up", "box down", "box up"]
    assert shown["text"].count("Find why") == 1, "what the call before has shown is not shown again"


async def test_a_call_shows_what_is_new_in_it_and_its_tokens_as_text(start: Any, tmp_path: Path) -> None:
    ids_of = byte_tokenizer(tmp_path)
    async with start(policy={"model": str(tmp_path)}) as system, system.store() as store:
        await record(store, "good", ["<img src=x>\u202e€\x00", "b"], 1.0, ids_of)
        await record(store, "bad", ["c"], 0.0, ids_of)
        await train(store)
        (shown,) = await drawn(system, tmp_path, ("rollouts/good", "tokens"))
        assert "<img src=x>⋮⋮\\u202e⋮⋮€\\u0000" in shown["text"]
        said = {"role": "assistant", "content": "yes"}
        system.vllm.answer = lambda _: said
        one, two, three = ({"role": "user", "content": text} for text in ("one", "two", "three"))
        for messages in ([one], [one, said, two], [one, said, two, said, three]):
            await system.post("/rollouts/r/v1/chat/completions", {"model": "policy", "messages": messages})
        short, whole = await drawn(system, tmp_path, "rollouts/r", ("rollouts/r", "show each request whole"))
        assert [short["text"].count(f"user{words}") for words in ("one", "two", "three")] == [1, 1, 1]
        assert short["text"].count("show 1 earlier message") == 2 and "show 4 earlier messages" in whole["text"]


async def test_a_team_is_shown_no_number_that_it_is_not_given_and_offered_nothing_that_it_may_not(
    start: Any, tmp_path: Path
) -> None:
    async with start(publish="lora", api_keys=["agent"]) as system, system.store() as store:
        team, _ = await store.keys.create("team", "agent", Limits(), recording=True, scope="own")
        rewards = {"reward_mean": 0.9, "reward_std": 0.3, "reward_max": 1.0}
        await store.steps.trained(await store.steps.claim([], 0), None, rewards)
        await system.candidate(store, tmp_path)
        for key, sees_all in (("agent", True), (team, False)):
            overview, versions = await drawn(system, tmp_path, "overview", "versions", key=key)
            assert "training rollouts" in overview["text"] and "candidate" in versions["text"]
            shown = ("last reward0.9± 0.3" in overview["text"], "Promote…" in versions["buttons"])
            assert shown == (sees_all, sees_all)
            assert ("mean 0.9 (0.6 to 1)" in overview["text"]) == sees_all, "the band ends where rewards end"


# Tokens as texts, by the files of the policy's model, or not at all.


async def tokens(system: Any, query: str = "") -> Any:
    return (await system.get(f"/rollouts/good/tokens{query}"))["data"]


async def test_answers_say_text_log_probability_and_advantage(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, ids_of, add_texts = set[Thread](), byte_tokenizer(tmp_path), page._add_texts
    monkeypatch.setattr(page, "_add_texts", lambda *given: (threads.add(current_thread()), add_texts(*given)))
    async with start(policy={"model": str(tmp_path)}) as system, system.store() as store:
        await record(store, "good", ["a €", "b"], 1.0, ids_of)
        await record(store, "bad", ["c"], 0.0, ids_of)
        answer = {"call_id": "good-0", "seq": 0, "step": None, "advantage": None, "token_ids": ids_of("a €"),
                  "logprobs": [-0.5] * 5, "texts": ["a", " ", None, None, "€"]}  # fmt: skip
        assert (await tokens(system))[0] == answer
        step = await train(store)
        first, second = await tokens(system)
        assert first == answer | {"step": step, "advantage": 0.5}
        assert await tokens(system, "?call_id=good-1") == [second]
        assert (await system.call("GET", "/rollouts/good/tokens?call_id=x"))[0] == 404
        assert threads and main_thread() not in threads, "no call waits while texts are found"


@pytest.mark.parametrize("policy", [{}, {"model": "none/such"}])
async def test_without_a_tokenizer_ids_are_shown(start: Any, policy: Any) -> None:
    async with start(policy=policy) as system, system.store() as store:
        await record(store, "good", ["ab"], 1.0)
        (run,) = await tokens(system)
        assert (run["texts"], run["token_ids"]) == (None, [97, 98])


# Recorded messages.

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
SHOWN: Any = {
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
    assert len(found) == len(SHOWN) + len(odd)
