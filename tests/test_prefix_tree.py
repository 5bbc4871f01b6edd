"""A tree of prefixes stands for its rows exactly: same scores, same gradients, fewer tokens."""

import random

import numpy as np
import pytest

from lightning_proxy.proxy.errors import ConfigError
from lightning_proxy.trainer.microbatches import TreeCost, micro_batches
from lightning_proxy.trainer.prefix_tree import build_tree
from lightning_proxy.trainer.types import Sample

torch = pytest.importorskip("torch")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from lightning_proxy.trainer.scoring import check_tree_support, score, tree_attention_mask  # noqa: E402

VOCABULARY = 50


def random_rows(seed: int, count: int = 9) -> list[list[int]]:
    """Rows that branch off each other at random places, with duplicates and prefixes of each other among them."""
    rng = random.Random(seed)
    rows = [[rng.randrange(VOCABULARY) for _ in range(12)]]
    while len(rows) < count:
        kept = rng.choice(rows)
        rows.append(
            kept[: rng.randrange(1, len(kept) + 1)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(8))]
        )
    return [*rows, rows[0]]


def lora_llama(seed: int) -> PeftModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def padded_logprobs(model: PeftModel, rows: list[list[int]], temperatures: list[list[float]]):  # type: ignore[no-untyped-def]
    """The plain way: every row for itself. (B, T) log-probabilities and entropies, zero at position 0."""
    shape = (len(rows), max(map(len, rows)))
    logprobs, entropies = torch.zeros(shape), torch.zeros(shape)
    for i, (row, temperature) in enumerate(zip(rows, temperatures, strict=True)):
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1] / torch.tensor(temperature)[1:, None]
        logp = logits.log_softmax(-1)
        logprobs[i, 1 : len(row)] = logp.gather(1, torch.tensor(row)[1:, None])[:, 0]
        entropies[i, 1 : len(row)] = -(logp.exp() * logp).sum(-1)
    return logprobs, entropies


def gradients(model: PeftModel) -> "torch.Tensor":
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found)


@pytest.mark.parametrize("seed", range(5))
def test_scores_and_gradients_equal_those_of_the_rows_one_by_one(seed: int) -> None:
    rows, model, rng = random_rows(seed), lora_llama(seed), random.Random(seed)
    masks = [[0, *[rng.randrange(2) for _ in row[1:]]] for row in rows]
    masks[0] = [0, *[1] * (len(rows[0]) - 1)]
    temperatures = [[rng.choice([0.5, 1.0])] * len(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: rows[i])  # the order that micro_batches gives them
    rows, masks, temperatures = ([x[i] for i in order] for x in (rows, masks, temperatures))
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(m) for m in masks], batch_first=True)
    weights = torch.randn(mask.shape) * mask
    expected, expected_entropies = padded_logprobs(model, rows, temperatures)
    (expected * weights).sum().backward()
    expected_gradients = gradients(model)
    (together,) = micro_batches(
        [
            Sample(str(i), "t", tuple(row), tuple(masks[i]), *[(0.0,) * len(row)] * 2, tuple(temperatures[i]))
            for i, row in enumerate(rows)
        ],
        TreeCost(attention=0.0, max_nodes=1000),
    )
    scores = score(model.get_base_model(), together.tree, together.samples)
    (scores.logprobs * weights).sum().backward()

    assert torch.allclose(scores.logprobs, expected * mask, atol=1e-5)
    assert torch.allclose(scores.entropies, expected_entropies * mask, atol=1e-5)
    difference = (gradients(model) - expected_gradients).norm() / expected_gradients.norm()
    assert difference < 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_holds_every_row_and_each_prefix_once(seed: int) -> None:
    rows = random_rows(seed)
    tree = build_tree(rows)
    assert [tree.token_ids[path].tolist() for path in tree.paths] == rows
    assert [tree.depths[path].tolist() for path in tree.paths] == [list(range(len(row))) for row in rows]
    assert len(tree) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


@pytest.mark.parametrize("seed", range(5))
def test_a_node_sees_its_ancestors_and_itself_only(seed: int) -> None:
    tree = build_tree(random_rows(seed))
    visible = tree_attention_mask(tree, torch.float32, torch.device("cpu"))[0, 0] == 0
    expected = torch.zeros_like(visible)
    for path in tree.paths:
        for i, node in enumerate(path):
            expected[node, torch.from_numpy(path[: i + 1])] = True
    assert torch.equal(visible, expected)


def test_no_rows_make_an_empty_tree() -> None:
    tree = build_tree([])
    assert len(tree) == 0 and tree.paths == ()


def test_a_recurrent_model_is_refused() -> None:
    config = LlamaConfig()
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        check_tree_support(config, 100)


def test_an_attention_window_shorter_than_a_sample_is_refused() -> None:
    config = LlamaConfig()
    config.layer_types, config.sliding_window = ["sliding_attention"], 64
    check_tree_support(config, 64)
    with pytest.raises(ConfigError, match="window of 64"):
        check_tree_support(config, 65)


def samples(task: str, rows: list[list[int]]) -> list[Sample]:
    return [
        Sample(f"{task}{i}", task, tuple(row), (0, *[1] * (len(row) - 1)), *[(0.0,) * len(row)] * 3)
        for i, row in enumerate(rows)
    ]


def test_micro_batches_hold_every_sample_once_and_keep_to_the_budget() -> None:
    given = [s for task in range(6) for s in samples(str(task), random_rows(task))]
    made = micro_batches(given, TreeCost(attention=0.0, max_nodes=60))
    assert all(len(batch.tree) <= 60 for batch in made)
    found = [s for batch in made for s in batch.samples]
    assert sorted(found, key=lambda s: s.rollout_id) == sorted(given, key=lambda s: s.rollout_id)
    for batch in made:
        assert [tuple(batch.tree.token_ids[p]) for p in batch.tree.paths] == [s.token_ids[:-1] for s in batch.samples]


def test_a_sample_over_the_budget_stands_alone() -> None:
    made = micro_batches(samples("a", [list(range(30)), [40, 41]]), TreeCost(attention=0.0, max_nodes=10))
    assert [len(batch.tree) for batch in made] == [29, 1]


def test_tasks_are_joined_only_where_sharing_pays() -> None:
    given = samples("a", [[1, 2, 3, 4]]) + samples("b", [[1, 5, 6, 7]]) + samples("c", [[9, 8, 7, 6]])
    together = micro_batches(given, TreeCost(attention=0.0, max_nodes=100))
    assert [len(batch.samples) for batch in together] == [2, 1]
    apart = micro_batches(given, TreeCost(attention=1.0, max_nodes=100))
    assert [len(batch.samples) for batch in apart] == [1, 1, 1]


def test_a_tree_of_many_tokens_is_quick_to_describe() -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 1000, 4000).tolist()
    tree = build_tree([trunk + rng.integers(0, 1000, 100).tolist() for _ in range(40)])
    assert len(tree) == 8000
