"""Log-probabilities of tokens under a causal language model. Every shared prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...proxy.errors import ConfigError
from ..rows.prefix_tree import Ints, PrefixTree, padded_tree
from ..types import Sample, Sampling
from .flex import FLEX_BLOCK
from .shaping import Place, Shaper, truncate
from .tree_attention import TreeMask, use_tree_attention

# So many logits are computed at a time (64 MiB in float32). Larger pieces miss a CPU's caches and are slower.
_LOGITS_PER_CHUNK = 2**24
# Tokens, if the model does not say how many it can take.
DEFAULT_SAMPLE = 4096
# In place of a log-probability of -inf in an entropy, where it is multiplied by 0.
_LEAST = -1e4


class Scores(NamedTuple):
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
    def of(cls, samples: Sequence[Sample]) -> Targets:
        """Return the trained tokens of `samples`."""
        columns = [np.flatnonzero(np.asarray(s.mask)) for s in samples]
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
) -> Scores:
    """Score the trained tokens of `samples` with one forward pass over `tree`, which has all but their last tokens.

    `model` is the bare causal LM with its LoRA layers. Without `shaper` there is nothing but temperatures.
    """
    hidden = _hidden_states(model, tree)
    targets = Targets.of(samples)
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
        shaped = _Shape(shaper, shaper.places(samples, targets.rows[first], targets.columns[first]))
    logprobs, entropies = _TokenScores.apply(hidden[chosen], model, tokens, temperatures, shaped, entropy_gradient)
    shape = (len(samples), max(len(s.token_ids) for s in samples))
    return Scores(*(x.new_zeros(shape).index_put((rows, columns), x[back]) for x in (logprobs, entropies)))


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


class _Shape(NamedTuple):
    """How each of K tokens was sampled, and what computes it."""

    shaper: Shaper
    places: Sequence[Place | None]


class _TokenScores(torch.autograd.Function):
    """(K, H) hidden states, (K,) next tokens and temperatures -> (K,) log-probabilities and entropies, in float32.

    Each result depends on its own row alone, so the forward pass also finds the gradient's direction: no logits are
    kept or computed twice. The head itself gets no gradient; TRL forbids adapters on it. The direction of the entropies
    costs one more pass through the head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        model: PreTrainedModel,
        labels: Tensor,
        temperatures: Tensor,
        shape: _Shape | None,
        entropy_gradient: bool,
    ) -> Any:
        chunk = max(1, _LOGITS_PER_CHUNK // model.config.get_text_config().vocab_size)
        wanted = (1 + entropy_gradient) if ctx.needs_input_grad[0] else 0
        parts = [
            _score_chunk(
                model,
                *(x[start : start + chunk] for x in (hidden, labels, temperatures)),
                shape=shape and _Shape(shape.shaper, shape.places[start : start + chunk]),
                directions=wanted,
            )
            for start in range(0, len(labels), chunk)
        ]
        logprobs, entropies, *directions = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(*directions)
        if wanted < 2:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden = sum(
            gradient[:, None] * direction
            for gradient, direction in zip(gradients, ctx.saved_tensors, strict=False)  # not of the entropies
        )
        assert isinstance(hidden, Tensor)
        return hidden.to(ctx.saved_tensors[0].dtype), None, None, None, None, None


def _score_chunk(
    model: PreTrainedModel,
    hidden: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    *,
    shape: _Shape | None,
    directions: int,
) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies, and `directions` of: d logprob / d hidden, d entropy / d hidden."""
    rows = torch.arange(len(labels), device=labels.device)
    with torch.set_grad_enabled(directions > 0):
        hidden = hidden.detach().requires_grad_(directions > 0)
        logits = _logits(model, hidden)
        if shape is not None:
            logits = shape.shaper.before_temperature(logits.float(), shape.places)
    logp = logits.detach().float() / temperatures[:, None]
    logp -= logp.logsumexp(-1, keepdim=True)
    if shape is not None:
        logp = truncate(logp, shape.places)
    chosen = logp[rows, labels]
    probs = logp.exp()
    if shape is not None:
        lost = torch.tensor([place is not None and place.is_lost for place in shape.places], device=chosen.device)
        chosen = chosen.masked_fill(lost, -torch.inf)
        logp = logp.clamp(min=_LEAST)
    entropies = -torch.linalg.vecdot(probs, logp)
    # Of logits over temperature: the one is 1 for the chosen token minus probs, the other -probs * (logp + entropy).
    slopes = [probs * (logp + entropies[:, None])] if directions > 1 else []
    if directions:
        probs[rows, labels] -= 1
        slopes = [probs, *slopes]
    found = [
        torch.autograd.grad(logits, hidden, slope.to(logits.dtype), retain_graph=slope is not slopes[-1])[0]
        for slope in slopes
    ]
    return chosen, entropies, *((direction / -temperatures[:, None]).to(hidden.dtype) for direction in found)


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The head's output as in the model's own forward pass: Cohere and Granite scale it, Gemma caps it."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    config = model.config.get_text_config()
    logits: Tensor = head(hidden.to(next(head.parameters()).dtype))
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits
