"""`policy export`: a version leaves as a directory that PEFT and transformers load, with a card."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.command_line import lightning
from support.models import save_small_model
from support.training import Bench, bench

PROMPT = torch.tensor([[0, 5, 6, 7]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("base"))


async def trained(b: Bench) -> None:
    """One step, published as version 1, and its rollouts."""
    await b.groups("t1", "t2")
    await b.rollout("t1", 1.0, version=1)
    loop = b.loop(max_steps=1)
    await loop.run(asyncio.Event(), once=True)


def command(b: Bench, tmp_path: Path, *arguments: str | Path) -> Any:
    path = tmp_path / "system.yaml"
    path.write_text(yaml.safe_dump(b.config.model_dump(mode="json")))
    return lightning("--config", path, *arguments)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(PROMPT).logits
    return found


def loaded(base: Path, directory: Path) -> Any:
    if (directory / "adapter_config.json").exists():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
    assert AutoTokenizer.from_pretrained(directory).get_vocab()
    return AutoModelForCausalLM.from_pretrained(directory)


async def test_the_card_says_what_it_was_made_of_and_what_it_is_worth(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora") as b:
        await trained(b)
        assert (await asyncio.to_thread(command, b, tmp_path, "policy", "export", "1", tmp_path / "out"))[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "peft"
    assert "base_model" not in header, "a directory of this machine is nobody's name of a model"
    told = (
        "trained, from the base model to here: `rl`, 1 steps on 8 rollouts of 2 groups",
        "| training (mode `train`) | 0.500 (of rollouts: 8) | 1.000 (of rollouts: 1) |",
        "served weights compared with the trainer's: yes",
    )
    assert str(base) not in card
    assert [line for line in told if line not in card] == [], card


async def test_all_weights_are_a_model_and_no_adapter(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, weights="full", learning_rate=0.01) as b:
        await trained(b)
        export = ("policy", "export", "1", tmp_path / "out")
        code, _, err = await asyncio.to_thread(command, b, tmp_path, *export, "--as", "adapter")
        assert (code, err.count("\n"), "with trainer.weights full there is none" in err) == (2, 1, True), err
        assert (await asyncio.to_thread(command, b, tmp_path, *export))[0] == 0
        served = logits(loaded(base, Path(str((await b.store.versions.get(1)).path))))
    assert torch.equal(logits(loaded(base, tmp_path / "out")), served)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A full model: all weights of" in card and "LoRA" not in card
