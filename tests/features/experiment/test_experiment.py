"""`lightning-proxy experiment`: what it refuses, how it resumes, its table by hand. No model is served here."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from contract.system import wait_until
from lightning_proxy.commands.run.tasks import read_tasks
from lightning_proxy.commands.trial import draw
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.errors import ConfigError, LightningError
from lightning_proxy.core.statistics import bootstrap_mean
from lightning_proxy.features.experiment import experiment as module
from lightning_proxy.features.experiment.experiment import Lesson
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.command_line import lightning
from support.served import saved_version

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
FILE: Any = {
    "agent": "python agent.py", "tasks": "tasks.jsonl", "held_out": "held_out.jsonl", "rollouts": 16, "seeds": [0, 1],
    "variants": {"uniform": {}, "discounted": {"trainer": {"credit": "discounted"}}},
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model's folder, a configuration, tasks and an agent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name, text in {
        "model/config.json": '{"model_type": "llama"}', "agent.py": "print()",
        "config.yaml": "policy: {model: ./model}\ntrainer: {group_size: 4}\n",
        "tasks.jsonl": '{"task_id": "t0"}\n{"task_id": "t1"}\n{"task_id": "t2"}\n',
        "held_out.jsonl": '{"task_id": "a"}\n{"task_id": "b"}\n',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    return tmp_path


def write(place: Path, **changes: Any) -> Path:
    keys = {key: value for key, value in (FILE | changes).items() if value is not None}
    (place / "compare.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    return place / "compare.yaml"


def planned(place: Path, **changes: Any) -> Any:
    experiment = module.read_experiment(write(place, **changes), place / "config.yaml")
    return experiment, module.lessons_of(experiment, place / "out")


def start(place: Path) -> Any:
    """An experiment; it is in its third run where `hang` is there."""
    command, pipe = [sys.executable, "-c", PLAYED, "experiment", "compare.yaml"], subprocess.PIPE
    process = subprocess.Popen(command, cwd=place, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    wait_until(lambda: not (place / "hang").exists() or len(began(place)) == 3, 60, "the third run begins")
    return process


def began(place: Path) -> list[str]:
    (place / "began").touch()
    return (place / "began").read_text().splitlines()


def trainer(**keys: Any) -> Any:
    return {"variants": {"a": {"trainer": keys}}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"variants": {"../a": {}}}, "variants.../a"),
        ({"minutes": 3}, "rollouts or minutes"),
        ({"rollouts": None}, "rollouts or minutes"),
        ({"seeds": [1, 1]}, "seeds: give each seed once"),
        ({"agents": "x"}, "agents: unknown key; did you mean agent?"),
        ({"tasks": "none.jsonl"}, "cannot read none.jsonl"),
        ({"agent": "nowhere agent.py"}, "agent: there is no program 'nowhere' to start"),
        (trainer(loss="agent.py:x"), "variant a: trainer.loss: "),
        (trainer(loss="mine.py:ppo"), "variant a: trainer.loss mine.py:ppo: it has no gradient"),
        (trainer(discount=0.9), "variant a: the variable LIGHTNING_TRAINER__DISCOUNT would override trainer.discount"),
        (trainer(credt="anchor"), "variant a: trainer.credt: unknown key; did you mean"),
        (trainer(seed=3), "variant a: trainer.seed: each run has its own"),
        ({"variants": {"a": {"upstreams": [{"name": "p", "base_url": "http://h:1/v1"}]}}}, "variant a: upstreams: "),
        (trainer(group_size=5), "variant a: trainer.group_size 5 does not divide 16 rollouts"),
        (trainer(credit="no.py:x"), "variant a: trainer.credit: there is no file "),
    ],
)
def test_a_wrong_file_or_variant_is_refused_before_anything_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, named: str
) -> None:
    monkeypatch.setenv("LIGHTNING_TRAINER__DISCOUNT", "0.5")
    (place / "mine.py").write_text("def ppo(given):\n    return -given.ratios * given.advantages\n")
    with pytest.raises(ConfigError) as refused:
        module.experiment(write(place, **changes), place / "config.yaml", place / "out", 1, dry_run=False)
    assert named in refused.value.message and not (place / "out").exists()


def test_it_resumes_after_a_kill_also_elsewhere_and_refuses_another_file(place: Path) -> None:
    write(place)
    (place / "hang").touch()
    process = start(place)
    process.kill()
    process.communicate(timeout=60)
    (place / "hang").unlink()
    assert began(place) == ["uniform, seed 0", "discounted, seed 0", "uniform, seed 1"]
    process = start(place)
    shown, problems = process.communicate(timeout=120)
    assert (process.returncode, began(place)[3:]) == (0, ["uniform, seed 1", "discounted, seed 1"]), problems
    head, *rows = (line.split() for line in shown.splitlines())
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
    assert (again.returncode, again.stdout, began(other)) == (0, shown, began(place))

    write(place, variants={"uniform": {"trainer": {"lora_rank": 8}}}, samples=2)
    refused = lightning("experiment", "compare.yaml")
    assert refused.returncode == 2 and "uniform, seed 0 is finished" in refused.stderr
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
    process = start(place)
    second = lightning("experiment", file)
    assert (second.returncode, "another `experiment` is running in" in second.stderr) == (1, True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.endswith("lightning-proxy: stopped: 2 of 4 runs are finished; run the same command to do the others\n")


def test_a_run_rests_on_its_own_functions_and_on_the_agents_files_wherever_they_are(place: Path) -> None:
    function = "def f(group, config):\n    return [[0.0] * len(one.calls) for one in group]\n"
    for name in ("credit.py", "other.py", "reward.py"):
        (place / name).write_text(function)
    variants = {"own": {"trainer": {"credit": {"*": "credit.py:f", "b": f"{place}/other.py:f"}}}, "uniform": {}}
    (place / "config.yaml").write_text("policy: {model: ./model}\nrewards: {function: reward.py:f}\n")
    _, (own, uniform, *_) = planned(place, agent=f"python {place}/agent.py", variants=variants)
    shared = {"tasks.jsonl", "held_out.jsonl", f"{place}/agent.py", "reward.py"}
    assert set(own.made_with["files"]) == shared | {"credit.py", f"{place}/other.py"}
    assert set(uniform.made_with["files"]) == shared


async def test_a_run_that_fails_is_named_and_the_others_go_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, lessons = planned(place, variants={"broken": {}, "uniform": {}})
    results = dict[str, Any]()

    async def run(lesson: Lesson) -> Any:
        if lesson.lesson.variant == "broken":
            raise LightningError("the end of agents.log: no memory")
        lesson.directory.mkdir(parents=True)
        return {}

    monkeypatch.setattr(Lesson, "run", run)
    failed = await module.run_lessons(experiment, lessons, results, [{}, {}])
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
    _, lessons = planned(place)
    command = ("experiment", "compare.yaml", "--dir", "out", "--dry-run")
    head, _ = lightning(*command).stdout.splitlines()
    assert head == "4 runs to do; each trains for 16 rollouts, and evaluates 16 rollouts"
    for lesson in lessons[:2]:
        lesson.directory.mkdir(parents=True)
        measured = {"minutes": {"training": 2, "start": 1}, "tokens": 1000, "gib": 0.4}
        lesson.result.write_text(json.dumps({"made_with": lesson.made_with} | measured))
    done = lightning(*command, "--jobs", "2").stdout.splitlines()
    cost = "about 3 minutes, 0.8 GiB on the disk, 2000 tokens sampled in training, estimated from 2 finished runs"
    assert done == ["2 runs to do; each trains for 16 rollouts, and evaluates 16 rollouts", cost]


async def test_a_finished_run_keeps_the_last_and_the_best_weights(place: Path) -> None:
    experiment, (plan, *_) = planned(place)
    lesson = Lesson(experiment, plan, {}, print)
    lesson.begin()
    policy = lesson.directory / "policy"
    (policy / "versions").mkdir(parents=True)
    async with opened(load_config(lesson.launch.path).store) as database:
        store = Store(database)
        for _ in range(3):
            checkpoint = policy / "checkpoints" / str(number := await store.steps.claim([], 0))
            checkpoint.mkdir(parents=True)
            await store.steps.trained(number, str(checkpoint), {})
            await saved_version(store, "lora", policy / "versions")
    await lesson.tidy({3, 1})
    kept = {path.relative_to(policy).as_posix() for path in policy.glob("*/*")}
    assert kept == {"versions/v1", "versions/v3", "checkpoints/3"}


def test_a_run_has_a_folder_ports_and_an_order_of_tasks_of_its_own(place: Path) -> None:
    experiment, lessons = planned(place, variants={"discounted": FILE["variants"]["discounted"]}, seeds=[0, 1, 2])
    ports, orders = set(), set()
    for plan in lessons:
        Lesson(experiment, plan, {}, print).begin()
        settings = yaml.safe_load((plan.directory / "config.yaml").read_text())
        assert settings["store"]["url"] == f"sqlite:///{place}/out/discounted/seed-{plan.seed}/lightning.db"
        assert settings["trainer"] == {"group_size": 4, "credit": "discounted", "seed": plan.seed}
        assert settings["upstreams"][0]["base_url"].endswith(f":{settings['vllm']['port']}/v1")
        tasks = [task.task_id for task in read_tasks(plan.directory / "tasks.jsonl")]
        assert len(tasks) == 4 and {*tasks[:3]} == {"t0", "t1", "t2"}
        ports.add(settings["proxy"]["port"])
        orders.add(tuple(tasks))
    assert len(ports) == 3 and len(orders) > 1


# The table: means and intervals over seeds and tasks.


def result(variant: str, seed: int, *after: float) -> Any:
    held_out = {
        when: {"mean_reward": sum(rewards) / 4, "by_task": dict(zip("abcd", rewards, strict=True))}
        for when, rewards in (("before", (0.0,) * 4), ("after", after))
    }
    about = {"variant": variant, "seed": seed, "made_with": {"samples": 3}, "minutes": {"start": 1, "training": 2}}
    return about | {"held_out": held_out, "tokens": 9, "rollouts": 16, "steps": [{}]}


def test_variants_are_compared_on_the_same_seeds_and_tasks() -> None:
    """Each task is better by 0.25 with either seed, so the difference is certain although the rewards differ much."""
    results = [result("first", 0, 0, 0.25, 0.5, 0.75), result("first", 1, 0.5, 0, 0.25, 0)]
    results += [result("second", 0, 0.25, 0.5, 0.75, 1), result("second", 1, 0.75, 0.25, 0.5, 0.25)]
    results.append(result("second", 2, 1, 1, 1, 1))  # no partner
    head, first, second = module.lines(results)
    assert head[7] == "above first" and first[7:9] == ["", ""]
    assert second[7:9] == ["+0.250", "0.250 to 0.250"]
    assert (first[3], second[3], second[1]) == ("0.281", "0.688", "3")
    assert second[9:] == ["0.625 0.438 1.000", "4", "3", "3.0", "9"]
    seeds = bootstrap_mean(np.array([[0.0] * 40, [1.0] * 40]))
    assert (seeds.low, seeds.high) == (0.0, 1.0)  # two seeds that differ: the many tasks make nothing sure


def test_results_are_written_for_a_paper_with_a_warning_where_seeds_are_few(tmp_path: Path) -> None:
    results = [result("first", seed, 0, 0, 0, 1) for seed in range(5)]
    assert module.few_seeds(results) is None
    results.append(result("second", 0, 0, 0, 1, 1))
    module.write(results, tmp_path)
    table = (tmp_path / "results.md").read_text()
    for line in ("| variant | seeds | before | after |", "| --- | ---: |", "| first | 5 | 0.000 | 0.250 |"):
        assert f"\n{line}" in f"\n{table}"
    assert "| 0.500 | 4 | 3 |" in table and "\nfewer than 5 seeds (second has 1): " in table
    sheet = [*csv.DictReader((tmp_path / "results.csv").read_text().splitlines())]
    assert [row["seed"] for row in sheet] == [*"012340"] and sheet[5]["after"] == "0.5"
    whole = json.loads((tmp_path / "results.json").read_text())
    assert whole["runs"] == results and whole["packages"]["numpy"] == np.__version__


def test_without_matplotlib_the_curves_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(LightningError, match="the curves need matplotlib: pip install 'lightning-proxy\\[demo\\]'"):
        draw([], tmp_path / "curves.png")
