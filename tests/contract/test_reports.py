"""CONTRACT.md, sections 2 and 3: what was learned from, as every route, list, export and command shows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.model import VOCABULARY, ModelVllm
from contract.system import Json, Proxy, in_this_process, wait_until
from support.models import save_small_model
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
    ("same", "train", 0): [1.0] * 4,
    ("u1", "train", 0): [0.0, 1.0], ("u1", "train", 1): [1.0],
    ("u2", "train", 0): [0.25], ("u2", "train", 1): [0.5, 1.0],
    ("u3", "train", 0): [1.0],
    ("held", "eval", 0): [0.0], ("held", "eval", 1): [1.0],
}  # fmt: skip


def ask(
    proxy: Proxy, name: str, task: str, *said: str, mode: str = "train", recording: str = "on", **fields: Any
) -> str:
    """Say something in a rollout; what the model says, which is at odd places of a conversation."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"model": "policy", "messages": messages, "max_tokens": 2} | fields
    path = f"/rollouts/{name}/tasks/{task}/v1/chat/completions"
    answer = proxy.post(path, body, X_Rollout_Mode=mode, X_Recording=recording)
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["message"]["content"]
    return text


def play(proxy: Proxy) -> None:
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
    body = [
        {"rollout_id": name, "call_id": None if call is None else calls[name][call], "name": what, "reward": value}
        for name, call, what, value in posts
    ]
    assert proxy.post("/reward", body).status == 200
    for name in ("high", "low"):
        assert proxy.post(f"/rollouts/{name}/end", {"status": "completed"}).status == 200


def play_others(proxy: Proxy, version: int) -> None:
    for (task, mode, began_with), rewards in OTHERS.items():
        for i, reward in enumerate(rewards if began_with == version else []):
            name = f"{task}-{version}-{i}"
            ask(proxy, name, task, "c", mode=mode)
            assert proxy.post("/reward", {"rollout_id": name, "reward": reward}).status == 200


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy after one training step."""
    directory = tmp_path_factory.mktemp("world")
    model = save_small_model(directory / "base")
    policy = {"model": str(model), "publish": "merged"}
    with in_this_process(directory, ModelVllm(model), policy=policy, trainer=TRAINER) as proxy:
        play(proxy)
        ask(proxy, "high", "t", "a", "w5", "b")
        ask(proxy, "high", "t", "d", recording="only")
        play_others(proxy, 0)
        done = proxy.run("train", "--once")
        assert done.returncode == 0, done.stderr
        play_others(proxy, 1)
        yield proxy


def told(proxy: Proxy) -> Iterator[tuple[str, Json]]:
    """The feed's events from the beginning, which end with the last rollout of OTHERS."""
    kind = ""
    with proxy.client.stream("GET", f"{proxy.url}/feed?cursor=0") as got:
        for line in got.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                yield kind, data
                if kind == "rollout" and data["rollout_id"] == "held-1-0":
                    return


