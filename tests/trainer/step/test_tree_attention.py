"""Computed as a tree, rows get the scores and gradients that they get one by one; how samples are cut into trees."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, CodeGenConfig, CodeGenForCausalLM, LlamaConfig

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.rows.prefix_tree import PrefixTree, TreeCost, build_tree, micro_batches, padded_tree
from lightning_proxy.trainer.step import tree_attention
from lightning_proxy.trainer.step.scoring import check_tree_support, score
from lightning_proxy.trainer.step.tree_attention import FLEX_BLOCK, RUN, TreeMask, use_tree_attention
from lightning_proxy.trainer.types import Sample
from support.models import random_rows

VOCABULARY = 50
CPU = torch.device("cpu")

SHAPES = {
    "bushy": {"count": 40, "first": 12, "most": 8},
    "long": {"count": 5, "first": RUN + 100, "most": 150},
    "comb": {"count": 12, "first": 30, "most": 60},
}

# Multi-head; grouped queries, biases, norms of queries and keys; another scale; capped scores and logits; windows.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0, "sliding_window": 4096},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 7, "sliding_window": 4096},
}


def lora_model(kind: str) -> PeftModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.0, initializer_range=0.2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **ARCHITECTURES[kind],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def samples(task: str, rows: list[list[int]]) -> list[Sample]:
    return [
        Sample(f"{task}{i}", task, tuple(row), (0, *[1] * (len(row) - 1)), *[(0.0,) * len(row)] * 3)
        for i, row in enumerate(rows)
    ]


def random_samples(shape: str) -> list[Sample]:
    """Of a random half of their tokens, at one of two temperatures each."""
    rng = random.Random(0)
    return [
        replace(
            one, mask=(0, *rng.choices((0, 1), k=len(one.mask) - 1)),
            temperatures=tuple(rng.choices((0.5, 1.0), k=len(one.mask))),
        )
        for one in samples("t", sorted(row for row in random_rows(0, **SHAPES[shape]) if len(row) > 1))
    ]  # fmt: skip


Scored = tuple[Tensor, ...]


def one_by_one(model: PeftModel, samples: Sequence[Sample]) -> Scored:
    """The plain way: every row for itself. (B, T) log-probabilities and entropies, zero where nothing was sampled."""
    longest, scores = max(len(s.token_ids) for s in samples), []
    for sample in samples:
        ids, mask, heat = map(torch.tensor, (sample.token_ids, sample.mask, sample.temperatures))
        logp = (model(input_ids=ids[None]).logits[0, :-1] / heat[1:, None]).log_softmax(-1)
        both = torch.stack([logp.gather(1, ids[1:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
        scores.append(pad(mask[1:] * both, (1, longest - len(ids))))
    return tuple(torch.stack(scores, 1))


def as_a_tree(model: PeftModel, samples: Sequence[Sample]) -> Scored:
    (together,) = micro_batches(samples, TreeCost(attention=0.0, max_nodes=100_000))
    assert list(together.samples) == list(samples)
    return score(model.get_base_model(), together.tree, together.samples)


def gradient(model: PeftModel, samples: Sequence[Sample], way: Callable[..., Scored]) -> Tensor:
    """The whole LoRA gradient of a weighted sum of log-probabilities, as one vector."""
    logprobs, _ = way(model, samples)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    (logprobs * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_a_tree_equals_its_rows(model: PeftModel, samples: Sequence[Sample]) -> None:
    with torch.no_grad():
        expected = one_by_one(model, samples)
        found = as_a_tree(model, samples)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    gradients = [gradient(model, samples, way) for way in (as_a_tree, one_by_one)]
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_scores_and_gradients_equal_those_of_the_rows_one_by_one(kind: str, shape: str) -> None:
    assert_a_tree_equals_its_rows(lora_model(kind), random_samples(shape))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_that_attends_by_trees_scores_ordinary_padded_rows_as_before(kind: str) -> None:
    model = lora_model(kind)
    ids, present = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=present).logits[present.bool()]
        use_tree_attention(model.get_base_model())
        found = model(input_ids=ids, attention_mask=present).logits[present.bool()]
    assert model.get_base_model().config._attn_implementation == tree_attention.NAME
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_model_whose_attention_cannot_be_replaced_is_refused() -> None:
    config = CodeGenConfig(vocab_size=10, n_positions=16, n_embd=8, n_layer=1, n_head=2, rotary_dim=4)
    with pytest.raises(ConfigError, match="CodeGenForCausalLM"):
        use_tree_attention(CodeGenForCausalLM(config))


def test_siblings_cost_what_their_paths_cost_not_the_square_of_the_tree() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(VOCABULARY) for _ in range(1000)]
    tree = build_tree([[*prompt, i, *(rng.randrange(VOCABULARY) for _ in range(1000))] for i in range(8)])
    pairs = int((tree.depths + 1).sum())
    squares = [(stop - start) * (end - begin) for _, (start, stop), (begin, end) in tree_attention.attention_plan(tree)]
    assert sum(squares) < 1.4 * pairs < 0.3 * len(tree) ** 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_a_gpu_runs_gives_what_rows_give(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention in place of the blocks, not compiled: its kernels for CPUs have no backward pass, its rules do."""
    monkeypatch.setattr(tree_attention, "_has_flex_attention", lambda device: True)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda query, key, value: None)
    with torch.compiler.set_stance("force_eager"):
        assert_a_tree_equals_its_rows(lora_model(kind), random_samples(shape))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", ["long", "wide"])
