"""CONTRACT.md: what was learned from, as every route, list, export and command shows it; versions are compared."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from contract.model import VOCABULARY, ModelVllm, learning, play
from contract.system import Done, Json, Process, Proxy, in_this_process, ok, wait_until
from support.paths import has

WEIGHTS = {"reward": 1.0, "style": 0.5}
TRAINER: Json = {
    "group_size": 4, "tasks_per_step": 1, "baseline": "dr_grpo", "learning_rate": 0.05, "report_to": [],
    "dtype": "float32", "threads": 1, "reward_weights": WEIGHTS,
}  # fmt: skip
# The rollouts of task t, which step 1 was trained on, and what they earned: two by rewards of their calls alone.
EARNED = {"high": 1.25, "low": 0.25, "own": 0.5, "zero": 0.0}
# Further rewarded rollouts, by task, mode and the version that they began with.
OTHERS: dict[tuple[str, str, int], list[float]] = {
    ("same", "train", 0): [1.0] * 4, ("u1", "train", 0): [0.0, 1.0], ("u1", "train", 1): [1.0],
    ("u2", "train", 0): [0.25], ("u2", "train", 1): [0.5, 1.0], ("u3", "train", 0): [1.0],
    ("held", "eval", 0): [0.0], ("held", "eval", 1): [1.0],
}  # fmt: skip
TASKS: list[Json] = [{"x": 0}, {"x": 1}, {"x": 2}, {"x": 3}]
# Version 1 does all tasks, the base model every other one.
AGENT = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return answer.headers

task = json.loads(os.environ["LIGHTNING_TASK"])
body = {"model": task.get("asks_for", "policy"), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
version = int(post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["X-Policy-Version"] or -1)
if task.get("fails"):
    sys.exit("gave up")
reward = 1.0 if version == 1 else task["x"] % 2
if not task.get("silent"):
    post(os.environ["LIGHTNING_URL"] + "/reward", {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": reward})
"""


def ask(proxy: Proxy, name: str, task: str, *said: str, mode: str = "train", record: str = "on", **fields: Any) -> str:
    """Say something in a rollout; what the model says, which is at odd places of a conversation."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"model": "policy", "messages": messages, "max_tokens": 2} | fields
    path = f"/rollouts/{name}/tasks/{task}/v1/chat/completions"
    answer = proxy.post(path, body, X_Rollout_Mode=mode, X_Recording=record)
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def play_earned(proxy: Proxy) -> None:
    """The rollouts of EARNED, each with two calls, of which the second goes on with the first."""
    calls: dict[str, list[str]] = {}
    for name in EARNED:
        ask(proxy, name, "t", "a", ask(proxy, name, "t", "a"), "b")
        calls[name] = [call["call_id"] for call in proxy.rollout(name)["calls"]]
    posts: list[tuple[str, int | None, str, float]] = [
        ("high", 0, "reward", 0.0), ("high", 0, "reward", 1.0),  # the newest counts
        ("high", 1, "style", 0.5), ("high", 1, "unknown", 9.0), ("low", 0, "reward", 0.25),
        ("own", 0, "reward", 7.0), ("own", None, "reward", 0.5), ("zero", None, "style", 0.0),
    ]  # fmt: skip
    for name, place, what, value in posts:
        call_id = None if place is None else calls[name][place]
        proxy.reward(name, value, name=what, call_id=call_id)
    for name in ("high", "low"):
        assert proxy.post(f"/rollouts/{name}/end", {"status": "completed"}).status == 200


def play_others(proxy: Proxy, version: int) -> None:
    for (task, mode, began_with), rewards in OTHERS.items():
        for i, reward in enumerate(rewards if began_with == version else []):
            name = f"{task}-{version}-{i}"
            ask(proxy, name, task, "c", mode=mode)
            proxy.reward(name, reward)


@pytest.fixture(scope="module")
def world(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with learning(tmp_path_factory.mktemp("world"), base, "merged", trainer=TRAINER) as proxy:
        play_earned(proxy)
        ask(proxy, "high", "t", "a", "w5", "b")
        ask(proxy, "high", "t", "d", record="only")
        play_others(proxy, 0)
        ok(proxy.run("train", "--once"))
        play_others(proxy, 1)
        yield proxy


def told(proxy: Proxy) -> list[tuple[str, Json]]:
    """The feed's events from the beginning, which end with the last rollout of OTHERS."""
    text = ""
    with proxy.client.stream("GET", f"{proxy.url}/feed?cursor=0") as got:
        for line in got.iter_lines():
            text += f"{line}\n"
            if re.search(r'^event: rollout\ndata: .*"held-1-0"', text, re.M):
                break
    return [(kind, json.loads(data)) for kind, data in re.findall(r"^event: (\w+)\ndata: (.+)", text, re.M)]


