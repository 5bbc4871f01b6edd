"""CONTRACT.md, section 5: `run` starts an agent program once per task and sibling."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract.system import Done, Json, Process, Proxy, ok, wait_until
from support.ray_cluster import RayCluster, ray_cluster

NUMBERS = itertools.count()
POST = """
import json, os, pathlib, subprocess, sys, time, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)

def call():
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)

def reward(value, **more):
    body = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": value, **more}
    post(os.environ["LIGHTNING_URL"] + "/reward", body)
"""
# Starts a child, and one that leaves it for a session of its own; says who is there.
HANGS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
left = os.popen("setsid sleep 1000 >/dev/null 2>&1 & echo $!").read().strip()
with open("pids", "a") as file:
    file.write(f"{os.getpid()} {child.pid} {left}\\n")
print("hanging", flush=True)
time.sleep(1000)
"""
FAILS_AT_FIRST = """
task, seen = json.loads(os.environ['LIGHTNING_TASK'])['task_id'], pathlib.Path(sys.argv[1])
ran = seen.read_text().split() if seen.exists() else []
seen.write_text(' '.join([*ran, task]))
assert (task[-1], ran.count(task)) not in (('a', 1), ('b', 0), ('b', 1))  # the second of a, both of b
reward(0.5, name='style', final=False)
reward(1.0)
"""


class Runs:
    """Runs programs over tasks in a folder of its own. `way`: options that choose how programs are started."""

    def __init__(self, proxy: Proxy, directory: Path, way: list[str]) -> None:
        self.proxy, self.directory, self.way = proxy, directory, way
        self.task = f"task-{next(NUMBERS)}"
        self.tasks({"task_id": self.task})

    def tasks(self, *tasks: Json) -> None:
        (self.directory / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))

    def agent(self, text: str) -> None:
        (self.directory / "agent.py").write_text(POST + text)

    def arguments(self, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
        program = [sys.executable, str(self.directory / "agent.py"), *arguments]
        return ["--tasks", str(self.directory / "tasks.jsonl"), *self.way, *options, "--", *program]

    def run(self, *options: str, arguments: tuple[str, ...] = ()) -> Done:
        return self.proxy.run("run", *self.arguments(*options, arguments=arguments))

    def summary(self, *options: str, **more: Any) -> Any:
        return ok(self.run(*options, "--json", **more)).json

    def rollouts(self, task: str | None = None) -> Any:
        return self.proxy.get(f"/rollouts?limit=1000&task_id={task or self.task}")["data"]


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayCluster]:
    """A real cluster with two nodes, for one program each."""
    pytest.importorskip("ray")
    with ray_cluster() as cluster:
        cluster.add_node()
        cluster.add_node()
        yield cluster


