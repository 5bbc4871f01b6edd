"""An independent float64 computation of a step's loss: one answer at a time, nothing shared, formulas from papers.

Rows and settings are as in `door.py`. Nothing here comes from the product.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

Json = dict[str, Any]
Weights = dict[str, Tensor]


class Policy:
    """A model in float64 with weights of its own: all of them, or LoRA's A and B added as scale · B A."""

    def __init__(self, model: Path, weights: Mapping[str, Tensor], scale: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
        self._model.requires_grad_(False)
        self._scale = scale
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}

    def logits(self, prompt: Sequence[int], answer: Sequence[int], *, base: bool = False) -> Tensor:
        """Return the logits that each token of an answer is drawn from: (tokens, vocabulary)."""
        ids = {"input_ids": torch.tensor([[*prompt, *answer]]), "use_cache": False}
        found = functional_call(self._model, {} if base else self._changed(), (), ids)
        logits: Tensor = found.logits[0, len(prompt) - 1 : -1]
        return logits

    def _changed(self) -> Weights:
        held = dict(self._model.named_parameters())
        if not any(".lora_A." in name for name in self.weights):
            return self.weights
        low, high = ".lora_A.weight", ".lora_B.weight"
        names = [name.removesuffix(low) for name in self.weights if name.endswith(low)]
        return {
            f"{name}.weight": held[f"{name}.weight"]
            + self._scale * self.weights[name + high] @ self.weights[name + low]
            for name in names
        }

    def score(self, answer: Json, *, base: bool = False) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the entropy of each token of an answer, as it was sampled."""
        logits, ids = self.logits(answer["prompt"], answer["ids"], base=base), answer["ids"]
        logprobs, entropies = [], []
        for i, token in enumerate(ids):
            of_all = shaped(logits[i], answer.get("sampling", {}), answer["prompt"], ids[:i])
            kept = of_all[~of_all.isneginf()]
            logprobs.append(of_all[token])
            entropies.append(-(kept.exp() * kept).sum())
        return torch.stack(logprobs), torch.stack(entropies)


def shaped(logits: Tensor, sampling: Json, prompt: Sequence[int], before: Sequence[int]) -> Tensor:
    """Return the log-probabilities that vLLM samples from. It applies its parameters in this order."""
    logits = logits.clone()
    if "allowed" in sampling:
        allowed = torch.full_like(logits, -math.inf)
        allowed[sampling["allowed"]] = 0.0
        logits = logits + allowed
    for token, value in sampling.get("bias", ()):
        logits = logits + value * torch.nn.functional.one_hot(torch.tensor(token), len(logits))
    if (penalty := sampling.get("repetition_penalty", 1.0)) != 1.0:
        seen = torch.zeros(len(logits), dtype=torch.bool)
        seen[[*prompt, *before]] = True
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    counts = torch.bincount(torch.tensor([*before], dtype=torch.long), minlength=len(logits)).double()
    logits = logits - sampling.get("frequency_penalty", 0.0) * counts
    logits = logits - sampling.get("presence_penalty", 0.0) * (counts > 0)
    found = (logits / sampling.get("temperature", 1.0)).log_softmax(-1)
    if least := sampling.get("min_p"):
        found = found.masked_fill(found < found.max() + math.log(least), -math.inf)
    if most := sampling.get("top_k"):
        found = found.masked_fill(found < found.topk(most).values[-1], -math.inf)
    if (nucleus := sampling.get("top_p", 1.0)) < 1:
        values, order = found.log_softmax(-1).sort(descending=True)
        outside = order[values.exp().cumsum(0) - values.exp() >= nucleus]
        found = found.index_fill(0, outside, -math.inf)
    return found.log_softmax(-1)


def cap(c: Json) -> float:
    return math.inf if c["importance_cap"] is None else float(c["importance_cap"])


def terms(logprobs: Tensor, old: Tensor, advantages: Tensor, c: Json) -> Tensor:
    """Return the loss of each token of one answer, before weighting."""
    ratios = (logprobs - old).exp()
    held = ratios.detach()
    if c["loss"]:
        p, q = logprobs.detach().exp(), old.exp()
        if c["loss"] == "dppo_tv":  # arXiv 2602.04879, equation 12
            kept = (p - q) * advantages.sign() <= c["mask"]["tv"]
        elif c["loss"] == "dppo_kl":
            divergence = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
            kept = ((p - q) * advantages <= 0) | (divergence <= c["mask"]["kl"])
        else:  # icepop, arXiv 2510.18855
            assert c["loss"] == "icepop"
            kept = (held >= c["mask"]["ratio_low"]) & (held <= c["mask"]["ratio_high"])
        return -torch.where(kept, held * advantages * logprobs, 0.0)
    if c["importance_level"] == "sequence":  # GSPO, arXiv 2507.18071: the answer's geometric mean
        ratios = (logprobs - old).mean().exp().expand_as(logprobs)
    match c["loss_type"]:
        case "cispo":
            return -ratios.detach().clamp(max=cap(c)) * advantages * logprobs
        case "sapo":
            tau = torch.where(advantages > 0, 1.0, 1.05)
            return -torch.sigmoid(tau * (ratios - 1)) * 4 / tau * advantages
        case "vespo":
            log_w = (logprobs - old).detach().sum().clamp(math.log(1e-8), 20.0)
            k = torch.where(advantages >= 0, 2.0, 3.0)
            limit = torch.where(advantages >= 0, 3.0, 2.0)
            return -(limit + k * log_w - limit * log_w.exp()).exp() * advantages * logprobs
    low, high = 1 - c["clip_low"], 1 + c["clip_high"]
    bounded = ratios.clamp(max=max(cap(c), high))
    return -torch.minimum(bounded * advantages, ratios.clamp(low, high) * advantages)


def divisors(rows: Sequence[Json], c: Json) -> Iterator[float]:
    """Yield what the terms of each answer are divided by, apart from the number of rollouts. In the rows' order."""
    tokens, answers = Counter[str](), Counter[str]()
    for row in rows:
        answers[row["rollout"]] += len(row["answers"])
        tokens[row["rollout"]] += sum(len(answer["ids"]) for answer in row["answers"])
    mean = tokens.total() / len(tokens)
    by_loss = {"dapo": "token", "bnpo": "token", "dr_grpo": "limit", "luspo": "one"}
    rule = by_loss.get(c["loss_type"], "rollout") if c["weighting"] == "auto" else c["weighting"]
    for row in rows:
        for answer in row["answers"]:
            yield {
                "token": mean,
                "rollout": tokens[row["rollout"]],
                "sequence": answers.total() / len(answers) * len(answer["ids"]),
                "limit": c["max_sample_tokens"],
                "one": 1.0,
            }[rule]


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, c: Json) -> int:
    """Return how many tokens of one answer have a ratio beyond the limit that their advantage drives it to."""
    ratios = logprobs - old
    if c["importance_level"] == "sequence":
        ratios = ratios.mean().expand_as(ratios)
    low, high = 1 - c["clip_low"], 1 + c["clip_high"]
    if c["loss_type"] in ("cispo", "sapo", "vespo"):
        low, high = 0.0, cap(c)
    ratios = ratios.detach().exp()
    return int(((ratios < low) & (advantages < 0) | (ratios > high) & (advantages > 0)).sum())


