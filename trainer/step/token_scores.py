"""Log-probabilities and entropies of tokens by the hidden states before them, without keeping all logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .shaping import SampledPlace, Shaper, truncate

# So many logits are computed at a time (64 MiB in float32). Larger pieces miss a CPU's caches and are slower.
_LOGITS_PER_CHUNK = 2**24
# In place of a log-probability of -inf in an entropy, where it is multiplied by 0.
_LEAST = -1e4


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