def of_export(proxy: Proxy, *options: str) -> list[Json]:
    out = proxy.directory / "rows.jsonl"
    ok(proxy.run("export", out, *options))
    return [json.loads(line) for line in out.read_text().splitlines()]


def by_id(rollouts: list[Json], field: str = "reward") -> dict[str, Any]:
    return {one["rollout_id"]: one[field] for one in rollouts}


def test_every_place_and_filter_has_the_return_that_is_trained(world: Proxy) -> None:
    group = world.get("/rollouts/high/rows")["group"]
    places = {
        "list": by_id(world.get("/rollouts")["data"]),
        "list of a step": by_id(world.get("/rollouts?step=1")["data"]),
        "rollout": by_id([world.rollout(name) for name in EARNED]),
        "siblings": by_id(group),
        "advantages": {name: advantage + 0.5 for name, advantage in by_id(group, "advantage").items()},
        "tasks": by_id(world.get("/tasks?task_id=t")["data"][0]["recent"]),
        "feed": by_id([data for kind, data in told(world) if kind == "rollout"]) if has("page") else EARNED,
        "export of transitions": by_id(of_export(world), "rollout_reward"),
        "export of sft rows": by_id(of_export(world, "--kind", "sft", "--min-reward=-9")),
        "rollouts list": by_id(world.run("rollouts", "list", "--json").json["data"]),
        "rollouts show": by_id([world.run("rollouts", "show", name, "--json").json for name in EARNED]),
    }
    for place, shown in places.items():
        assert {name: shown[name] for name in EARNED} == EARNED, place
    for bounds, names in {
        "min-reward=0.5": {"own", "high"}, "max-reward=0.25": {"zero", "low"},
        "min-reward=0.1&max-reward=0.6": {"low", "own"},
    }.items():  # fmt: skip
        query, options = bounds.replace("-", "_"), [f"--{bound}" for bound in bounds.split("&")]
        assert by_id(world.get(f"/rollouts?task_id=t&{query}")["data"]).keys() == names
        assert by_id(world.run("rollouts", "list", "--task", "t", *options, "--json").json["data"]).keys() == names
    assert by_id(of_export(world, "--task", "t", "--min-reward=0.5"), "rollout_reward").keys() == {"own", "high"}