def loss(policy: Policy, rows: Sequence[Json], compared: int, c: Json) -> tuple[Tensor, Counter[str]]:
    """Return the loss of an adapter's rows, and counts of tokens: `outside` of what its policy samples, and `clipped`.

    `compared`: the rollouts that were compared, over which the loss is averaged.
    """
    total, counts = torch.zeros((), dtype=torch.float64), Counter[str]()
    trained = sum(len(answer["ids"]) for row in rows for answer in row["answers"])
    results = [(row, answer) for row in rows for answer in row["answers"] if answer.get("result")]
    written = sum(end - start for _, answer in results for start, end in [answer["result"]])
    answers = [answer for row in rows for answer in row["answers"]]
    for answer, divisor in zip(answers, divisors(rows, c), strict=True):
        logprobs, entropies = policy.score(answer)
        inside = ~logprobs.isneginf()
        counts["outside"] += int((~inside).sum())
        if not inside.any():
            continue
        logprobs, old = logprobs[inside], torch.tensor(answer["logprobs"]).double()[inside]
        advantages = torch.full_like(old, answer["advantage"])
        if "teacher" in answer:
            gap = torch.tensor(answer["teacher"]["logprobs"]).double()[inside] - logprobs.detach()
            advantages = advantages + answer["teacher"]["weight"] * gap.clamp(-5.0, 5.0)
        counts["clipped"] += clipped(logprobs, old, advantages, c)
        of_tokens = terms(logprobs, old, advantages, c)
        if c["kl_coef"]:
            base = policy.score(answer, base=True)[0].detach()[inside]
            base = torch.where(base.isneginf(), logprobs.detach(), base)
            if c["kl_estimator"] == "k3":  # GRPO, arXiv 2402.03300, equation 4
                kl = (base - logprobs).exp() - (base - logprobs) - 1
            else:  # its gradient, ratio · (log p - log base) · ∇log p, is that of the reverse KL over what was sampled
                kl = (logprobs - old).exp().detach().clamp(max=cap(c)) * (logprobs - base) ** 2 / 2
            of_tokens = of_tokens + c["kl_coef"] * kl
        total = total + of_tokens.sum() / (compared * divisor)
        total = total - c["entropy"]["coef"] * entropies[inside].sum() / trained
    if c["context_loss"] == "echo":  # arXiv 2605.24517
        for _, answer in results:
            start, end = answer["result"]
            scored = policy.logits(answer["prompt"][:start], answer["prompt"][start:end]).log_softmax(-1)
            own = scored.gather(1, torch.tensor(answer["prompt"][start:end])[:, None])
            total = total - c["echo_weight"] / written * own.sum()
    return total, counts
