"""All weights are trained: every gradient is exact, head and embeddings included, and files and resumes are whole."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_proxy.trainer.rows.prefix_tree import micro_batches
from lightning_proxy.trainer.step import scoring
from lightning_proxy.trainer.step.shaping import SampledPlace, truncate
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample, Sampling
from support.models import VOCABULARY, save_small_model
from support.training import learner

PROMPT = (3, 4, 4, 5)
# Untied and tied; biases and norms of queries and keys; scaled logits; capped logits.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "granite": {"tie_word_embeddings": True, "logits_scaling": 2.0},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 7, "final_logit_softcapping": 3.0, "sliding_window": 4096},
}


def save_model(directory: Path, kind: str) -> Path:
    """A model of two layers with the words of the small model."""
    save_small_model(directory)
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=1, bos_token_id=0, eos_token_id=1, **MODELS[kind],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


trainer = partial(learner, weights="full", learning_rate=1e-3)


def batch(sampling: Sampling | None = None) -> Batch:
    """Answers of four tokens to one prompt, half of them rewarded; with `sampling`, all were sampled in this way."""
    generator = np.random.default_rng(1)
    samples = []
    for i in range(6):
        ids = (*PROMPT, *(int(t) for t in generator.integers(2, VOCABULARY, 4)))
        of_answer = [(0.0,) * 4 + (value,) * 4 for value in (-3.0, (-1.0) ** i)]
        shaped = () if sampling is None else ((4, 8, sampling),)
        temperatures = (1.0,) * 4 + (0.7 if i % 3 else 1.0,) * 4
        samples.append(Sample(str(i), "t", ids, (0,) * 4 + (1,) * 4, *of_answer, temperatures, shaped=shaped))
    return Batch(1, tuple(samples), tuple(s.rollout_id for s in samples))


def test_with_autocast_the_weights_stay_in_float32_and_files_do_not(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    full, ids = trainer(model, tmp_path, dtype="bfloat16"), (*PROMPT, 6, 7)
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(model)(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [0.0, *(float(exact[i, token]) for i, token in enumerate(ids[1:]))]
    (found,) = full.logprobs([ids])
    assert 1e-4 < max(abs(f - e) for f, e in zip(found, expected, strict=True)) < 0.2
    assert not full.step(batch())["skipped"]
    assert {p.dtype for p in full.weight_sets.parameters()} == {torch.float32}
    full.save_weights(tmp_path / "files", merged=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "files").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_files_are_a_model_that_computes_what_the_trainer_does(kind: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / kind, kind)
    full = trainer(model, tmp_path)
    full.step(batch())
    full.save_weights(tmp_path / "files", merged=True)
    names = []
    for directory in (model, tmp_path / "files"):
        with safe_open(directory / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1], "a tied head is not written twice"
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "files")
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.allclose(written(input_ids=ids).logits, full.policy_model(input_ids=ids).logits, atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "files").eos_token == "w1"


SHAPED = Sampling(repetition_penalty=1.5, frequency_penalty=0.2, bias=((7, 1.0),), top_p=0.95)


def plain_scores(full: LightningTrainer, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """(4,) log-probabilities and entropies of an answer, by the model's own forward pass."""
    logits = full.policy_model(input_ids=torch.tensor([sample.token_ids])).logits[0].float()
    logprobs, entropies = [], []
    for i in range(4, 8):
        row = logits[i - 1 : i]
        places = []
        if sample.shaped:
            ids = np.asarray(sample.token_ids)
            places = [SampledPlace(sample.shaped[0][2], ids[:4], ids[4:i])]
            row = full._shaper.before_temperature(row, places)
        logp = (row / sample.temperatures[i]).log_softmax(-1)
        logp = truncate(logp, places)[0] if places else logp[0]
        logprobs.append(logp[sample.token_ids[i]])
        entropies.append(-(logp.exp() * logp.clamp(min=-1e4)).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("sampling", [None, SHAPED], ids=["plain", "shaped"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_plain_autograd(
    kind: str, sampling: Sampling | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and entropies are weighted at random, and come from several chunks of logits."""
    monkeypatch.setattr(scoring, "_LOGITS_PER_CHUNK", 5 * VOCABULARY)
    full = trainer(save_model(tmp_path / kind, kind), tmp_path, entropy={"coef": 0.1})
    samples = list(batch(sampling=sampling).samples)
    if sampling is not None:  # a token that top_p leaves out has no log-probability
        samples = [s for s in samples if plain_scores(full, s)[0].isfinite().all()]
        assert samples
    (together,) = micro_batches(samples, full._cost)
    scores = full._score(together)
    weights = torch.randn(2, len(samples), 4, generator=torch.Generator().manual_seed(0))
    total = (weights * torch.stack([x[:, 4:8] for x in scores])).sum()
    found = torch.autograd.grad(total, full.weight_sets.parameters())
    plain = [torch.stack(plain_scores(full, sample)) for sample in together.samples]
    assert torch.allclose(torch.stack([x[:, 4:8] for x in scores], 1), torch.stack(plain), atol=1e-4)
    total = sum((w * p).sum() for w, p in zip(weights.unbind(1), plain, strict=True))
    expected = torch.autograd.grad(total, full.weight_sets.parameters())
    assert max(float((f - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)) < 2e-5
