"""`policy export`: what the card of a version says, and all weights as a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from contract.model import TRAINER, ask, learning, play
from contract.system import ok


@torch.no_grad()
def logits(directory: Path) -> Any:
    assert AutoTokenizer.from_pretrained(directory).get_vocab()
    return AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([[0, 5, 6, 7]])).logits


@pytest.mark.parametrize(("weights", "publish"), [("lora", "lora"), ("full", "merged")])
def test_a_version_is_exported_with_a_card_that_says_what_it_was_made_of_and_what_it_is_worth(
    base: Path, tmp_path: Path, weights: str, publish: str
) -> None:
    export, out = ("policy", "export", "1"), tmp_path / "out"
    with learning(tmp_path, base, publish, trainer=TRAINER | {"weights": weights}) as proxy:
        play(proxy, "first")
        ok(proxy.run("train", "--once"))
        ask(proxy, "second", "first-0")
        proxy.reward("second", 1.0)
        if weights == "full":
            code, _, err = proxy.run(*export, out, "--as", "adapter")
            assert (code, err.count("\n"), "with trainer.weights: full, no adapter is trained" in err) == (
                2,
                1,
                True,
            ), err
        ok(proxy.run(*export, out))
        before, after = proxy.get("/policy/versions")["data"]
    card = (out / "README.md").read_text()
    told = (
        "trained, from the base model to here: `rl`, 1 steps on 8 rollouts of 2 groups",
        f"| {before['rewards']['train']['mean']:.3f} (of rollouts: 8) | 1.000 (of rollouts: 1) |",
        "served weights compared with the trainer's: yes",
    )
    assert [line for line in told if line not in card] == [], card
    assert str(base) not in card and "base_model" not in card, "a directory of this machine is nobody's name of a model"
    if weights == "full":
        assert torch.equal(logits(out), logits(Path(after["path"])))
        assert "A full model: all weights of" in card and "LoRA" not in card
    else:
        assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
