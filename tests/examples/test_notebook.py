"""The notebook reads what `export` writes, and draws it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from lightning_proxy.store.training import CallCredit
from support.examples import EXAMPLES


async def test_the_notebook_draws_an_export(
    running: Callable[..., AbstractAsyncContextManager[Any]], tmp_path: Path
) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for name, reward in (("a", 0.0), ("b", 0.5), ("c", 1.0), ("untrained", 1.0)):
            await system.chat(name, X_Task_Id="t1")
            await system.call("POST", "/reward", {"rollout_id": name, "reward": reward})
        for names in (["a", "b"], ["c"]):
            await store.steps.claim(names, 0, credit=[CallCredit(name, 0, 0.5, 0.1, 0, "first") for name in names])
        assert (await system.lightning("export", tmp_path / "all.jsonl"))[0] == 0
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    await NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).async_execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ())]
    assert shown[0]["text/plain"] == "(4, 4)"
    rewards = [row.split()[:2] for row in shown[1]["text/plain"].splitlines()[2:]]
    assert rewards == [["1.0", "0.25"], ["2.0", "1.00"]], "what was not trained is in no step"
    assert "image/png" in shown[2]
    assert " c " in shown[3]["text/plain"]
