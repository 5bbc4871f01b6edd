"""`lightning-proxy experiment`: what it refuses, how it resumes, what it says. No model is served here."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_proxy.commands.run.tasks import read_tasks
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.errors import ConfigError, LightningError
from lightning_proxy.features.experiment import experiment as module
from lightning_proxy.features.experiment.experiment import Lesson, lessons_of, read_experiment, run_lessons
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.command_line import Done, lightning

# `experiment` in front of a played run, which takes as long as the file `hang` is there.
PLAYED = """
import asyncio, sys
from pathlib import Path
from lightning_proxy.features.experiment import experiment as module

class Played:
    def __init__(self, experiment, lesson, env, say):
        self.lesson = lesson
    async def run(self):
        lesson = self.lesson
        lesson.directory.mkdir(parents=True, exist_ok=True)
        with open("began", "a") as file:
            print(lesson.name, file=file)
        while Path("hang").exists() and lesson.seed == 1:
            await asyncio.sleep(0.05)
        after = {"mean_reward": 0.5, "by_task": {"a": 0.25 + lesson.seed / 4, "b": 0.75}}
        before = {"mean_reward": 0.25, "by_task": {"a": 0.25, "b": 0.25}}
        return {"variant": lesson.variant, "seed": lesson.seed, "made_with": lesson.made_with,
                "held_out": {"before": before, "after": after}, "minutes": {"training": 3.0}, "rollouts": 16,
                "tokens": 1000, "steps": [{"reward_mean": 0.5, "rollouts": 16}]}