def test_the_mask_by_blocks_is_the_one_that_pytorch_finds_pair_by_pair(shape: str, seed: int) -> None:
    shapes = {"long": {"count": 5, "first": 600, "most": 300}, "wide": {"count": 60, "first": 40, "most": 60}}
    ends = torch.from_numpy(padded_tree(build_tree(random_rows(seed, **shapes[shape])), FLEX_BLOCK).ends)
    found = tree_attention.block_mask(ends)
    expected = create_block_mask(found.mask_mod, B=None, H=None, Q_LEN=len(ends), KV_LEN=len(ends), device="cpu")
    assert torch.equal(found.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert shape == "wide" or found.full_kv_num_blocks.sum() > 0


@pytest.mark.long
def test_trees_of_fifteen_sizes_take_few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo decides when to compile again; the backend that it calls is counted, and compiles nothing."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda query, key, value: None)
    counter = CompileCounter()
    monkeypatch.setattr(tree_attention, "_compiled_flex", cache(lambda: torch.compile(flex_attention, backend=counter)))
    for size in range(1, 16):
        for _layer in range(2):
            mask = TreeMask(padded_tree(build_tree([list(range(size * FLEX_BLOCK))]), FLEX_BLOCK), CPU)
            query = torch.randn(1, 4, size * FLEX_BLOCK, 8, requires_grad=True)
            tree_attention.flex(query, query[:, :2], query[:, :2], mask.block_mask, None, None)
    assert 0 < counter.frame_count <= 3


# A tree of prefixes holds every row, each prefix once -----------------------------------------------------------------


def test_recurrent_layers_and_a_window_shorter_than_a_sample_are_refused() -> None:
    config = LlamaConfig()
    config.layer_types, config.sliding_window = ["sliding_attention"], 64
    check_tree_support(config, 64)
    with pytest.raises(ConfigError, match="window of 64"):
        check_tree_support(config, 65)
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        check_tree_support(config, 1)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cuts_compute_less_twice(seed: int) -> None:
    given = sorted(samples("a", random_rows(seed, 8)), key=lambda s: s.token_ids)
    chance = random.Random(seed)
    cost = TreeCost(0.1, max_nodes=chance.choice([15, 25, 40]), comfortable=chance.choice([None, 10, 20]))
    found = micro_batches(given, cost)

    def price(tree: PrefixTree) -> float:
        return cost(tree) + 1.0 + float(cost.memory(np.array(len(tree))))

    def total(cuts: tuple[int, ...]) -> float:
        groups = [[s.token_ids[:-1] for s in given[a:b]] for a, b in pairwise((0, *cuts, len(given)))]
        trees = [build_tree(group) for group in groups]
        fits = all(len(tree) <= cost.max_nodes or len(tree.paths) == 1 for tree in trees)
        return sum(map(price, trees)) if fits else math.inf

    cuts = range(1, len(given))
    best = min(total(chosen) for n in range(len(given)) for chosen in combinations(cuts, n))
    assert sum(price(batch.tree) for batch in found) == pytest.approx(best)
    assert [sample for batch in found for sample in batch.samples] == given
    for batch in found:
        assert len(batch.tree) <= cost.max_nodes or len(batch.samples) == 1
        assert [tuple(batch.tree.token_ids[p]) for p in batch.tree.paths] == [s.token_ids[:-1] for s in batch.samples]


def test_memory_is_saved_where_little_is_computed_twice_for_it() -> None:
    cost, answers = TreeCost(0.0, max_nodes=8192, comfortable=100), [[n] * 20 for n in range(50, 60)]
    apart = micro_batches(samples("a", [[1, 2, *answer] for answer in answers]), cost)
    assert max(len(batch.tree) for batch in apart) <= 100 and len(apart) == 2
    trunk = list(range(1000, 1400))
    assert len(micro_batches(samples("a", [[*trunk, *answer] for answer in answers]), cost)) == 1


def test_thousands_of_samples_are_cut_quickly() -> None:
    rng = np.random.default_rng(0)
    given = samples("a", [[1, 2, 3, *rng.integers(0, 50, 20).tolist()] for _ in range(3000)])
    made = micro_batches(given, TreeCost(attention=0.01, max_nodes=8192))
    assert sum(len(batch.samples) for batch in made) == 3000 and len(made) < 10
