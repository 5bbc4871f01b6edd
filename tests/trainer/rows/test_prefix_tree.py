"""A tree of prefixes holds every row, each prefix once; and how samples are cut into trees."""

import math
import random
from itertools import combinations, pairwise

import numpy as np
import pytest
from transformers import LlamaConfig

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.rows.prefix_tree import PrefixTree, TreeCost, build_tree, micro_batches
from lightning_proxy.trainer.step.scoring import check_tree_support
from lightning_proxy.trainer.types import Sample
from support.models import random_rows


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_holds_every_row_and_each_prefix_once(seed: int) -> None:
    rows = random_rows(seed, 9)
    tree = build_tree(rows)
    assert [tree.token_ids[path].tolist() for path in tree.paths] == rows
    assert [tree.depths[path].tolist() for path in tree.paths] == [list(range(len(row))) for row in rows]
    assert len(tree) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


def test_recurrent_layers_and_a_window_shorter_than_a_sample_are_refused() -> None:
    config = LlamaConfig()
    config.layer_types, config.sliding_window = ["sliding_attention"], 64
    check_tree_support(config, 64)
    with pytest.raises(ConfigError, match="window of 64"):
        check_tree_support(config, 65)
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        check_tree_support(config, 1)


def samples(task: str, rows: list[list[int]]) -> list[Sample]:
    return [
        Sample(f"{task}{i}", task, tuple(row), (0, *[1] * (len(row) - 1)), *[(0.0,) * len(row)] * 3)
        for i, row in enumerate(rows)
    ]


def test_micro_batches_hold_every_sample_once_and_keep_to_the_budget() -> None:
    given = [s for task in range(6) for s in samples(str(task), random_rows(task, 9))]
    made = micro_batches(given, TreeCost(attention=0.0, max_nodes=60))
    found = [s for batch in made for s in batch.samples]
    assert sorted(found, key=lambda s: s.rollout_id) == sorted(given, key=lambda s: s.rollout_id)
    for batch in made:
        assert len(batch.tree) <= 60
        assert [tuple(batch.tree.token_ids[p]) for p in batch.tree.paths] == [s.token_ids[:-1] for s in batch.samples]


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