def test_sums_and_parts_of_returns_are_the_same_everywhere(world: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = {name: [one["reward"] for one in world.get(f"/rollouts/{name}/transitions")["data"]] for name in EARNED}
    assert rewards == {"high": [1.0, 0.25, 0.0, 0.0], "low": [0.25, 0.0], "own": [7.0, 0.5], "zero": [0.0, 0.0]}
    high = world.rollout("high")
    assert ([call["reward"] for call in high["calls"]], high["own_reward"]) == ([1.0, 0.25, None, None], None)
    (task,) = world.get("/tasks?task_id=t")["data"]
    assert [task[field] for field in ("rollouts", "rewarded", "mean", "min", "max")] == [4, 4, 0.5, 0.0, 1.25]
    (step,) = world.get("/policy/steps")["data"]
    assert [step["metrics"][name] for name in ("reward_mean", "reward_max", "rollouts_trained")] == [0.5, 1.25, 4]
    assert step["metrics"]["reward_by_task"]["t"]["mean"] == 0.5
    base, first = world.get("/policy/versions")["data"]
    assert base["rewards"] == {"train": {"mean": 0.65, "rollouts": 12}, "eval": {"mean": 0.0, "rollouts": 1}}
    assert first["rewards"] == {"train": {"mean": 0.875, "rollouts": 3}, "eval": {"mean": 1.0, "rollouts": 1}}
    assert (first["parent"], first["step"], first["metrics"]["reward_mean"]) == (0, 1, 0.5)
    with_t = world.get("/policy/compare?a=0&b=0&mode=train")["data"]
    assert {"task_id": "t", "a": {"mean": 0.5, "rollouts": 4}, "b": {"mean": 0.5, "rollouts": 4}} in with_t
    metrics = world.call("GET", "/metrics").body.decode()
    assert 'lightning_step{metric="reward_mean"} 0.5\n' in metrics
    told = " ".join(world.run("doctor").stdout.split())
    assert "15 of the newest 15 ended training rollouts have a reward" in told
    if has("tune"):
        monkeypatch.setenv("LIGHTNING_TUNE__SFT__MIN_REWARD", "2")
        refused = world.run("train", "--method", "sft")
        assert refused.returncode != 0 and "have a reward (from 0 to 1.25)" in refused.stderr
    shown = world.run("rollouts", "show", "high").stdout
    assert "1.25, from its calls" in shown and "trained         by step 1" in shown


def test_steps_come_in_pages_in_brief_and_in_the_feed(world: Proxy) -> None:
    page = world.get("/policy/steps?limit=1&brief=true")
    (step,) = page["data"]
    assert (step["step"], step["status"], step["base"], step["version"]) == (1, "trained", 0, 1)
    assert step["metrics"]["reward_mean"] == 0.5 and "reward_by_task" not in step["metrics"]
    assert world.get(f"/policy/steps?cursor={page['next_cursor']}") == {"data": [], "next_cursor": None}
    if has("page"):
        events = told(world)
        assert ("step", {"step": 1, "status": "trained", "version": 1, "reward": 0.5}) in events
        assert [data["version"] for kind, data in events if kind == "version" and data["live"]] == [1]


def test_each_call_says_how_it_was_trained_and_why_it_opened_a_row(world: Proxy) -> None:
    ids = [call["call_id"] for call in world.rollout("high")["calls"]]
    found = world.get("/rollouts/high/rows")
    assert [found[field] for field in ("rollout_id", "task_id", "step", "dropped")] == ["high", "t", 1, None]
    told = [[call[field] for field in ("return", "advantage", "step", "row", "placed")] for call in found["calls"]]
    assert told == [[1.25, 0.75, 1, *e] for e in ((0, "first"), (0, "merged"), (1, "edited"), (None, "untrainable"))]
    assert found["rows"] == [
        {"row": 0, "call_ids": ids[:2], "tokens": 7, "trained_tokens": 4},
        {"row": 1, "call_ids": ids[2:3], "tokens": 6, "trained_tokens": 2},
    ]
    assert [call["call_id"] for call in found["calls"]] == ids
    dropped = world.get("/rollouts/same-0-0/rows")
    assert dropped["dropped"] == "all rewards of the group are equal" and dropped["rows"] == []
    alike = {"reward": 1.0, "advantage": None, "step": None, "dropped": dropped["dropped"]}
    assert dropped["group"] == [{"rollout_id": f"same-0-{i}"} | alike for i in range(4)]
    waiting = world.get("/rollouts/u1-0-1/rows")["group"]  # siblings before a step compares them
    assert [one["rollout_id"] for one in waiting] == ["u1-0-0", "u1-0-1", "u1-1-0"]


def test_calls_are_left_out_that_cannot_be_computed_again(base: Path, tmp_path: Path) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked: list[tuple[Json, str]] = [
        ({"response_format": {"type": "text"}}, "new"), ({"tools": tools}, "repeated"), ({"top_k": 1}, "untrainable"),
        ({"response_format": {"type": "json_object"}}, "not_followed"), ({"watermarking": True}, "not_followed"),
        ({"tools": tools, "tool_choice": "required"}, "not_followed"), ({"user": "beyond"}, "other_tokens"),
        ({"messages": [image]}, "not_followed"),
    ]  # fmt: skip

    class WithAnotherToken(ModelVllm):
        def _whole(self, body: Json) -> Json:
            answer = super()._whole(body)
            if body.get("user") == "beyond":
                answer["choices"][0]["token_ids"][-1] = VOCABULARY  # the first one beyond the model's
            return answer

    vllm = WithAnotherToken(base)
    vllm.refuses["/v1/chat/completions/render"] = 404  # where vLLM would say it
    policy = {"model": str(base), "publish": "merged"}
    with in_this_process(tmp_path, vllm, policy=policy, trainer=TRAINER) as proxy:
        play_earned(proxy)
        for fields, _ in asked:
            ask(proxy, "high", "t", "d", **fields)
        ok(proxy.run("train", "--once"))
        calls = proxy.get("/rollouts/high/rows")["calls"][2:]
        assert [call["placed"] for call in calls] == [placed for _, placed in asked]
        metrics = proxy.get("/policy/steps")["data"][0]["metrics"]
        counts = {"calls_untrainable": 1, "calls_not_followed": 4, "calls_other_tokens": 1, "merge_rate": 4 / 6}
        assert {name: metrics[name] for name in counts} == counts


def test_two_versions_are_compared_on_the_tasks_that_both_had(world: Proxy) -> None:
    held_out = world.get("/policy/compare?a=1&b=0")
    assert (held_out["mode"], held_out["difference"], held_out["interval"]) == ("eval", -1.0, [-1.0, -1.0])
    assert world.get("/policy/compare?a=0&b=1&mode=train") == {
        "a": 0, "b": 1, "mode": "train", "rollouts_a": 12, "rollouts_b": 3, "tasks": 2, "mean_a": 0.375,
        "mean_b": 0.875, "difference": 0.5, "interval": [0.5, 0.5],
        "data": [
            {"task_id": "u1", "a": {"mean": 0.5, "rollouts": 2}, "b": {"mean": 1.0, "rollouts": 1}},
            {"task_id": "u2", "a": {"mean": 0.25, "rollouts": 1}, "b": {"mean": 0.75, "rollouts": 2}},
        ],
    }  # fmt: skip
    with_costs = world.get("/policy/compare?a=0&b=1&mode=train&costs=true")["data"][0]["a"]
    assert with_costs["tokens"] == 2 and with_costs["latency_ms"] > 0
    missing = world.call("GET", "/policy/compare?a=0&b=9")
    assert (missing.status, missing.error["message"]) == (404, "no policy version 9")
    printed = world.run("policy", "compare", "1", "0", "--json").json
    assert (printed["mode"], printed["difference"]) == ("eval", -1.0)


def test_a_task_shows_its_rewards_over_time_and_tasks_are_sorted_and_filtered(world: Proxy) -> None:
    tasks = {task["task_id"]: task for task in world.get("/tasks")["data"]}
    recent = [(one["policy_version"], one["reward"]) for one in tasks["u2"]["recent"]]
    assert recent == [(0, 0.25), (1, 0.5), (1, 1.0)]
    assert [one["mode"] for one in tasks["held"]["recent"]] == ["eval", "eval"]
    assert {tasks[name]["solved"] for name in tasks} == {"sometimes"}, "the best of all is 1.25"
    for wrong in ("/tasks?cursor=-1", "/tasks?cursor=x", "/policy/steps?cursor=x"):
        assert world.call("GET", wrong).status == 400
    for query, names in {
        "": "held u2 u1 u3 same t", "sort=mean": "u3 same u1 u2 held t", "sort=spread": "held u1 t u2 u3 same",
        "sort=rollouts&mode=train": "same t u2 u1 u3", "mode=eval": "held", "task_id=u1": "u1", "task_id=nothing": "",
    }.items():  # fmt: skip
        assert " ".join(task["task_id"] for task in world.get(f"/tasks?{query}")["data"]) == names
        seen, cursor = [], ""
        while cursor is not None:
            page = world.get(f"/tasks?limit=2&{query}{cursor and '&cursor=' + cursor}")
            seen += [task["task_id"] for task in page["data"]]
            cursor = page["next_cursor"]
        assert " ".join(seen) == names


def test_status_counts_rollouts_what_waits_and_what_is_not_trained_on(world: Proxy) -> None:
    status = world.get("/status")
    train, held_out = status["rollouts"]["train"], status["rollouts"]["eval"]
    assert (train["completed"], train["running"], held_out["completed"]) == (15, 0, 2)
    assert [status[field] for field in ("waiting", "per_step", "unrewarded")] == [7, 4, 0]
    assert status["dropped"] == {"all rewards of the group are equal": 4}
    assert status["untrainable"] == {"the agent sent X-Recording: only": 1}
    assert status["verified"]["version"] == 1 and status["verified"]["verified"]
    assert status["verified"]["story"].endswith("standard deviations from the old")
    assert status["recent"]["by_status"]["ok"] == status["recent"]["calls"] >= 23
    printed = " ".join(world.run("status").stdout.split())
    assert "7 complete rollouts wait; it takes 1 groups of 4" in printed
    assert "all rewards of the group are equal (4)" in printed and "X-Recording: only (1)" in printed


@pytest.mark.sqlite
def test_a_version_of_another_kind_is_not_answered_and_not_ready(world: Proxy, tmp_path: Path) -> None:
    ok(world.run("store", "backup", tmp_path / "store.db"))
    with in_this_process(tmp_path, policy={"publish": "lora"}) as proxy:
        wait_until(lambda: proxy.call("GET", "/readyz").status == 503, 30, "it knows the server")
        assert "published as merged, and policy.publish is now lora" in proxy.call("GET", "/readyz").json["upstream"]
        assert proxy.chat("other").status == 503
        assert proxy.post("/policy/promote", {"version": 0}).status == 200
        wait_until(lambda: proxy.call("GET", "/readyz").status == 200, 30, "the base model is served in both ways")
        assert proxy.chat("other").status == 200


def test_other_weights_at_the_next_start_count_for_what_was_recorded_before(tmp_path: Path) -> None:
    with in_this_process(tmp_path, trainer={"reward_weights": WEIGHTS}) as proxy:
        play_earned(proxy)
        assert by_id(proxy.get("/rollouts")["data"]) == EARNED
    with in_this_process(tmp_path, trainer={"reward_weights": {"unknown": 2.0}}) as proxy:
        others = {"high": 18.0, "low": None, "own": None, "zero": None}
        wait_until(lambda: by_id(proxy.get("/rollouts")["data"]) == others, 30, "the new weights count")


class Evaluation:
    def __init__(self, proxy: Proxy, directory: Path, *tasks: Json) -> None:
        self.proxy, self.directory, self.out = proxy, directory, directory / "results.json"
        (directory / "agent.py").write_text(AGENT)
        lines = [json.dumps({"task_id": f"{directory.name[-20:]}-{i}"} | task) for i, task in enumerate(tasks)]
        (directory / "tasks.jsonl").write_text("\n".join(lines))

    def arguments(self, models: str, *options: str) -> list[str]:
        files = ["--tasks", str(self.directory / "tasks.jsonl"), "--out", str(self.out)]
        return [*files, "--models", models, *options, "--", sys.executable, str(self.directory / "agent.py")]

    def run(self, models: str, *options: str) -> Done:
        return self.proxy.run("eval", *self.arguments(models, *options))

    def rows(self) -> dict[str, Any]:
        return {row["model"]: row for row in json.loads(self.out.read_text())["rows"]}

    def rollouts(self) -> list[Json]:
        listed = self.proxy.get("/rollouts?limit=1000&mode=eval")["data"]
        return [one for one in listed if one["task_id"].startswith(self.directory.name[-20:])]


def trained(publish: str, base: Path, directories: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy with a trained version 1, which is live."""
    with learning(directories.mktemp(publish), base, publish) as proxy:
        play(proxy, "trained")
        ok(proxy.run("train", "--once"))
        yield proxy


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    yield from trained("lora", base, tmp_path_factory)


@pytest.fixture(scope="module")
def merged(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    yield from trained("merged", base, tmp_path_factory)


def test_versions_are_compared_on_held_out_tasks(lora: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(lora, tmp_path, *TASKS)
    ok(held_out.run("0,live", "--samples", "2"))
    found = json.loads(held_out.out.read_text())
    assert (found["complete"], found["samples"]) == (True, 2)
    base, live = held_out.rows().values()
    assert (base["mean_reward"], live["mean_reward"]) == (0.5, 1.0)
    assert (base["policy_versions"], live["policy_versions"]) == ([0], [1])
    assert (base["pass_at_k"]["2"]["value"], live["pass_at_k"]["1"]["value"]) == (0.5, 1.0)
    versus = live["versus"]
    assert (versus["model"], versus["difference"], versus["tasks"], versus["p"]) == ("0", 0.5, 4, 0.5)
    assert len(held_out.rollouts()) == 2 * 4 * 2 and lora.get("/policy")["live_version"] == 1
    shown = ok(held_out.run("0,1")).stdout
    assert re.search(r"^0 +0\.500 ", shown, re.M) and re.search(r"^1 +\+0\.500 ", shown, re.M) and "\x1b" not in shown
    (tmp_path / "odd").mkdir()
    odd = Evaluation(lora, tmp_path / "odd", {"x": 1}, {"x": 1, "fails": True}, {"x": 1, "silent": True}, {"x": 1})
    ok(odd.run("1"))
    row = odd.rows()["1"]
    assert (row["failed"], row["without_reward"], row["mean_reward"]) == (1, 2, 0.5), "those count as 0"


def test_what_cannot_answer_and_an_agent_that_asks_for_another_model_are_said(lora: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(lora, tmp_path, *TASKS)
    for models, why in {
        "live,7": "no policy version 7",
        "live,nobody": "no upstream serves the model 'nobody'",
        "0,base": "each once",
        "live,": "each once",
    }.items():
        done = held_out.run(models)
        assert done.returncode in (1, 2) and why in done.stderr and held_out.rollouts() == []
    (tmp_path / "named").mkdir()
    named = Evaluation(lora, tmp_path / "named", {"x": 1}, {"x": 1, "asks_for": "base"})
    done = named.run("1", "--concurrency", "1")
    assert done.returncode == 1 and "was answered by version 0" in done.stderr and not named.rows()["1"]["complete"]


@torch.no_grad()
def logits(directory: Path, base: Path) -> Any:
    if (directory / "adapter_config.json").exists():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
    else:
        assert AutoTokenizer.from_pretrained(directory).get_vocab()
        model = AutoModelForCausalLM.from_pretrained(directory)
    return model(torch.tensor([[0, 5, 6, 7]])).logits


@pytest.mark.parametrize("publish", ["lora", "merged"])
def test_an_exported_version_is_what_was_served(publish: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    proxy: Proxy = request.getfixturevalue(publish)
    base, version = proxy.vllm.root, ok(proxy.run("policy", "list", "--json")).json["data"][1]
    served = logits(Path(version["path"]), base)
    assert not torch.allclose(served, logits(base, base), atol=1e-4), "it was trained"
    for form in ("adapter", "merged"):
        ok(proxy.run("policy", "export", "1", tmp_path / form, "--as", form))
        assert (tmp_path / form / "adapter_config.json").exists() == (form == "adapter")
        torch.testing.assert_close(logits(tmp_path / form, base), served, atol=1e-5, rtol=1e-4)
        files = [tmp_path / form, *(tmp_path / form).rglob("*")]
        assert not [file for file in files if file.stat().st_mode & 0o077], "only their owner reads them"
        assert str(base) not in (tmp_path / form / "README.md").read_text()


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(lora: Proxy, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for code, why, version, directory in (
        (2, "version 0 is the base model itself", "0", "new"), (1, "no policy version 9", "9", "new"),
        (2, "choose a new directory", "1", "full"), (1, "cannot write", "1", "full/x/new"),
    ):  # fmt: skip
        done = lora.run("policy", "export", version, tmp_path / directory)
        assert (done.returncode, done.stderr.count("\n"), why in done.stderr) == (code, 1, True), done
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "x"]


def test_where_weights_are_merged_versions_answer_in_turn(merged: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(merged, tmp_path, *TASKS)
    refused = held_out.run("0,1")
    assert refused.returncode == 1 and "--promote" in refused.stderr and held_out.rollouts() == []
    assert "no policy version 9" in held_out.run("live,9", "--promote").stderr
    done = ok(held_out.run("live,0", "--promote"))
    live, base = held_out.rows().values()
    assert (live["policy_versions"], base["policy_versions"]) == ([1], [0])
    assert (live["mean_reward"], base["mean_reward"]) == (1.0, 0.5)
    assert merged.get("/policy")["live_version"] == 1 and "1 is live again" in done.stderr


def test_ctrl_c_leaves_what_was_done_and_puts_the_live_version_back(merged: Proxy, tmp_path: Path) -> None:
    held_out = Evaluation(merged, tmp_path, *TASKS * 20)
    process = Process(merged.directory, "eval", *held_out.arguments("0", "--promote", "--concurrency", "1"))
    process.start()
    wait_until(lambda: sum(one["reward"] is not None for one in held_out.rollouts()) >= 5, 60, "some are done")
    assert merged.get("/policy")["live_version"] == 0
    assert (process.end(signal.SIGINT), merged.get("/policy")["live_version"]) == (130, 1)
    row = held_out.rows()["0"]
    assert not row["complete"] and 0 < row["rollouts"] < 80
