"""How `examples/learn.py` sets up a lesson, and the notebook, which reads what `export` writes and draws it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.store.training import CallCredit
from support.examples import EXAMPLES, NAMES
from support.paths import load_module


@pytest.mark.parametrize("name", NAMES)
def test_a_published_model_has_settings_of_its_own_size_and_begins_with_tasks_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    lesson = importlib.import_module("lesson")
    plan = lesson.Plan(EXAMPLES / name, Path(sys.executable), [], "Qwen/Qwen3-1.7B", 4, 16, 20, 8, 4)
    taught = lesson.ExampleLesson(plan, 0, tmp_path / "run")
    config = Config.model_validate(taught.settings())
    trainer = config.trainer
    assert (config.policy.publish, config.vllm.max_model_len) == ("auto", trainer.max_sample_tokens)
    assert (trainer.group_size, trainer.loss_type) == (16 if name == "reverse_text" else 4, "grpo")
    assert trainer.group_size * trainer.tasks_per_step == 128
    assert trainer.max_steps == 17, "imitation is one step more"
    taught.begin()
    files = ("taught", "held_out", "tasks")
    counts = [len((tmp_path / "run" / f"{kind}.jsonl").read_text().splitlines()) for kind in files]
    assert counts[:2] == [4, 8] and counts[2] > 0
    for module in ("tasks", "lesson"):
        sys.modules.pop(module)


def test_what_rl_adds_is_compared_task_by_task() -> None:
    """Where each task's reward was kept: two tasks, of which one got better by a half."""

    def row(*rewards: float) -> dict[str, Any]:
        mean = {"mean_reward": sum(rewards) / 2, "interval": {"low": 0.0, "high": 1.0}}
        return mean | {"by_task": dict(zip("ab", rewards, strict=True))}

    held_out = {"base": row(0.0, 0.0), "sft": row(0.0, 1.0), "rl": row(0.5, 1.0)}
    result = {"example": "calculator", "seed": 0, "steps": [], "minutes": {}, "held_out": held_out}
    assert "| 0.75 (0.00-1.00) | +0.25 (+0.00 to +0.50) |" in load_module(EXAMPLES / "learned.py").markdown([result])


async def test_the_notebook_draws_an_export(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for name, reward in (("a", 0.0), ("b", 0.5), ("c", 1.0), ("untrained", 1.0)):
            await system.chat(name, X_Task_Id="t1")
            await system.post("/reward", {"rollout_id": name, "reward": reward})
        for names in (["a", "b"], ["c"]):
            await store.steps.claim(names, 0, credit=[CallCredit(name, 0, 0.5, 0.1, 0, "first") for name in names])
        assert (await system.lightning("export", tmp_path / "all.jsonl"))[0] == 0
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    await NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).async_execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ())]
    assert shown[0]["text/plain"] == "(4, 4)"
    rewards = [row.split()[:2] for row in shown[1]["text/plain"].splitlines()[2:]]
    assert rewards == [["1.0", "0.25"], ["2.0", "1.00"]], "what was not trained is in no step"
    assert "image/png" in shown[2]
    assert " c " in shown[3]["text/plain"]
