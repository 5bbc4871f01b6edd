"""The tokens of answers in a terminal."""

from __future__ import annotations

from lightning_proxy.commands.show.tokens import token_lines


def test_tokens_without_a_log_probability_are_shown() -> None:
    run = {"seq": 0, "step": None, "advantage": None, "token_ids": [1, 2], "logprobs": [-0.1], "texts": ["a", "b"]}
    assert str([*token_lines([run])][1]) == "a-0.1 b- "
