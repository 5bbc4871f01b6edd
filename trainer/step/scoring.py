"""Log-probabilities and entropies of tokens under a causal language model, without keeping all logits.

Every shared prefix is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...core.errors import ConfigError
from ..rows.prefix_tree import Ints, MicroBatch, PrefixTree, TreeCost, micro_batches, padded_tree
from ..types import Sample, Sampling
from .shaping import SampledPlace, Shaper, truncate
from .tree_attention import FLEX_BLOCK, TreeMask, use_tree_attention

# Tokens, if the model does not say how many it can take.
DEFAULT_SAMPLE = 4096

# So many logits are computed at a time (64 MiB in float32). Larger pieces miss a CPU's caches and are slower.
_LOGITS_PER_CHUNK = 2**24

# In place of a log-probability of -inf in an entropy, where it is multiplied by 0.
_LEAST = -1e4


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


class SamplingShape(NamedTuple):
    """How each of K tokens was sampled, and what computes it."""

    shaper: Shaper
    places: Sequence[SampledPlace | None]


class _Tokens(NamedTuple):
    """(K,) next tokens and temperatures, and how the tokens were sampled."""

    labels: Tensor
    temperatures: Tensor
    shape: SamplingShape | None


def token_scores(
    hidden: Tensor,
    model: PreTrainedModel,
    labels: Tensor,
    temperatures: Tensor,
    shape: SamplingShape | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Turn (K, H) hidden states, (K,) next tokens and temperatures into (K,) log-probabilities and entropies.

    They are in float32. The entropies have a gradient if it is asked for.
    """
    tokens, head = _Tokens(labels, temperatures, shape), _trained_head(model)
    if head and torch.is_grad_enabled():
        found: tuple[Tensor, Tensor] = _WithHead.apply(hidden, model, tokens, entropy_gradient, *head)
    else:
        found = _HeadFrozen.apply(hidden, model, tokens, entropy_gradient)
    return found


class _HeadFrozen(torch.autograd.Function):
    """Each result depends on its own row alone, so the forward pass also finds the gradient's direction.

    No logits are kept or computed twice. The direction of the entropies costs one more pass through the head.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, model: PreTrainedModel, tokens: _Tokens, entropy_gradient: bool) -> Any:
        wanted = (1 + entropy_gradient) if ctx.needs_input_grad[0] else 0
        parts = [_score_chunk(model, *chunk, directions=wanted) for chunk in _chunks(model, hidden, tokens)]
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
        return hidden.to(ctx.saved_tensors[0].dtype), None, None, None


class _WithHead(torch.autograd.Function):
    """The head is trained too. Its gradient sums over rows, so the backward pass computes the logits once more."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, model: PreTrainedModel, tokens: _Tokens, entropy_gradient: bool, *head: Tensor
    ) -> Any:
        parts = [_score_chunk(model, *chunk, directions=0) for chunk in _chunks(model, hidden, tokens)]
        logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        device = hidden.device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
        ctx.model, ctx.tokens, ctx.slopes = model, tokens, 1 + entropy_gradient
        ctx.save_for_backward(hidden)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        head = _trained_head(ctx.model)
        of_head = [torch.zeros_like(parameter) for parameter in head]
        of_hidden, start = [], 0
        with torch.autocast(hidden.device.type, **ctx.autocast):
            for chunk in _chunks(ctx.model, hidden, ctx.tokens):
                end = start + len(chunk[0])
                first, *others = _chunk_gradients(
                    ctx.model, *chunk, head, [gradient[start:end] for gradient in gradients[: ctx.slopes]]
                )
                of_hidden.append(first)
                for total, part in zip(of_head, others, strict=True):
                    total.add_(part)
                start = end
        return torch.cat(of_hidden), None, None, None, *of_head


def _trained_head(model: PreTrainedModel) -> list[nn.Parameter]:
    return [parameter for parameter in _head(model).parameters() if parameter.requires_grad]


def _head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    return head


