"""`lightning-proxy optimize`: a search by a scripted reflecting model, on a task where the prompt decides.

The agent asks for words. The played model repeats its system prompt. So a prompt earns what words it has.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.optimize.search import BudgetSpent, Reflection, between, lesson_of
from support.command_line import lightning
from support.judging import ScriptedJudge, judging

WORDS = "amber birch cedar delta ember frost grove hazel".split()  # noqa: SIM905
AGENT = """
import json, os, time, urllib.request
word = json.loads(os.environ["LIGHTNING_TASK"])["word"]
def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say " + word}]
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "policy", "messages": messages})
said = answer["choices"][0]["message"]["content"]
time.sleep(float(os.environ.get("PAUSE", "0")))
reward = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": float(word in said), "source": "env"}
post(os.environ["LIGHTNING_URL"] + "/reward", reward | {"comment": None if word in said else "missing: " + word})
"""


def reflect(_: str, text: str, shape: Any) -> str:
    """A model that adds the words that the feedback names to the prompt that it is shown."""
    missing = " ".join(dict.fromkeys(re.findall(r"missing: (\w+)", text)))
    if "<critique>" in text:
        prompt = text.split("<prompt>\n")[1].split("\n</prompt>")[0]
        return f"Here it is:\n<prompt>\n{prompt} {missing}\n</prompt>"
    if "<prompt>" in text:
        return f"It lacks words. missing: {missing.replace(' ', ' missing: ')}"
    # gepa's own question quotes the prompt and asks for it in a fence
    return f"```\n{text.split('```')[1].strip()} {missing}\n```"


@pytest.fixture
async def model(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedJudge]:
    monkeypatch.setenv("OPENAI_API_KEY", "the reflecting model's")
    async with judging(reflect) as model:
        yield model


@pytest.fixture
async def system(start: Any) -> AsyncIterator[Any]:
    async with start(prices={"openai/m": [1, 2]}) as system:
        system.vllm.answer = lambda body: {"role": "assistant", "content": body["messages"][0]["content"]}
        prompt = {"name": "writer", "text": "Be brief.", "match": {"role": "system"}}
        await system.post("/prompts", prompt)
        yield system


@pytest.fixture
def search(tmp_path: Path, model: ScriptedJudge) -> Any:
    """The arguments of a search with a method and more options."""
    agent, tasks = tmp_path / "agent.py", tmp_path / "tasks.jsonl"
    agent.write_text(AGENT)
    lines = [{"word": word, "n": n} for n in range(3) for word in WORDS][:22]  # 9 lessons: gepa pads its batches
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = (
        f"--prompt writer --tasks {tasks} --reflect openai/m --reflect-url {model.url}/v1 --budget 60 --concurrency 4"
    )
    program = ("--", sys.executable, str(agent))
    return lambda method, *more: ["optimize", "--method", method, *given.split(), *more, *program]


@pytest.mark.parametrize("method", [pytest.param("apo", marks=pytest.mark.long), "gepa"])
async def test_a_better_prompt_is_found(system: Any, method: str, model: ScriptedJudge, search: Any) -> None:
    done = await system.lightning(*search(method, "--json"))
    assert done.returncode == 0, done.stderr
    found = done.json
    assert found["mean_before"] == found["before"] == 0 and found["mean_after"] > 0.3
    assert found["held_out"]["difference"] == found["after"] > 0
    asked = len(model.asked)
    assert (found["reflect_tokens"], found["reflect_usd"]) == (110 * asked, pytest.approx(asked * 120e-6))
    assert 0 < found["rollouts"] <= 60 and found["version"] > 1
    prompt = await system.get("/prompts/writer")
    best = prompt["versions"][found["version"] - 1]
    assert best["metrics"]["held_out"] == found["after"] and best["parent" if method == "apo" else "comment"]
    assert prompt["live_version"] == 1
    tried = await system.get(f"/prompts/writer/rollouts?run={found['run']}")
    assert sum(not one["held_out"] for one in tried["data"]) == found["rollouts"]
    runs = Counter((one["mode"], one["version"], one["task_id"]) for one in tried["data"])
    assert {mode for mode, _, _ in runs} == {"eval"} and max(runs.values()) == 1

    again = await system.lightning(*search(method, "--promote"))
    assert "held-out tasks: 0.000 before" in again.stderr and f"version {best['version']} is live" in again.stderr
    assert len(model.asked) == asked  # all is known: nothing runs twice
    assert await system.get(f"/prompts/writer/rollouts?run={found['run']}") == tried


@pytest.mark.long
@pytest.mark.parametrize("method", ["apo", "gepa"])
async def test_a_search_that_was_killed_goes_on(
    system: Any, tmp_path: Path, method: str, model: ScriptedJudge, search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await system.lightning("status")  # writes the configuration
    command = [sys.executable, "-m", "lightning_proxy", "--config", str(tmp_path / "system.yaml"), *search(method)]
    monkeypatch.setenv("PAUSE", "0.1")
    killed = await asyncio.create_subprocess_exec(*command)
    while len(model.asked) < 3:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    killed.send_signal(signal.SIGKILL)
    await killed.wait()
    monkeypatch.setenv("PAUSE", "0")
    done = await system.lightning(*search(method, "--json"))
    assert done.returncode == 0, done.stderr
    found = done.json
    assert re.search(rf"run {found['run']} resumes: \d+ of 60 rollouts are done", done.stderr)
    tried = await system.get(f"/prompts/writer/rollouts?run={found['run']}")
    kept = [(one["version"], one["task_id"]) for one in tried["data"] if one["status"] != "discarded"]
    assert max(Counter(kept).values()) == 1  # no finished score was asked for again
    assert found["rollouts"] <= 60 and found["mean_after"] > found["mean_before"] == 0
    asked = Counter(str(one["messages"]) for one in model.asked)
    assert max(asked.values()) <= 2  # what was under way at the kill, at most


async def test_what_is_wrong_ends_the_command_with_one_line(
    system: Any, tmp_path: Path, model: ScriptedJudge, search: Any
) -> None:
    few, one = tmp_path / "few.jsonl", tmp_path / "one.jsonl"
    few.write_text("".join(f'{{"word": "{word}"}}\n' for word in WORDS[:5]))
    one.write_text('{"word": "a"}\n')
    model.status = 401
    done = await system.lightning(*search("gepa", "--tasks", str(few)))
    assert done.returncode == 1 and "openai/m did not answer" in done.stderr and "Traceback" not in done.stderr
    for more, code, said in (
        (["--prompt", "nobody"], 1, "no prompt 'nobody'"),
        (["--tasks", str(one)], 2, "too few tasks"),
        (["--budget", "2"], 2, "is too small: the validation tasks take"),
    ):  # which ask no model, and so leave nothing behind in this process
        done = await asyncio.to_thread(lightning, "--config", tmp_path / "system.yaml", *search("apo", *more))
        assert done.returncode == code and said in done.stderr


async def test_the_reflecting_model_is_asked_within_its_budget(tmp_path: Path) -> None:
    class Asked(Reflection):
        async def _complete(self, text: str) -> dict[str, Any]:
            return {"answer": "said", "usage": None}

    for _ in range(2):  # also when the answers are in the file
        model = Asked("m", None, tmp_path / "said.jsonl", most=3)
        assert [await model.ask("q") for _ in range(3)] == ["said"] * 3
        with pytest.raises(BudgetSpent):
            await model.ask("q")


def test_a_lesson_says_what_was_asked_done_and_wrong_and_the_editors_prompt_stands_between_tags() -> None:
    asked = {"name": "search", "arguments": '{"q": 1}'}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": asked}]}
    call = {
        "call_id": "c1", "endpoint": "chat/completions", "status": "ok", "error": None,
        "tool_calls": [asked | {"id": "1", "result": "no such column", "is_error": True}],
        "request": {"messages": [{"role": "user", "content": "how many?"}]},
        "response": {"choices": [{"message": said}]},
    }  # fmt: skip
    older = {"comment": "very good", "source": None, "name": "reward", "call_id": None}
    rewards = [older, older | {"comment": "wrong column", "source": "judge"}]
    rollout = {"calls": [call], "reward": 0.0, "rewards": rewards, "status": "failed", "reason": "exit code 1"}
    found = lesson_of(rollout)
    assert (found["Inputs"], found["Generated Outputs"]) == ("how many?", 'calls search({"q":1})')
    assert found["Feedback"].splitlines() == [
        "reward: 0.0", "judge says: wrong column", "the tool search failed: no such column",
        "the agent failed: exit code 1",
    ]  # fmt: skip
    silent = rollout | {"rewards": [*rewards, older | {"comment": None}]}
    assert "says" not in lesson_of(silent)["Feedback"], "corrected without words"
    answers = ("x <prompt>\nnew\n</prompt> y", "new", "<prompt></prompt>")
    assert [*map(between, answers)] == ["new", None, None]