def of_export(proxy: Proxy, *options: str) -> list[Json]:
    out = proxy.directory / "rows.jsonl"
    done = proxy.run("export", out, *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def by_id(rollouts: list[Json], field: str = "reward") -> dict[str, Any]:
    return {one["rollout_id"]: one[field] for one in rollouts}


PLACES: dict[str, Callable[[Proxy], dict[str, Any]]] = {
    "list": lambda proxy: by_id(proxy.get("/rollouts")["data"]),
    "list of a step": lambda proxy: by_id(proxy.get("/rollouts?step=1")["data"]),
    "rollout": lambda proxy: by_id([proxy.rollout(name) for name in EARNED]),
    "siblings": lambda proxy: by_id(proxy.get("/rollouts/high/rows")["group"]),
    "tasks": lambda proxy: by_id(proxy.get("/tasks?task_id=t")["data"][0]["recent"]),
    "feed": lambda proxy: by_id([data for kind, data in told(proxy) if kind == "rollout"]),
    "export of transitions": lambda proxy: by_id(of_export(proxy), "rollout_reward"),
    "export of sft rows": lambda proxy: by_id(of_export(proxy, "--kind", "sft", "--min-reward=-9")),
    "rollouts list": lambda proxy: by_id(proxy.run("rollouts", "list", "--json").json["data"]),
    "rollouts show": lambda proxy: by_id([proxy.run("rollouts", "show", name, "--json").json for name in EARNED]),
    "advantages": lambda proxy: {
        name: advantage + 0.5
        for name, advantage in by_id(proxy.get("/rollouts/high/rows")["group"], "advantage").items()
    },
}


def test_every_place_shows_the_return_that_is_trained(world: Proxy) -> None:
    for place, show in PLACES.items():
        if place != "feed" or has("page"):
            shown = show(world)
            assert {name: shown[name] for name in EARNED} == EARNED, place


def test_filters_by_reward_use_the_return(world: Proxy) -> None:
    for bounds, names in (
        ({"min_reward": 0.5}, {"own", "high"}),
        ({"max_reward": 0.25}, {"zero", "low"}),
        ({"min_reward": 0.1, "max_reward": 0.6}, {"low", "own"}),
    ):
        query = "".join(f"&{name}={value}" for name, value in bounds.items())
        assert by_id(world.get(f"/rollouts?task_id=t{query}")["data"]).keys() == names
        options = [f"--{name.replace('_', '-')}={value}" for name, value in bounds.items()]
        done = world.run("rollouts", "list", "--task", "t", *options, "--json")
        assert by_id(done.json["data"]).keys() == names
        if "max_reward" not in bounds:
            assert by_id(of_export(world, "--task", "t", *options), "rollout_reward").keys() == names


def test_a_transition_has_the_reward_of_its_call_and_the_last_one_the_rest(world: Proxy) -> None:
    rewards = {name: [one["reward"] for one in world.get(f"/rollouts/{name}/transitions")["data"]] for name in EARNED}
    assert rewards == {"high": [1.0, 0.25, 0.0, 0.0], "low": [0.25, 0.0], "own": [7.0, 0.5], "zero": [0.0, 0.0]}
    high = world.rollout("high")
    assert ([call["reward"] for call in high["calls"]], high["own_reward"]) == ([1.0, 0.25, None, None], None)


def test_sums_of_returns_are_the_same_everywhere(world: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "15 of the newest 15 ended training rollouts have one" in world.run("doctor").stdout
    if has("tune"):
        monkeypatch.setenv("LIGHTNING_TUNE__SFT__MIN_REWARD", "2")
        refused = world.run("train", "--method", "sft")
        assert refused.returncode != 0 and "theirs are from 0 to 1.25" in refused.stderr
    shown = world.run("rollouts", "show", "high").stdout
    assert "1.25, that of its calls" in shown and "trained         by step 1" in shown


@pytest.mark.feature("page")
def test_the_feed_tells_of_steps_and_versions(world: Proxy) -> None:
    events = [(kind, data) for kind, data in told(world) if kind in ("step", "version")]
    assert ("step", {"step": 1, "status": "trained", "version": 1, "reward": 0.5}) in events
    (live,) = [data["version"] for kind, data in events if kind == "version" and data["live"]]
    assert live == 1


def test_steps_come_in_pages_and_in_brief(world: Proxy) -> None:
    page = world.get("/policy/steps?limit=1&brief=true")
    (step,) = page["data"]
    assert (step["step"], step["status"], step["base"], step["version"]) == (1, "trained", 0, 1)
    assert step["metrics"]["reward_mean"] == 0.5 and "reward_by_task" not in step["metrics"]
    assert world.get(f"/policy/steps?cursor={page['next_cursor']}") == {"data": [], "next_cursor": None}
    wrong = world.call("GET", "/policy/steps?cursor=x")
    assert (wrong.status, wrong.error["param"]) == (400, "cursor")


def test_each_call_says_how_it_was_trained_and_why_it_opened_a_row(world: Proxy) -> None:
    ids = [call["call_id"] for call in world.rollout("high")["calls"]]
    found = world.get("/rollouts/high/rows")
    assert [found[field] for field in ("rollout_id", "task_id", "step", "dropped")] == ["high", "t", 1, None]
    told = [[call[field] for field in ("return", "advantage", "step", "row", "placed")] for call in found["calls"]]
    assert told == [
        [1.25, 0.75, 1, 0, "first"],
        [1.25, 0.75, 1, 0, "merged"],
        [1.25, 0.75, 1, 1, "edited"],
        [1.25, 0.75, 1, None, "untrainable"],
    ]
    assert found["rows"] == [
        {"row": 0, "call_ids": ids[:2], "tokens": 7, "trained_tokens": 4},
        {"row": 1, "call_ids": ids[2:3], "tokens": 6, "trained_tokens": 2},
    ]
    assert [call["call_id"] for call in found["calls"]] == ids
    dropped = world.get("/rollouts/same-0-0/rows")
    assert dropped["dropped"] == "all rewards of the group are equal" and dropped["rows"] == []
    assert dropped["group"] == [
        {"rollout_id": f"same-0-{i}", "reward": 1.0, "advantage": None, "step": None, "dropped": dropped["dropped"]}
        for i in range(4)
    ]


class WithAnotherToken(ModelVllm):
    """Answers a user of this name with the first token beyond the model's."""

    def _whole(self, body: Json) -> Json:
        answer = super()._whole(body)
        if body.get("user") == "beyond":
            answer["choices"][0]["token_ids"][-1] = VOCABULARY
        return answer


def test_calls_are_left_out_that_cannot_be_computed_again(tmp_path: Path) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked: list[tuple[Json, str]] = [
        ({"response_format": {"type": "text"}}, "new"),
        ({"tools": tools}, "repeated"),
        ({"top_k": 1}, "untrainable"),
        ({"response_format": {"type": "json_object"}}, "not_followed"),
        ({"tools": tools, "tool_choice": "required"}, "not_followed"),
        ({"watermarking": True}, "not_followed"),
        ({"user": "beyond"}, "other_tokens"),
        ({"messages": [image]}, "not_followed"),
    ]
    vllm = WithAnotherToken(save_small_model(tmp_path / "base"))
    vllm.refuses["/v1/chat/completions/render"] = 404  # where vLLM would say it
    policy = {"model": str(vllm.root), "publish": "merged"}
    with in_this_process(tmp_path, vllm, policy=policy, trainer=TRAINER) as proxy:
        play(proxy)
        for fields, _ in asked:
            ask(proxy, "high", "t", "d", **fields)
        assert proxy.run("train", "--once").returncode == 0
        calls = proxy.get("/rollouts/high/rows")["calls"][2:]
        assert [call["placed"] for call in calls] == [placed for _, placed in asked]
        metrics = proxy.get("/policy/steps")["data"][0]["metrics"]
        counts = {"calls_untrainable": 1, "calls_not_followed": 4, "calls_other_tokens": 1, "merge_rate": 4 / 6}
        assert {name: metrics[name] for name in counts} == counts


def test_rollouts_have_siblings_before_a_step_compares_them(world: Proxy) -> None:
    expected = {"u1-0-1": ["u1-0-0", "u1-0-1", "u1-1-0"], "held-0-0": ["held-0-0"], "low": list(EARNED)}
    for name, siblings in expected.items():
        assert [one["rollout_id"] for one in world.get(f"/rollouts/{name}/rows")["group"]] == siblings


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
    for wrong in ("a=0", "a=0&b=-1", f"a=0&b={2**63}", "a=0&b=1&mode=both"):
        assert world.call("GET", f"/policy/compare?{wrong}").status == 422
    printed = world.run("policy", "compare", "1", "0", "--json").json
    assert (printed["mode"], printed["difference"]) == ("eval", -1.0)


def test_tasks_are_sorted_and_filtered(world: Proxy) -> None:
    for query, tasks in {
        "": "held u2 u1 u3 same t",
        "sort=mean": "u3 same u1 u2 held t",
        "sort=spread": "held u1 t u2 u3 same",
        "sort=rollouts&mode=train": "same t u2 u1 u3",
        "mode=eval": "held",
        "task_id=u1": "u1",
        "task_id=nothing": "",
    }.items():
        assert " ".join(task["task_id"] for task in world.get(f"/tasks?{query}")["data"]) == tasks
        seen, cursor = [], ""
        while cursor is not None:
            page = world.get(f"/tasks?limit=2&{query}{cursor and '&cursor=' + cursor}")
            seen += [task["task_id"] for task in page["data"]]
            cursor = page["next_cursor"]
        assert " ".join(seen) == tasks


def test_a_task_shows_its_rewards_over_time_and_how_often_it_is_solved(world: Proxy) -> None:
    tasks = {task["task_id"]: task for task in world.get("/tasks")["data"]}
    assert [one["policy_version"] for one in tasks["u2"]["recent"]] == [0, 1, 1]
    assert [one["reward"] for one in tasks["u2"]["recent"]] == [0.25, 0.5, 1.0]
    assert [one["mode"] for one in tasks["held"]["recent"]] == ["eval", "eval"]
    assert {tasks[name]["solved"] for name in tasks} == {"sometimes"}, "the best of all is 1.25"
    only = world.get("/tasks?mode=eval")["data"]
    assert [one["solved"] for one in only] == ["sometimes"]
    for query, status in (("cursor=-1", 400), ("cursor=x", 400), ("sort=best", 422), ("limit=0", 422)):
        assert world.call("GET", f"/tasks?{query}").status == status


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
    assert world.run("store", "backup", tmp_path / "store.db").returncode == 0
    with in_this_process(tmp_path, policy={"publish": "lora"}) as proxy:
        wait_until(lambda: proxy.call("GET", "/readyz").status == 503, 30, "it knows the server")
        assert "published as merged, and policy.publish is now lora" in proxy.call("GET", "/readyz").json["upstream"]
        assert proxy.chat("other").status == 503
        assert proxy.post("/policy/promote", {"version": 0}).status == 200
        wait_until(lambda: proxy.call("GET", "/readyz").status == 200, 30, "the base model is served in both ways")
        assert proxy.chat("other").status == 200


def test_other_weights_at_the_next_start_count_for_what_was_recorded_before(tmp_path: Path) -> None:
    with in_this_process(tmp_path, trainer={"reward_weights": WEIGHTS}) as proxy:
        play(proxy)
        assert by_id(proxy.get("/rollouts")["data"]) == EARNED
    with in_this_process(tmp_path, trainer={"reward_weights": {"unknown": 2.0}}) as proxy:
        others = {"high": 18.0, "low": None, "own": None, "zero": None}
        wait_until(lambda: by_id(proxy.get("/rollouts")["data"]) == others, 30, "the new weights count")


def test_rewards_that_do_not_count_are_named(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        for name in ("r1", "r2"):
            proxy.chat(name)
            proxy.post("/reward", {"rollout_id": name, "reward": 1, "name": "score"})
        status = proxy.get("/status")
        assert (status["waiting"], status["unrewarded"], status["other_rewards"]) == (0, 2, {"score": 2})
        assert "trainer.reward_weights leaves out what came: score (2)" in " ".join(proxy.run("status").stdout.split())
        said = " ".join(proxy.run("doctor").stdout.split())
        assert "0 of the newest 2 ended training rollouts have one" in said
        assert "they have rewards named score: give these names weights in trainer.reward_weights" in said