@pytest.fixture(params=["process", "preload", pytest.param("ray", marks=pytest.mark.long)])
def runs(proxy: Proxy, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runs:
    if request.param == "ray":
        monkeypatch.setenv("LIGHTNING_RUN__EXECUTOR", "ray")
        monkeypatch.setenv("LIGHTNING_RAY__ADDRESS", request.getfixturevalue("ray_nodes").address)
    return Runs(proxy, tmp_path, ["--preload", "json"] if request.param == "preload" else [])


@pytest.fixture
def plain(proxy: Proxy, tmp_path: Path) -> Runs:
    return Runs(proxy, tmp_path, [])


def test_each_sibling_of_each_task_runs_in_a_rollout_of_its_own(runs: Runs) -> None:
    runs.agent("call()\nreward(10.0 * json.loads(os.environ['LIGHTNING_TASK'])['x'])")
    names = [f"{runs.task}-{x}" for x in (1, 2)]
    runs.tasks(*({"task_id": name, "x": x} for x, name in enumerate(names, 1)))
    found = runs.summary("--group-size", "3", "--concurrency", "4")
    assert (found["rollouts"], found["failed"], found["without_reward"], found["mean_reward"]) == (6, 0, 0, 15.0)
    for name, reward in zip(names, (10.0, 20.0), strict=True):
        assert found["tasks"][name]["rewards"] == [reward] * 3
        facts = {(one["reward"], one["calls"], one["status"], one["mode"]) for one in runs.rollouts(name)}
        assert facts == {(reward, 1, "completed", "train")}


def test_a_task_has_as_many_rollouts_as_is_wanted(plain: Runs) -> None:
    plain.agent("reward(1)")
    for options, opened in (("", 8), ("--group-size 2 --repeat 2", 4), ("--mode eval", 1)):
        plain.tasks({"task_id": (task := plain.task + options[:6])})
        assert plain.summary(*options.split())["rollouts"] == opened
        modes = [one["mode"] for one in plain.rollouts(task)]
        assert modes == ["eval" if "eval" in options else "train"] * opened


def test_a_program_finds_its_rollout_in_its_environment(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    for stale in ("LIGHTNING_TASK", "LIGHTNING_TASK_FILE", "LIGHTNING_ROLLOUT_ID", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(stale, "{}")
    runs.agent("print(json.dumps([{**os.environ}, sys.argv[1], __name__]))\ncall()")
    runs.run("--group-size", "1", "--logs", str(runs.directory / "logs"), arguments=("extra",))
    (rollout,) = runs.rollouts()
    (log,) = (runs.directory / "logs").iterdir()
    env, *rest = json.loads(log.read_text())
    root = f"{runs.proxy.url}/rollouts/{rollout['rollout_id']}"
    assert rest == ["extra", "__main__"] and rollout["calls"] == 1 and "ANTHROPIC_AUTH_TOKEN" not in env
    assert env["ANTHROPIC_API_KEY"] == env["OPENAI_API_KEY"]
    assert json.loads(env["LIGHTNING_TASK"]) == {"task_id": runs.task}
    assert env.items() >= {
        "OPENAI_BASE_URL": f"{root}/v1", "OPENAI_API_BASE": f"{root}/v1", "ANTHROPIC_BASE_URL": root,
        "LIGHTNING_ROLLOUT_ID": rollout["rollout_id"], "LIGHTNING_URL": runs.proxy.url,
    }.items()  # fmt: skip


def test_a_task_is_in_a_file_and_also_in_a_variable_if_one_can_be_so_long(runs: Runs) -> None:
    """What the program starts gets it, too, and the client reads either."""
    (runs.directory / "child.py").write_text("""
import json, os
from lightning_proxy import client
with open(os.environ["LIGHTNING_TASK_FILE"]) as file:
    task = json.load(file)
assert task == client.task() and task["x"] == "\u00e9" * task["size"]
assert ("LIGHTNING_TASK" in os.environ) == (task["size"] < 1000)
assert os.stat(file.name).st_mode & 0o077 == 0 or os.stat(os.path.dirname(file.name)).st_mode & 0o077 == 0
print(file.name)
""")
    runs.agent(f"sys.exit(subprocess.call([sys.executable, {str(runs.directory / 'child.py')!r}]))")
    runs.tasks(*({"task_id": runs.task, "size": size, "x": "\u00e9" * size} for size in (10, 200_000)))
    logs = runs.directory / "logs"
    assert runs.summary("--group-size", "1", "--logs", str(logs))["failed"] == 0
    assert [Path(log.read_text().strip()).exists() for log in logs.iterdir()] == [False, False]


def test_a_program_that_fails_or_cannot_be_started_ends_its_rollout_as_failed(runs: Runs) -> None:
    runs.agent("exec(json.loads(os.environ['LIGHTNING_TASK'])['does'])")
    ways = {
        "raise ValueError('bad luck')": "exit code 1: ValueError: bad luck",
        "print('x', file=sys.stderr); sys.exit(3)": "exit code 3: x",
        "os.kill(os.getpid(), 9)": "exit code -9: no output",
    }
    runs.tasks(*({"task_id": runs.task, "does": does} for does in ways))
    code, _, told = runs.run("--group-size", "1", "--concurrency", "1")
    assert code == 1 and "every program failed; first failure: exit code 1: ValueError" in " ".join(told.split()), told
    ended = [(one["status"], one["reason"], one["reward"]) for one in reversed(runs.rollouts())]
    assert ended == [("failed", reason, None) for reason in ways.values()]
    script = runs.directory / "agent"
    script.write_text("no shebang, no format")
    script.chmod(0o755)
    runs.proxy.run("run", "--tasks", runs.directory / "tasks.jsonl", "--group-size", "1", "--", script)
    rollout, *_ = runs.rollouts()
    assert rollout["status"] == "failed" and "cannot be started" in rollout["reason"]


def test_progress_is_told_and_a_program_that_ends_without_a_reward_leaves_its_rollout_open(plain: Runs) -> None:
    plain.agent("pass")
    told = " ".join(plain.run("--group-size", "1").stderr.split())
    assert "no step will be taken" in told
    assert "1 of 1 rollouts made no call: does your agent read OPENAI_BASE_URL?" in told
    assert plain.summary("--group-size", "2")["without_reward"] == 2
    assert {one["status"] for one in plain.rollouts()} == {"running"}
    plain.agent("reward(0.75)")
    told = plain.run("--group-size", "3").stderr
    assert "\x1b" not in told and "rollouts 3/3  reward 0.750  failed 0" in told and "mean reward 0.75" in told


def test_a_bad_task_is_named_by_file_and_line_and_one_without_an_id_by_what_it_says(plain: Runs) -> None:
    file = plain.directory / "tasks.jsonl"
    for line, fault in {
        "[1]": "a task must be a JSON object, got list",
        "{": "not JSON",
        '{"task_id": "a b"}': "task_id must be 1 to 200 characters",
        '{"task_id": true}': "task_id must be a string or an integer, got bool",
    }.items():
        file.write_text(f'{{"task_id": "never"}}\n\n{line}\n')
        for command in ("run", "eval"):
            code, _, said = plain.proxy.run(command, "--tasks", file, "--", "true")
            assert (code, said.count("\n"), f"{file}:3: " in said, fault in said) == (2, 1, True, True), said
    assert plain.rollouts("never") == []
    plain.agent("reward(1)")
    plain.tasks({"a": plain.task, "b": 2}, {"b": 2, "a": plain.task}, {"a": plain.task}, {"task_id": plain.task})
    found = {name: len(one["rewards"]) for name, one in plain.summary("--group-size", "1")["tasks"].items()}
    assert sorted(found.values()) == [1, 1, 2] and found[plain.task] == 1


def gone(pids: Path) -> bool:
    for pid in pids.read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):
            if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                return False
    return True


def hangs(runs: Runs) -> Path:
    """Give it an agent that hangs, with what it starts; return the file in which they say who they are."""
    pids = runs.directory / "pids"
    runs.agent(HANGS.replace('"pids"', repr(str(pids))))
    return pids


def two_hang(runs: Runs, pids: Path, *options: str) -> Process:
    """A run, once two of its programs hang."""
    run = Process(runs.proxy.directory, "run", *runs.arguments(*options))
    run.start()
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, 60, "two programs run")
    return run


def test_what_hangs_or_is_left_behind_is_ended(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = hangs(runs)
    monkeypatch.setenv("LIGHTNING_RUN__TIMEOUT_S", "3")
    done = runs.run("--group-size", "1")
    reason = "ended after 3 s (run.timeout_s): hanging"
    assert done.returncode == 1 and reason in " ".join(done.stderr.split())
    (rollout,) = runs.rollouts()
    assert (rollout["status"], rollout["reason"]) == ("failed", reason)
    wait_until(lambda: gone(pids), 30, "its processes are gone")
    agent = runs.directory / "agent.py"
    agent.write_text(agent.read_text().replace("\ntime.sleep(1000)\n", "\n"))
    assert runs.summary("--group-size", "1")["failed"] == 0, "it ends, and leaves behind what it started"
    wait_until(lambda: gone(pids), 30, "that is gone, too")


def test_sigterm_comes_first_and_sigkill_to_whoever_stays(plain: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_RUN__TIMEOUT_S", "2")
    told = plain.directory / "told"
    plain.agent(f"""
import signal
def late(*_):
    with open({str(told)!r}, "a") as file:
        file.write("SIGTERM ")
    if sys.argv[1] == "ends":
        sys.exit(0)
signal.signal(signal.SIGTERM, late)
while True:
    time.sleep(0.1)
""")
    for how in ("ends", "stays"):
        done = plain.run("--group-size", "1", arguments=(how,))
        assert "exit code" not in done.stderr and "ended after 2 s" in done.stderr
    assert told.read_text() == "SIGTERM SIGTERM "


def test_ctrl_c_ends_programs_and_discards_their_rollouts(runs: Runs) -> None:
    pids = hangs(runs)
    run = two_hang(runs, pids, "--group-size", "3", "--concurrency", "2")
    assert run.end(signal.SIGINT) == 130
    assert [one["status"] for one in runs.rollouts()] == ["discarded"] * 3
    wait_until(lambda: gone(pids), 30, "its processes are gone")


def test_programs_end_with_a_killed_run_and_its_rollouts_when_it_is_resumed(runs: Runs) -> None:
    pids, kept = hangs(runs), str(runs.directory / "kept")
    run = two_hang(runs, pids, "--group-size", "2", "--resume", kept)
    run.end(signal.SIGKILL)
    wait_until(lambda: gone(pids), 30, "its processes are gone")
    assert [one["status"] for one in runs.rollouts()] == ["running"] * 2
    runs.agent("reward(1)")
    done = runs.run("--group-size", "2", "--resume", kept)
    assert "2 rollouts of the stopped run were ended as failed" in " ".join(done.stderr.split())
    again, before = ("completed", None), ("failed", "`run --resume` began it again")
    assert [(one["status"], one["reason"]) for one in runs.rollouts()] == [again, again, before, before]


def test_a_run_that_is_resumed_asks_for_no_rollout_again_that_has_its_reward(plain: Runs) -> None:
    plain.agent(FAILS_AT_FIRST)
    seen, kept = plain.directory / "seen", plain.directory / "kept.jsonl"
    plain.tasks(*({"task_id": f"{plain.task}-{name}"} for name in "abc"))
    options = ("--group-size", "2", "--concurrency", "1", "--resume", str(kept))
    for failed, ran in ((3, "aabbcc"), (0, "aabbccabb"), (0, "aabbccabb")):
        found = plain.summary(*options, arguments=(str(seen),))
        assert (found["rollouts"], found["failed"], found["mean_reward"]) == (6, failed, 1.0)
        assert "".join(name[-1] for name in seen.read_text().split()) == ran
        kept.write_text(kept.read_text() + "rollout cut o")  # as when the run is killed
    assert found["by_name"] == {"style": {"mean": 0.5, "rollouts": 6}}
    groups = [[one["reward"] for one in plain.rollouts(f"{plain.task}-{name}")] for name in "abc"]
    assert [rewards.count(1.0) for rewards in groups] == [2, 2, 2], "a group is made full, not opened again"
