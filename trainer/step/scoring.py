"""Log-probabilities and entropies of tokens under a causal language model, without keeping all logits.

Each shared prefix is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from ...core.errors import ConfigError
from ..rows.prefix_tree import PrefixTree, padded_tree
from ..types import Sample, Sampling
from .shaping import SampledPlace, Shaper, truncate
from .tree_attention import FLEX_BLOCK, TreeMask, use_tree_attention

DEFAULT_SAMPLE = 4096  # tokens, if the model does not say how many it can take
_LOGITS_PER_CHUNK = 2**24  # 64 MiB in float32; larger pieces miss a CPU's caches and are slower
_LEAST = -1e4  # in place of a log-probability of -inf in an entropy, where it is multiplied by 0


class ScoredTokens(NamedTuple):
    """Scores of tokens, (B, T); 0 where a token is not scored. `entropies` have a gradient if requested.

    A log-probability is -inf if the sampling parameters exclude the token under these weights, or if the grammar of its
    answer cannot be replayed up to it.
    """

    logprobs: Tensor
    entropies: Tensor


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

    With `results`, also score what tools wrote. `model` is the bare causal LM, perhaps with LoRA layers. Without
    `shaper`, only temperatures are applied.
    """
    hidden = _hidden_states(model, tree)
    # Siblings that sampled the same token in the same place in the same way share one score.
    places = list(_places(samples, tree, results=results))
    unique = {key: (row, column) for key, row, column in places}
    numbers = {key: i for i, key in enumerate(unique)}
    nodes, labels, temperatures, ways = (torch.tensor(x, device=hidden.device) for x in zip(*unique, strict=True))
    shaped = shaper.places(samples, [*unique.values()]) if shaper is not None and ways.any() else None
    tokens = _Tokens(labels, temperatures, shaper, shaped)
    found = token_scores(hidden[nodes], model, tokens, entropy_gradient)
    back, rows, columns = torch.tensor([(numbers[k], *place) for k, *place in places], device=hidden.device).T
    shape = (len(samples), max(len(s.token_ids) for s in samples))
    return ScoredTokens(*(x.new_zeros(shape).index_put((rows, columns), x[back]) for x in found))


def _places(
    samples: Sequence[Sample], tree: PrefixTree, *, results: bool
) -> Iterator[tuple[tuple[int, int, float, int], int, int]]:
    """Yield a key for each token to score, and its place in (B, T). Tokens with equal keys share one score.

    The key is the node that predicts the token, the token, the temperature, and a number for how and where its answer
    was sampled (0 if only by temperature).
    """
    known: dict[tuple[int, Sampling], int] = {}
    for row, (sample, path) in enumerate(zip(samples, tree.paths, strict=True)):
        ways, scored = [0] * len(sample.mask), list(sample.mask)
        for start, end, sampling in sample.shaped:
            ways[start:end] = [known.setdefault((start, sampling), len(known) + 1)] * (end - start)
        for start, end in sample.results if results else ():
            scored[start:end] = [1] * (end - start)
        nodes = [0, *path.tolist()]
        keys = zip(nodes, sample.token_ids, sample.temperatures, ways, strict=True)
        yield from ((key, row, column) for column, key in enumerate(keys) if scored[column])


def check_tree_support(config: PreTrainedConfig, max_tokens: int) -> None:
    """Raise ConfigError unless all layers have full attention, or a sliding window of at least `max_tokens`."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    if others := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"policy.model: only full or sliding-window attention is supported, not {sorted(others)}")
    if (window := _window(config)) and window < max_tokens:
        raise ConfigError(f"trainer.max_sample_tokens: {max_tokens} is over the model's attention window of {window}")


def longest_sample(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return how many tokens a sample may have: `wanted` (None: the attention window), at most the model's context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [wanted, context] if wanted else [context, _window(config)]
    return min((limit for limit in limits if limit), default=DEFAULT_SAMPLE)


def _window(config: PreTrainedConfig) -> int | None:
    """The size in tokens of the sliding window that some layers have; None if no layer has one."""
    text = config.get_text_config()
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    window: int | None = getattr(text, "sliding_window", None) if slides else None
    return window


def attention_cost(config: PreTrainedConfig, linear_parameters: int) -> float:
    """Return the work of attending from one node to another, in units of a node's work in the linear layers."""
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


class _Tokens(NamedTuple):
    """K next tokens, their temperatures, and how they were sampled if not by temperature alone."""

    labels: Tensor
    temperatures: Tensor
    shaper: Shaper | None = None
    places: Sequence[SampledPlace | None] | None = None


def token_scores(
    hidden: Tensor, model: PreTrainedModel, tokens: _Tokens, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return (K,) log-probabilities and entropies of tokens, in float32, from the (K, H) hidden states before them.

    The entropies have a gradient if requested. No logits are kept. A trained head's gradient sums over tokens, so its
    logits are recomputed in the backward pass.
    """
    compute: Callable[..., tuple[Tensor, Tensor]] = _scores
    if torch.is_grad_enabled():
        is_trained = any(parameter.requires_grad for parameter in _head(model).parameters())
        again = partial(checkpoint, _scores, use_reentrant=False, preserve_rng_state=False)
        compute = again if is_trained else _scores_and_slopes
    size, parts = max(1, _LOGITS_PER_CHUNK // model.config.get_text_config().vocab_size), []
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        places = tokens.places and tokens.places[part]
        chunk = _Tokens(tokens.labels[part], tokens.temperatures[part], tokens.shaper, places)
        parts.append(compute(model, hidden[part], chunk, entropy_gradient))
    logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs, entropies


def _scores_and_slopes(
    model: PreTrainedModel, hidden: Tensor, tokens: _Tokens, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Score a chunk and compute the gradients at once, since each score depends only on the hidden state of its row.

    Each score is returned as a linear function of the hidden state with its gradient as the slope.
    The slopes of the entropies cost one more pass through the head.
    """
    states = hidden.detach().requires_grad_()
    logprobs, entropies = _scores(model, states, tokens, entropy_gradient)

    def linear(score: Tensor, more_follow: bool) -> Tensor:
        (slope,) = torch.autograd.grad(score.sum(), states, retain_graph=more_follow)
        return score.detach() + ((hidden - states.detach()) * slope).sum(-1)

    return linear(logprobs, entropy_gradient), linear(entropies, False) if entropy_gradient else entropies


def _scores(model: PreTrainedModel, hidden: Tensor, tokens: _Tokens, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a chunk."""
    logits, places = _logits(model, hidden), tokens.places
    if places is not None and tokens.shaper is not None:
        logits = tokens.shaper.before_temperature(logits.float(), places)
    found: tuple[Tensor, Tensor] = _Scores.apply(logits, tokens, entropy_gradient)
    return found


class _Scores(torch.autograd.Function):
    """Scores of (K, V) logits. Autograd would read all logits several times more for the same slopes.

    With respect to a logit over the temperature, the slope of a log-probability is 1 - p for its own token and -p for
    any other; that of an entropy H is -p (log p + H). Tokens that the sampling parameters exclude have p = 0. The slope
    of a log-probability of -inf means nothing: the loss removes such tokens.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: _Tokens, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        logp, places = (logits.float() / tokens.temperatures[:, None]).log_softmax(-1), tokens.places
        if places is not None:
            logp = truncate(logp, places)
        chosen, probs = logp.gather(1, tokens.labels[:, None])[:, 0], logp.exp()
        if places is not None:
            lost = torch.tensor([place is not None and place.is_lost for place in places], device=chosen.device)
            chosen, logp = chosen.masked_fill(lost, -torch.inf), logp.clamp(min=_LEAST)
        entropies = -torch.linalg.vecdot(probs, logp)
        ctx.tokens = tokens
        ctx.save_for_backward(probs, *((logp, entropies) if entropy_gradient else ()))
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return chosen, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor, None, None]:
        labels, temperatures = ctx.tokens.labels[:, None], ctx.tokens.temperatures[:, None]
        probs, *saved = ctx.saved_tensors
        slopes = torch.zeros((), device=probs.device)
        if of_entropies is not None and saved:
            logp, entropies = saved
            slopes = (logp + entropies[:, None]).mul_(probs).mul_(of_entropies[:, None] / -temperatures)
        if of_logprobs is not None:
            by_token = of_logprobs[:, None] / temperatures
            slopes = (probs * -by_token).add_(slopes).scatter_add_(1, labels, by_token)
        return slopes, None, None


def _head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    return head


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The head's output, as in the model's own forward pass: Cohere and Granite scale it, Gemma caps it."""
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