def _chunks(model: PreTrainedModel, hidden: Tensor, tokens: _Tokens) -> Iterator[tuple[Tensor, _Tokens]]:
    size = max(1, _LOGITS_PER_CHUNK // model.config.get_text_config().vocab_size)
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        shape = tokens.shape and SamplingShape(tokens.shape.shaper, tokens.shape.places[part])
        yield hidden[part], _Tokens(tokens.labels[part], tokens.temperatures[part], shape)


def _score_chunk(model: PreTrainedModel, hidden: Tensor, tokens: _Tokens, *, directions: int) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies, and `directions` of: d logprob / d hidden, d entropy / d hidden."""
    with torch.set_grad_enabled(directions > 0):
        hidden = hidden.detach().requires_grad_(directions > 0)
        logits = _shaped_logits(model, hidden, tokens)
    chosen, entropies, slopes = _scores_and_slopes(logits.detach(), tokens, directions)
    found = [
        torch.autograd.grad(logits, hidden, slope.to(logits.dtype), retain_graph=slope is not slopes[-1])[0]
        for slope in slopes
    ]
    return chosen, entropies, *((direction / -tokens.temperatures[:, None]).to(hidden.dtype) for direction in found)


def _chunk_gradients(
    model: PreTrainedModel, hidden: Tensor, tokens: _Tokens, head: list[nn.Parameter], gradients: list[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of the hidden states and of the head, by those of log-probabilities and maybe of entropies."""
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_()
        logits = _shaped_logits(model, hidden, tokens)
    _, _, slopes = _scores_and_slopes(logits.detach(), tokens, len(gradients))
    of_logits = torch.zeros_like(slopes[0])
    for slope, gradient in zip(slopes, gradients, strict=True):
        of_logits.addcmul_(slope, gradient[:, None] / -tokens.temperatures[:, None])
    return torch.autograd.grad(logits, [hidden, *head], of_logits.to(logits.dtype))


def _scores_and_slopes(logits: Tensor, tokens: _Tokens, slopes: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(K,) log-probabilities and entropies, and `slopes` of their (K, V) derivatives by minus logits over temperature.

    The derivatives by logits over temperature: of the one, 1 for the chosen token minus probs; of the other,
    -probs * (logp + entropy).
    """
    labels, temperatures, shape = tokens
    rows = torch.arange(len(labels), device=labels.device)
    logp = logits.float() / temperatures[:, None]
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
    found = [probs * (logp + entropies[:, None])] if slopes > 1 else []
    if slopes:
        probs[rows, labels] -= 1
        found = [probs, *found]
    return chosen, entropies, found


def _shaped_logits(model: PreTrainedModel, hidden: Tensor, tokens: _Tokens) -> Tensor:
    logits = _logits(model, hidden)
    if tokens.shape is None:
        return logits
    return tokens.shape.shaper.before_temperature(logits.float(), tokens.shape.places)


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The head's output as in the model's own forward pass: Cohere and Granite scale it, Gemma caps it."""
    head = _head(model)
    config = model.config.get_text_config()
    logits: Tensor = head(hidden.to(next(head.parameters()).dtype))
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def fully_scored(token_ids: tuple[int, ...], adapter: str) -> Sample:
    """Return a sample in which every token but the first is scored, at temperature 1."""
    n = len(token_ids)
    mask, zeros, ones = ((0,) + (1,) * (n - 1))[:n], (0.0,) * n, (1.0,) * n
    return Sample("", "", token_ids, mask, zeros, zeros, ones, adapter=adapter)


def logprobs_of(
    samples: Sequence[Sample], cost: TreeCost, score: Callable[[MicroBatch], ScoredTokens]
) -> list[list[float]]:
    """Return a log-probability for each token of each sample, as it was sampled; 0.0 for context.

    It is -inf where the way of sampling leaves a token out.
    """
    found = [[0.0] * len(sample.token_ids) for sample in samples]
    numbered = [replace(s, rollout_id=str(i)) for i, s in enumerate(samples) if s.trained_tokens]
    for micro_batch in micro_batches(numbered, cost):
        for sample, values in zip(micro_batch.samples, score(micro_batch).logprobs.tolist(), strict=True):
            found[int(sample.rollout_id)] = values[: len(sample.token_ids)]
    return found
