"""Logits are shaped as vLLM's own sampler shapes them, and what a grammar allows is replayed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_proxy.trainer.step.shaping import SampledPlace, Shaper, truncate
from lightning_proxy.trainer.types import Sampling
from support.models import VOCABULARY

PROMPT, ANSWER = (3, 4, 4, 5), (6, 7, 6, 8)
END = 1
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.7}, {"top_p": 0.6}, {"top_p": 0.05}, {"top_k": 3}, {"min_p": 0.3},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.02}, {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 1.4}, {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"bias": ((5, 4.0), (9, -2.5))}, {"allowed": (2, 6, 9, 11)}, {"min_tokens": 9}, {"min_tokens": 3},
    {"bias": ((9, 3.0),), "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_p": 0.7, "temperature": 0.6},
]  # fmt: skip


@pytest.fixture(scope="module")
def shaper(base: Path) -> Shaper:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Shaper(tokenizer, AutoModelForCausalLM.from_pretrained(base))


def ours(shaper: Shaper, logits: Any, sampling: Sampling) -> Any:
    places = [SampledPlace(sampling, np.array(PROMPT), np.array(ANSWER)) for _ in logits]
    shaped = shaper.before_temperature(logits, places) / sampling.temperature
    return truncate(shaped.log_softmax(-1), places)


def of_vllm(logits: Any, sampling: Sampling) -> Any:
    """The processed log-probabilities of vLLM's sampler."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    rows, s = len(logits), sampling
    forbidden = torch.ones(rows, VOCABULARY, dtype=torch.bool)
    forbidden[:, list(s.allowed or range(VOCABULARY))] = False
    column = torch.ones(rows)
    metadata = SamplingMetadata(
        temperature=column * s.temperature, all_greedy=False, all_random=True,
        top_p=column * s.top_p if s.top_p < 1 else None,
        top_k=torch.full((rows,), s.top_k) if s.top_k else None,
        generators={}, max_num_logprobs=VOCABULARY, no_penalties=False,
        prompt_token_ids=torch.tensor([PROMPT] * rows),
        frequency_penalties=column * s.frequency_penalty, presence_penalties=column * s.presence_penalty,
        repetition_penalties=column * s.repetition_penalty, output_token_ids=[list(ANSWER)] * rows,
        allowed_token_ids_mask=forbidden if s.allowed else None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(_processors(rows, s)),
    )  # fmt: skip
    sampler = Sampler("processed_logprobs")
    return sampler.sample(sampler.apply_logits_processors(logits.clone(), metadata, False), metadata)[1]


def _processors(rows: int, s: Sampling) -> list[Any]:
    """vLLM's processors for a batch of equal requests."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import builtin
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=rows))
    params = SamplingParams(min_p=s.min_p, logit_bias=dict(s.bias) or None, min_tokens=s.min_tokens, max_tokens=99)
    params.update_from_generation_config({}, END)
    kinds: Any = (builtin.MinTokensLogitsProcessor, builtin.LogitBiasLogitsProcessor, builtin.MinPLogitsProcessor)
    made = [kind(config, torch.device("cpu"), False) for kind in kinds]
    added = [(row, params, list(PROMPT), list(ANSWER)) for row in range(rows)]
    for processor in made:
        processor.update_state(BatchUpdate(batch_size=rows, removed=[], added=added, moved=[]))
    return made


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_to_sample_is_that_of_vllms_sampler(shaper: Shaper, way: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    torch.manual_seed(1)
    logits = torch.randn(40, VOCABULARY) * 3
    sampling = Sampling(**way)
    assert torch.allclose(ours(shaper, logits, sampling), of_vllm(logits, sampling), atol=2e-5)


def test_a_grammar_allows_at_each_token_what_fits_and_ends_where_the_answer_leaves_it(base: Path) -> None:
    pytest.importorskip("xgrammar")
    shaper = Shaper(AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base))
    choice = json.dumps({"choice": ["w3w4", "w3w5"]})

    def allowed(answer: list[int]) -> list[list[int]]:
        bits = shaper.masks(Sampling(grammar=choice), answer)
        return [[t for t in range(VOCABULARY) if int(word) >> t & 1] for (word,) in bits]

    assert allowed([3, 5, END]) == [[3], [4, 5], [END]]
    assert allowed([3, 9, 4]) == [[3], [4, 5]]
    assert len(shaper.masks(Sampling(grammar=json.dumps({"regex": "("})), [3])) == 0
