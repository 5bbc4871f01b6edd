"""`make gpu-hour`: what it computes of a lesson's store, of nvidia-smi and of the plan, and what it prints."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

# Two steps of RL, after one of imitation: a rollout each that was trained on, and in the second one that was dropped.
STORE = """
CREATE TABLE steps (step, status, finished_at, metrics);
CREATE TABLE rollouts (rollout_id, mode, created_at, rewarded_at, step, dropped_by);
CREATE TABLE calls (rollout_id, usage);
INSERT INTO steps VALUES (1, 'trained', 90, '{"optimizer_steps": 4, "step_s": 9}'),
  (2, 'trained', 108, '{"reward_mean": 0.25, "step_s": 3, "publish_s": 1, "trained_tokens_per_s": 10}'),
  (3, 'trained', 120, '{"reward_mean": 0.5, "step_s": 5, "trained_tokens_per_s": 20}');
INSERT INTO rollouts VALUES ('t', 'train', 50, 60, 1, NULL), ('e', 'eval', 101, 102, NULL, NULL),
  ('a', 'train', 100, 104, 2, NULL), ('b', 'train', 108, 110, 3, NULL), ('c', 'train', 109, 114, NULL, 3);
INSERT INTO calls SELECT rollout_id, '{"completion_tokens": 30}' FROM rollouts;
"""
LESSON = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
print("begun", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("clean", flush=True)
    raise SystemExit(130)
"""
PLAN = {
    "settings": {"vllm.devices": [0], "trainer.devices": [0]},
    "vllm_gib": {"weights": 3.0, "KV cache": 7.0},
    "trainer_gib": {"weights": 20.0},
}


@pytest.fixture
def gpu_hour(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield import_module("gpu_hour")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "lightning.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript(STORE)
    return path


def lesson(figures: dict[str, Any], plan: dict[int, float] | None) -> dict[str, Any]:
    held_out = {"base": {"mean_reward": 0.05, "interval": {"low": 0.0, "high": 0.1}}}
    return {"minutes": 12.0, "held_out": held_out, **figures, "plan": plan}


def test_figures_are_of_the_steps_of_rl_alone(gpu_hour: Any, store: Path) -> None:
    found = gpu_hour.measured(store, [])
    assert (found["steps"], found["rollouts"], found["curve"]) == (2, [1, 2], [0.25, 0.5])
    assert (found["step_s"], found["sampling_s"], found["training_s"], found["publishing_s"]) == (10, 5, 4, 1)
    assert (found["sampled_tokens"], found["sampled_tokens_per_s"], found["trained_tokens_per_s"]) == (90, 4.5, 15)


def test_without_a_gpu_and_without_a_step_nothing_is_made_up(gpu_hour: Any, store: Path) -> None:
    rows = dict(gpu_hour.lines(lesson(gpu_hour.measured(store, []), None)))
    assert (rows["card"], rows["reward of each"]) == ("no GPU", "0.25 0.50")
    with closing(sqlite3.connect(store)) as db, db:
        db.execute("DELETE FROM steps WHERE step > 1")
    rows = dict(gpu_hour.lines(lesson(gpu_hour.measured(store, []), None)))
    assert list(rows) == ["held-out reward before", "minutes, all in all", "steps of RL", "card"]


def test_the_cards_share_is_that_of_training_and_their_memory_stands_beside_the_plan(
    gpu_hour: Any, store: Path
) -> None:
    looks = [
        gpu_hour.cards.read(f"0, NVIDIA H100, {busy}, {mib}\n1, NVIDIA H100, [N/A], [N/A]\n", at)
        for at, busy, mib in ((50, 100, 40960), (101, 20, 20480), (119, 40, 30720), (130, 0, 1024))
    ]
    plan = gpu_hour.gib_by_card(PLAN)
    assert plan == {0: 30.0}
    figures = lesson(gpu_hour.measured(store, looks), plan)
    rows = dict(gpu_hour.lines(figures))
    assert rows["card 0 busy (NVIDIA H100)"] == "30 % of the time"
    assert rows["card 0, GiB at most; planned"] == "40.0; 30.0"
    assert (rows["card 1 busy (NVIDIA H100)"], rows["card 1, GiB at most; planned"]) == (
        "not said",
        "not said; no plan",
    )
    assert json.loads(json.dumps(figures))["cards"]["0"]["busy"] == 30


def test_ctrl_c_lets_the_lesson_clean_up(gpu_hour: Any, tmp_path: Path) -> None:
    """subprocess.run would kill it after a quarter of a second."""
    lesson = tmp_path / "lesson.py"
    lesson.write_text(LESSON)
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it
    code = f"{heeds}; import gpu_hour, os, sys; gpu_hour.to_its_end([sys.executable, {str(lesson)!r}], os.environ)"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as ours:
        assert ours.stdout is not None and ours.stdout.readline() == b"begun\n"
        ours.send_signal(signal.SIGINT)
        out, err = ours.communicate(timeout=30)
    assert out == b"clean\n" and b"returned non-zero exit status 130" in err


def test_without_nvidia_smi_there_is_no_card(gpu_hour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with gpu_hour.cards.Watch() as watch:
        pass
    assert watch.looks == []
