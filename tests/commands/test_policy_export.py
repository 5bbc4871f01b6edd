"""`policy export`: what the card of a version says, and all weights as a model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.command_line import Done, lightning
from support.training import Bench, bench


async def export(b: Bench, tmp_path: Path, *options: str) -> Done:
    path = tmp_path / "system.yaml"
    path.write_text(yaml.safe_dump(b.config.model_dump(mode="json")))
    command = ("--config", path, "policy", "export", "1", tmp_path / "out", *options)
    return await asyncio.to_thread(lightning, *command)


@torch.no_grad()
def logits(directory: Path) -> Any:
    assert AutoTokenizer.from_pretrained(directory).get_vocab()
    return AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([[0, 5, 6, 7]])).logits


@pytest.mark.parametrize("weights", ["lora", "full"])
async def test_a_version_is_exported_with_a_card_that_says_what_it_was_made_of_and_what_it_is_worth(
    base: Path, tmp_path: Path, weights: str
) -> None:
    async with bench(
        base, tmp_path, "lora" if weights == "lora" else "merged", weights=weights, learning_rate=0.01
    ) as b:
        await b.groups("t1", "t2")
        await b.rollout("t1", 1.0, version=1)
        await b.loop(max_steps=1).run(asyncio.Event(), once=True)
        if weights == "full":
            code, _, err = await export(b, tmp_path, "--as", "adapter")
            assert (code, err.count("\n"), "with trainer.weights full there is none" in err) == (2, 1, True), err
        assert (await export(b, tmp_path)).returncode == 0
        served = Path(str((await b.store.versions.get(1)).path))
    card = (tmp_path / "out" / "README.md").read_text()
    told = (
        "trained, from the base model to here: `rl`, 1 steps on 8 rollouts of 2 groups",
        "| training (mode `train`) | 0.500 (of rollouts: 8) | 1.000 (of rollouts: 1) |",
        "served weights compared with the trainer's: yes",
    )
    assert [line for line in told if line not in card] == [], card
    assert str(base) not in card and "base_model" not in card, "a directory of this machine is nobody's name of a model"
    if weights == "full":
        assert torch.equal(logits(tmp_path / "out"), logits(served))
        assert "A full model: all weights of" in card and "LoRA" not in card
    else:
        assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
