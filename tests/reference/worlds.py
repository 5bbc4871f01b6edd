"""Random rows: conversations of several answers with tools' results between them, and rollouts that fork."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from reference.loss import Policy, shaped

Json = dict[str, Any]
VOCABULARY = 40
# An untied head and a tied one; norms of queries and keys; scaled logits; capped logits.
KINDS: dict[str, Json] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "granite": {"tie_word_embeddings": True, "logits_scaling": 2.0},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 7, "final_logit_softcapping": 3.0, "sliding_window": 4096},
}
SAMPLING: dict[str, Json] = {
    "plain": {},
    "warm": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 9, "temperature": 1.3},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "bias": {"bias": [[5, 2.0], [9, -3.0]]},
    "allowed": {"allowed": [*range(3, 30)], "temperature": 0.9},
    "mixed": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "frequency_penalty": 0.1},
}


def save_model(kind: str, directory: Path) -> Path:
    """Write a model of two layers with random weights."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.25, bos_token_id=0, eos_token_id=1,
        pad_token_id=1, **KINDS[kind],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1").save_pretrained(directory)
    return directory


class World:
    """Rows that `policies`, by adapter, might have sampled a while ago: `noise` is what their logits moved since."""

    def __init__(
        self, seed: int, policies: dict[str, Policy], sampling: Sequence[str] = ("plain",), noise: float = 0.3,
        *, results: bool = False, teacher: bool = False,
    ) -> None:  # fmt: skip
        self._random, self._policies, self._noise = random.Random(seed), policies, noise
        self._sampling, self._results, self._teacher = sampling, results, teacher

    def rows(self, rollouts: int = 5) -> list[Json]:
        """Return the rows of that many rollouts: one or two each, of one to three answers."""
        return [
            self._row(f"r{i}", adapter)
            for i in range(rollouts)
            for adapter in self._policies
            for _ in range(self._random.randint(1, 2))
        ]

    def _row(self, rollout: str, adapter: str) -> Json:
        shown, answers = self._tokens(3, 8), []
        for turn in range(self._random.randint(1, 3)):
            answer: Json = {"prompt": [*shown], "advantage": round(self._random.gauss(0, 1), 6)}
            if turn:
                added = self._tokens(2, 5)
                answer["prompt"] += added
                if self._results:
                    answer["result"] = [len(shown), len(shown) + len(added)]
            answer["sampling"] = SAMPLING[self._random.choice(self._sampling)]
            answer["ids"], answer["logprobs"] = self._sample(adapter, answer)
            if self._teacher:
                scores = [round(self._random.uniform(-8, 0), 6) for _ in answer["ids"]]
                answer["teacher"] = {"logprobs": scores, "weight": 0.3}
            answers.append(answer)
            shown = [*answer["prompt"], *answer["ids"]]
        return {"rollout": rollout, "adapter": adapter, "answers": answers}

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self._random.randrange(3, VOCABULARY) for _ in range(self._random.randint(least, most))]

    @torch.no_grad()
    def _sample(self, adapter: str, answer: Json) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        logprobs: list[float] = []
        for _ in range(self._random.randint(1, 6)):
            logits = self._policies[adapter].logits(answer["prompt"], [*ids, 0])[-1]
            noise = torch.tensor([self._random.gauss(0, self._noise) for _ in range(VOCABULARY)])
            found = shaped(logits + noise, answer["sampling"], answer["prompt"], ids)
            ids.append(self._random.choices(range(VOCABULARY), found.exp().tolist())[0])
            logprobs.append(float(found[ids[-1]].float()))
        return ids, logprobs
