"""Log-probabilities of tokens under a causal language model. Every shared prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...core.errors import ConfigError
from ..rows.prefix_tree import Ints, PrefixTree, padded_tree
from ..types import Sample, Sampling
from .flex import FLEX_BLOCK
from .shaping import Shaper
from .token_scores import SamplingShape, token_scores
from .tree_attention import TreeMask, use_tree_attention

# Tokens, if the model does not say how many it can take.
DEFAULT_SAMPLE = 4096


class ScoredTokens(NamedTuple):
    """Scores of tokens, (B, T), with zeros where a token is not scored. `entropies` have a gradient if asked for.

    A log-probability is -inf where the way of sampling leaves the token out under these weights.
    """

    logprobs: Tensor
    entropies: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """The M tokens to score: `tokens` at `rows` and `columns` of (B, T), with logits divided by `temperatures`.

    `ways` tells apart how and from which place on their answers were sampled; 0 where there is only a temperature.
    """

    rows: Ints
    columns: Ints
    tokens: Ints
    temperatures: NDArray[np.float32]
    ways: Ints

    @classmethod
    def of(cls, samples: Sequence[Sample], *, results: bool = False) -> Targets:
        """Return the trained tokens of `samples`, with `results` also what tools wrote between them."""
        columns = [np.flatnonzero(np.asarray(s.mask)) for s in samples]
        if results:
            written = [[np.arange(*span) for span in s.results] for s in samples]
            columns = [np.sort(np.concatenate([c, *w])) for c, w in zip(columns, written, strict=True)]
        known: dict[tuple[int, Sampling], int] = {}
        ways = [np.zeros(len(s.mask), np.int64) for s in samples]
        for sample, way in zip(samples, ways, strict=True):
            for start, end, sampling in sample.shaped:
                way[start:end] = known.setdefault((start, sampling), len(known) + 1)
        return cls(
            rows=np.repeat(np.arange(len(samples)), [len(c) for c in columns]),
            columns=np.concatenate(columns),
            tokens=np.concatenate([np.asarray(s.token_ids)[c] for s, c in zip(samples, columns, strict=True)]),
            temperatures=np.concatenate(
                [np.asarray(s.temperatures, np.float32)[c] for s, c in zip(samples, columns, strict=True)]
            ),
            ways=np.concatenate([way[c] for way, c in zip(ways, columns, strict=True)]),
        )


def score(
    model: PreTrainedModel,
    tree: PrefixTree,
    samples: Sequence[Sample],
    shaper: Shaper | None = None,
    *,
    entropy_gradient: bool = False,
    results: bool = False,
) -> ScoredTokens:
    """Score the trained tokens of `samples` with one forward pass over `tree`, which has all but their last tokens.

    `results`: score what tools wrote, too.
    `model` is the bare causal LM, perhaps with LoRA layers. Without `shaper` there is nothing but temperatures.
    """
    hidden = _hidden_states(model, tree)
    targets = Targets.of(samples, results=results)
    nodes = np.array([tree.paths[r][c - 1] for r, c in zip(targets.rows, targets.columns, strict=True)])
    # Siblings that sampled the same token in the same place in the same way share one score.
    keys = np.stack([nodes, targets.tokens, targets.temperatures.view(np.int32), targets.ways], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    chosen, tokens, temperatures, back, rows, columns = (
        torch.from_numpy(x).to(hidden.device)
        for x in (
            nodes[first], targets.tokens[first], targets.temperatures[first], inverse.reshape(-1), targets.rows,
            targets.columns,
        )
    )  # fmt: skip
    shaped = None
    if shaper is not None and targets.ways.any():
        shaped = SamplingShape(shaper, shaper.places(samples, targets.rows[first], targets.columns[first]))
    logprobs, entropies = token_scores(hidden[chosen], model, tokens, temperatures, shaped, entropy_gradient)
    shape = (len(samples), max(len(s.token_ids) for s in samples))
    return ScoredTokens(*(x.new_zeros(shape).index_put((rows, columns), x[back]) for x in (logprobs, entropies)))


def check_tree_support(config: PreTrainedConfig, max_tokens: int) -> None:
    """Raise ConfigError for models that need separate rows: recurrent layers, or a window shorter than a sample."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"policy.model: layers of type {sorted(kinds)} are not supported; attention only")
    if (window := _window(config)) and window < max_tokens:
        raise ConfigError(f"trainer.max_sample_tokens: {max_tokens} is over the model's attention window of {window}")


def longest_sample(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return the longest sample by the model's context; without a `wanted` length, by its attention window too."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [wanted, context] if wanted else [context, _window(config)]
    return min((limit for limit in limits if limit), default=DEFAULT_SAMPLE)


def _window(config: PreTrainedConfig) -> int | None:
    """The tokens that a sliding window of some layers has."""
    text = config.get_text_config()
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    window: int | None = getattr(text, "sliding_window", None) if slides else None
    return window


def attention_cost(config: PreTrainedConfig, linear_parameters: int) -> float:
    """Return the work of attending from one node to one other, in units of a node's work in the linear layers."""
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * text.num_attention_heads * head_dim / linear_parameters


def _hidden_states(model: PreTrainedModel, tree: PrefixTree) -> Tensor:
    """(N, H): the last hidden state of every node."""
    use_tree_attention(model)
    device, n = model.device, len(tree)
    if device.type == "cuda":
        tree = padded_tree(tree, FLEX_BLOCK)
    output = model.base_model(
        input_ids=torch.from_numpy(tree.token_ids).to(device)[None],
        # A mask of four dimensions is passed on. This empty one fits nothing, should a model drop `tree_mask`.
        attention_mask=torch.empty(1, 1, 0, 0, device=device),
        position_ids=torch.from_numpy(tree.depths).to(device)[None],
        use_cache=False,
        tree_mask=TreeMask(tree, device),
    )
    states: Tensor = output.last_hidden_state
    return states[0, :n]
