"""Gives recorded calls the tokens to learn from by imitation. No torch.

What the policy sampled keeps its exact tokens. An answer of another model has none of the policy's. The policy's chat
template shows its messages, once, and the answer's tokens are what it adds to the prompt.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from ...core.records import ModelCall
from ...core.tokens import NO_TOKEN_IDS, NOT_THE_POLICY
from ...trainer.rows.rendered import CANNOT_BE_SHOWN, as_shown, shown, tokens_of
from .rollouts import has_own_tokens, with_tokens


def as_trace(call: ModelCall, tokenizer: PreTrainedTokenizerBase) -> ModelCall | None:
    """Return the call with tokens to imitate, at log-probability 0; unchanged if it is of no use.

    None if it has to be tokenised, and the chat template does not show its answer after the prompt.
    """
    if has_own_tokens(call):
        return with_tokens(call, call.prompt_token_ids, call.response_token_ids)
    if call.untrainable_reason not in (NOT_THE_POLICY, NO_TOKEN_IDS) or not call.is_decision or len(call.choices) > 1:
        return call
    tokens = _tokenised(call, tokenizer) if call.endpoint == "chat/completions" else None
    return tokens and with_tokens(call, *tokens)


def _tokenised(call: ModelCall, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """The tokens of prompt and answer, tokenised apart, as the policy would see the one and sample the other."""
    try:
        (choice,), messages = call.response["choices"], [as_shown(m) for m in call.request["messages"]]
        prompt = shown(tokenizer, call.request, messages, add_generation_prompt=True)
        text = shown(tokenizer, call.request, [*messages, as_shown(choice["message"])])
        cut = choice.get("finish_reason") == "length"
    except CANNOT_BE_SHOWN:
        return None
    if not text.startswith(prompt):
        return None
    answer = tokens_of(tokenizer, text[len(prompt) :])
    return tokens_of(tokenizer, prompt), _ended(answer, tokenizer.eos_token_id, cut=cut)


def _ended(ids: list[int], end: int | None, *, cut: bool) -> list[int]:
    """The answer up to and with the token that ends it; without that token if it was `cut` off."""
    if end is None:
        return ids
    last = len(ids) - 1 - ids[::-1].index(end) if end in ids else len(ids)
    return ids[:last] + ([] if cut else [end])