module.Lesson = Played
from lightning_proxy.cli import app
app(sys.argv[1:], prog_name="lightning-proxy")
"""
FILE: dict[str, Any] = {
    "agent": "python agent.py", "tasks": "tasks.jsonl", "held_out": "held_out.jsonl", "rollouts": 16, "seeds": [0, 1],
    "variants": {"uniform": {}, "discounted": {"trainer": {"credit": "discounted"}}},
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model's folder, a configuration, tasks and an agent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "config.yaml").write_text("policy: {model: ./model}\ntrainer: {group_size: 4}\n")
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"task_id": "t{i}"}}\n' for i in range(3)))
    (tmp_path / "held_out.jsonl").write_text('{"task_id": "a"}\n{"task_id": "b"}\n')
    (tmp_path / "agent.py").write_text("print()")
    return tmp_path


def write(place: Path, **changes: Any) -> Path:
    file = place / "compare.yaml"
    file.write_text(
        yaml.safe_dump({key: value for key, value in (FILE | changes).items() if value is not None}, sort_keys=False)
    )
    return file


def start(place: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PLAYED, "experiment", "compare.yaml"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=place, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(place: Path) -> Done:
    process = start(place)
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)


def began(place: Path) -> list[str]:
    file = place / "began"
    return file.read_text().splitlines() if file.exists() else []


def start_up_to_the_third_run(place: Path) -> subprocess.Popen[str]:
    """It is in the third run, which has no end."""
    (place / "hang").touch()
    process = start(place)
    until = time.monotonic() + 60
    while len(began(place)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    return process


def variant(**changes: Any) -> dict[str, Any]:
    return {"variants": {"a": changes}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"variants": {"../a": {}}}, "variants.../a"),
        ({"minutes": 3}, "rollouts or minutes"),
        ({"rollouts": None}, "rollouts or minutes"),
        ({"seeds": [1, 1]}, "seeds: each once"),
        ({"agents": "x"}, "agents: unknown key; did you mean agent?"),
        ({"tasks": "none.jsonl"}, "cannot read none.jsonl"),
        ({"agent": "nowhere agent.py"}, "agent: there is no program 'nowhere' to start"),
        (variant(trainer={"loss": "agent.py:x"}), "variant a: trainer.loss: "),
        (variant(trainer={"loss": "mine.py:ppo"}), "variant a: trainer.loss mine.py:ppo: it has no gradient"),
        (
            variant(trainer={"discount": 0.9}),
            "variant a: the variable LIGHTNING_TRAINER__DISCOUNT would hide trainer.discount",
        ),
        (variant(trainer={"credt": "anchor"}), "variant a: trainer.credt: unknown key; did you mean"),
        (variant(trainer={"seed": 3}), "variant a: trainer.seed: each run has its own"),
        (variant(upstreams=[{"name": "p", "base_url": "http://h:1/v1"}]), "variant a: upstreams: "),
        (variant(trainer={"group_size": 5}), "variant a: trainer.group_size: 16 rollouts"),
        (variant(trainer={"credit": "no.py:x"}), "variant a: trainer.credit: there is no file "),
    ],
)
def test_a_wrong_file_or_variant_is_refused_before_anything_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], named: str
) -> None:
    monkeypatch.setenv("LIGHTNING_TRAINER__DISCOUNT", "0.5")
    (place / "mine.py").write_text("def ppo(given):\n    return -given.ratios * given.advantages\n")
    with pytest.raises(ConfigError) as refused:
        module.experiment(write(place, **changes), place / "config.yaml", place / "out", 1, dry_run=False)
    assert named in refused.value.message and not (place / "out").exists()


def test_it_resumes_after_a_kill_also_elsewhere_and_refuses_another_file(place: Path) -> None:
    write(place)
    process = start_up_to_the_third_run(place)
    process.kill()
    process.communicate(timeout=60)
    (place / "hang").unlink()
    assert began(place) == ["uniform, seed 0", "discounted, seed 0", "uniform, seed 1"]
    done = finish(place)
    assert (done.returncode, began(place)[3:]) == (0, ["uniform, seed 1", "discounted, seed 1"]), done.stderr
    head, *rows = (line.split() for line in done.stdout.splitlines())
    assert rows.pop()[:4] == ["fewer", "than", "5", "seeds"]
    assert head[0] == "variant" and [row[:4] for row in rows] == [
        ["uniform", "2", "0.250", "0.562"], ["discounted", "2", "0.250", "0.562"],
    ]  # fmt: skip
    results = place / "lightning-experiments" / "compare"
    assert {"curves.png", "results.md", "results.csv", "results.json"} < {file.name for file in results.iterdir()}
    assert all(path.stat().st_size < 10_000 for path in results.glob("*/*/result.json"))

    other = place.with_name("other")
    shutil.copytree(place, other)
    again = lightning("experiment", "compare.yaml", cwd=other)
    assert (again.returncode, again.stdout, began(other)) == (0, done.stdout, began(place))

    write(place, variants={"uniform": {"trainer": {"lora_rank": 8}}}, samples=2)
    refused = lightning("experiment", "compare.yaml")
    assert refused.returncode == 2
    assert "uniform, seed 0 is finished" in refused.stderr
    assert "config.trainer.lora_rank was None and is 8; samples was 4 and is 2" in refused.stderr
    write(place)
    broken = other / "lightning-experiments/compare/uniform/seed-0/result.json"
    broken.write_text(broken.read_text()[:99])
    assert f"{broken} is not the result of a run" in lightning("experiment", "compare.yaml", cwd=other).stderr
    (place / "agent.py").write_text("print(1)")
    assert "files.agent.py was" in lightning("experiment", "compare.yaml").stderr


def test_ctrl_c_says_how_to_go_on_and_a_second_one_in_the_folder_is_refused(place: Path) -> None:
    file = write(place)
    (place / "hang").touch()
    process = start_up_to_the_third_run(place)
    second = lightning("experiment", file)
    assert (second.returncode, "another `experiment` works in" in second.stderr) == (1, True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.endswith("lightning-proxy: stopped: 2 of 4 runs are finished; the same command does the others\n")


def test_a_run_rests_on_its_own_functions_and_on_the_agents_files_wherever_they_are(place: Path) -> None:
    function = "def f(group, config):\n    return [[0.0] * len(one.calls) for one in group]\n"
    for name in ("credit.py", "other.py", "reward.py"):
        (place / name).write_text(function)
    variants = {"own": {"trainer": {"credit": {"*": "credit.py:f", "b": f"{place}/other.py:f"}}}, "uniform": {}}
    (place / "config.yaml").write_text("policy: {model: ./model}\nrewards: {function: reward.py:f}\n")
    file = write(place, agent=f"python {place}/agent.py", variants=variants)
    own, uniform = lessons_of(read_experiment(file, place / "config.yaml"), place / "out")[:2]
    shared = {"tasks.jsonl", "held_out.jsonl", f"{place}/agent.py", "reward.py"}
    assert set(own.made_with["files"]) == shared | {"credit.py", f"{place}/other.py"}
    assert set(uniform.made_with["files"]) == shared


async def test_a_run_that_fails_is_named_and_the_others_go_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = read_experiment(write(place, variants={"broken": {}, "uniform": {}}), place / "config.yaml")
    lessons, results = lessons_of(experiment, place / "out"), dict[str, Any]()

    async def run(lesson: Lesson) -> dict[str, Any]:
        if lesson.lesson.variant == "broken":
            raise LightningError("the end of agents.log: no memory")
        lesson.directory.mkdir(parents=True)
        return {}

    monkeypatch.setattr(Lesson, "run", run)
    failed = await run_lessons(experiment, lessons, results, [{}, {}])
    assert sorted(failed) == ["broken, seed 0", "broken, seed 1"]
    assert sorted(results) == ["uniform, seed 0", "uniform, seed 1"] and lessons[1].result.is_file()
    assert "broken, seed 1: failed: the end of agents.log: no memory\n" in capsys.readouterr().err


def test_gpus_are_shared_out_to_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cards", lambda: {0: 80.0, 1: 80.0, 2: 80.0, 3: 80.0})
    assert [env["CUDA_VISIBLE_DEVICES"] for env in module.gpus_of(2)] == ["0,1", "2,3"]
    assert module.gpus_of(1) == [{}]  # it may use all
    with pytest.raises(ConfigError, match="--jobs 5: there are 4 GPUs"):
        module.gpus_of(5)


def test_a_dry_run_says_the_cost_as_far_as_it_is_known(place: Path) -> None:
    file = write(place)
    first = lightning("experiment", file, "--dry-run").stdout.splitlines()
    assert first[0] == "4 runs to do; each trains for 16 rollouts, and evaluates 16 rollouts"
    for lesson in lessons_of(read_experiment(file, place / "config.yaml"), place / "lightning-experiments/compare")[:2]:
        lesson.directory.mkdir(parents=True)
        measured = {"minutes": {"training": 2, "start": 1}, "tokens": 1000, "gib": 0.4}
        lesson.result.write_text(json.dumps({"made_with": lesson.made_with} | measured))
    done = lightning("experiment", file, "--dry-run", "--jobs", "2").stdout.splitlines()
    cost = "about 3 minutes, 0.8 GiB on the disk, 2000 tokens sampled in training, as measured on 2 finished"
    assert done == ["2 runs to do; each trains for 16 rollouts, and evaluates 16 rollouts", cost]


async def test_a_finished_run_keeps_the_last_and_the_best_weights(place: Path) -> None:
    experiment = read_experiment(write(place), place / "config.yaml")
    lesson = Lesson(experiment, lessons_of(experiment, place / "out")[0], {}, print)
    lesson.begin()
    policy = lesson.directory / "policy"
    async with opened(load_config(lesson.launch.path).store) as database:
        store = Store(database)
        for _ in range(4):
            number = await store.steps.claim([], 0)
            weights, checkpoint = policy / "versions" / f"v{number}", policy / "checkpoints" / str(number)
            weights.mkdir(parents=True)
            checkpoint.mkdir(parents=True)
            await store.steps.trained(number, str(checkpoint), {})
            await store.versions.saved(await store.versions.new("lora", number, {}), str(weights), f"policy-v{number}")
    await lesson.tidy({4, 2})
    assert {path.name for path in (policy / "versions").iterdir()} == {"v2", "v4"}
    assert {path.name for path in (policy / "checkpoints").iterdir()} == {"4"}


def test_a_run_has_a_folder_ports_and_an_order_of_tasks_of_its_own(place: Path) -> None:
    experiment = read_experiment(write(place, seeds=[0, 1, 2]), place / "config.yaml")
    written = []
    for plan in lessons_of(experiment, place / "out"):
        if plan.variant == "discounted":
            Lesson(experiment, plan, {}, print).begin()
            settings = yaml.safe_load((plan.directory / "config.yaml").read_text())
            assert settings["store"]["url"] == f"sqlite:///{place}/out/discounted/seed-{plan.seed}/lightning.db"
            assert settings["trainer"] == {"group_size": 4, "credit": "discounted", "seed": plan.seed}
            assert settings["upstreams"][0]["base_url"].endswith(f":{settings['vllm']['port']}/v1")
            tasks = [task.task_id for task in read_tasks(plan.directory / "tasks.jsonl")]
            assert len(tasks) == 4 and {*tasks[:3]} == {"t0", "t1", "t2"}
            written.append((settings["proxy"]["port"], tuple(tasks)))
    assert len(written) == len({port for port, _ in written}) == 3 and len({tasks for _, tasks in written}) > 1
