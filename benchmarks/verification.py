"""Does publishing notice a server that serves old weights? `python benchmarks/verification.py --help`.

A real vLLM in bfloat16 on a CPU, with LoRA, gets the adapter of one optimizer step after the other. Its answers are
compared with the trainer's weights twice: as the product does after publishing them, where an alarm is false; and as if
the next step's adapter had been published and these, the stale ones, were still served, where silence is a miss.
What was measured is kept in a file, which `--judge FILE` judges again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from report import Page, option
from servers import Server, free_port
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_proxy.commands.vllm import vllm_program
from lightning_proxy.core.config.root import Config
from lightning_proxy.serving.operator import operator_headers
from lightning_proxy.serving.vllm import VllmServer, operator_session
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample
from lightning_proxy.trainer.verify import MORE_ANSWERS, MORE_TOKENS, VERIFIED_TOKENS, WeightEvidence

RATES = (8e-4, 4e-4, 2e-4, 5e-5, 2e-5, 5e-6)
NOTES = """\
vLLM's log-probabilities must be nearer to the new weights' than to the old ones', by 3.5 standard deviations.
In bfloat16 a small step moves them less than rounding does; moved / noise is the ratio of their root mean squares.
Then no comparison of answers can tell, after up to 2,048 tokens. The name and the digest of the files that vLLM
reports decide instead, and the log says so.

A miss: the weights before were served, and answers did not show it.
A false alarm: the new weights were taken for the old."""
TRAINED = 4  # answers of each publication
PROMPT, VOCABULARY = 8, 1000
FIRST = 4  # prompts that are asked first: policy.verify_samples


Rows = list[list[float]]


class Publication(NamedTuple):
    """Log-probabilities of each answer's tokens: as served, by the trainer's weights, and by those one step later."""

    rate: float
    served: Rows
    ours: Rows
    later: Rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's directory; by default one with random weights")
    parser.add_argument("--publications", type=int, default=40, help="for each learning rate")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=MORE_TOKENS, help="of an answer, at most")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--keep", type=Path, default=Path("verification.jsonl"), help="write what was measured there")
    parser.add_argument("--judge", type=Path, nargs="*", help="measure nothing: judge what was measured before")
    option(parser)
    args = parser.parse_args()
    if args.judge is None:
        _measure_all(args)
    _show([Publication(*json.loads(line)) for file in args.judge or [args.keep] for line in file.open()], args.page)


def _show(publications: Sequence[Publication], file: Path | None) -> None:
    """A row of the table for each learning rate, and one for how far a step moves the log-probabilities."""
    groups: dict[str, Sequence[Publication]] = {}
    for rate in sorted({publication.rate for publication in publications}):
        groups[f"learning rate {rate:g}"] = [p for p in publications if p.rate == rate]
    for low, high in pairwise((0.0, 0.9, 1.0, 1.1, 1.25, math.inf)):
        groups[f"moved / noise {low:g} to {high:g}"] = [p for p in publications if low <= _moved(p) < high]
    groups["all"] = publications
    head = ("number", "moved / noise", "false alarms", "misses", "told by answers", "tokens asked for")
    page = Page("What verification notices in bfloat16")
    page.text(NOTES.splitlines())
    page.table("", ("publications", *head), (_row(name, some) for name, some in groups.items() if some))
    page.save(file)


def _row(name: str, publications: Sequence[Publication]) -> tuple[object, ...]:
    right = [_evidence(p.served, new=p.ours, old=p.later) for p in publications]
    stale = [_evidence(p.served, new=p.later, old=p.ours) for p in publications]
    moved, tokens = mean(map(_moved, publications)), mean(e.tokens for e in right)
    told, misses = sum(e.is_new for e in right), sum(not e.is_old for e in stale)
    alarms = sum(e.is_old for e in right)
    return name, len(right), f"{moved:.2f}", alarms, misses, told, f"{tokens:.0f}"


def _moved(publication: Publication) -> float:
    """How far a step moves log-probabilities, as the trainer computes them, beside how far the server is from it."""
    moved = _root_mean_square(publication.later, publication.ours)
    return moved / _root_mean_square(publication.served, publication.ours)


def _root_mean_square(one: Rows, other: Rows) -> float:
    return math.sqrt(mean((a - b) ** 2 for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)))


def _evidence(served: Rows, *, new: Rows, old: Rows) -> WeightEvidence:
    """What the product would find if it asked for these answers."""
    evidence, firsts = WeightEvidence(), range(FIRST)
    rounds = [[(row, 0, VERIFIED_TOKENS) for row in firsts]]
    rounds += [
        [(row, 0, MORE_TOKENS) for row in range(first, min(first + MORE_ANSWERS, len(served)))]
        for first in range(FIRST, len(served), MORE_ANSWERS)
    ]
    rounds[-1] += [(row, VERIFIED_TOKENS, MORE_TOKENS) for row in firsts]
    for parts in rounds:
        if evidence.may_become_clear:
            for row, start, end in parts:
                evidence.add(*(rows[row][start:end] for rows in (served, new, old)))
    return evidence


def _measure_all(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch, args.keep.open("w") as kept:
        model = args.model or _random_model(Path(scratch) / "model")
        config = _config(model, Path(scratch), args.rates[0])
        with _vllm(config, Path(scratch)) as url:
            for rate in args.rates:
                asyncio.run(_measure(_config(model, Path(scratch), rate), url, args, kept))


async def _measure(config: Config, url: str, args: argparse.Namespace, kept: Any) -> None:
    trainer, dice = LightningTrainer(config.trainer, config.policy), random.Random(0)
    headers = operator_headers(config.policy.directory)
    rate, directory = config.trainer.learning_rate, config.policy.directory / "adapter"
    async with operator_session() as session:
        server = VllmServer(session, url, headers)
        for number in range(args.publications):
            name = f"policy-{rate:g}-{number}"
            chosen = [[dice.randrange(3, VOCABULARY) for _ in range(PROMPT)] for _ in range(args.prompts)]
            trainer.save_weights(directory, merged=False)
            await server.load_adapters({name: str(directory)})
            answers = await asyncio.gather(*(server.sample(name, prompt, args.tokens) for prompt in chosen))
            await server.unload_adapters([name])
            shutil.rmtree(directory)
            rows = [[*prompt, *ids] for prompt, (ids, _) in zip(chosen, answers, strict=True)]
            served = [values for _, values in answers]
            ours = _scored(trainer, rows, served)
            trainer.step(_batch(number + 1, chosen[:TRAINED], answers[:TRAINED], dice))
            later = _scored(trainer, rows, served)
            kept.write(json.dumps(Publication(rate, served, ours, later)) + "\n")
            kept.flush()


def _scored(
    trainer: LightningTrainer, rows: Sequence[Sequence[int]], served: Sequence[Sequence[float]]
) -> list[list[float]]:
    """The answers' log-probabilities by the trainer's weights."""
    found = trainer.logprobs(rows)
    return [row[len(row) - len(own) :] for row, own in zip(found, served, strict=True)]


def _batch(step: int, prompts: Sequence[list[int]], answers: Sequence[Any], dice: random.Random) -> Batch:
    """The answers with an advantage each: what a step of GRPO gets."""
    samples = []
    for number, (prompt, (ids, logprobs)) in enumerate(zip(prompts, answers, strict=True)):
        before, advantage = [0] * len(prompt), dice.choice((-1.0, 1.0))
        samples.append(Sample(
            f"r{number}", "t", (*prompt, *ids), (*before, *[1] * len(ids)), (*before, *logprobs),
            (*before, *[advantage] * len(ids)), (*[1.0] * (len(prompt) + len(ids)),),
        ))  # fmt: skip
    return Batch(step, tuple(samples), tuple(sample.rollout_id for sample in samples))


def _random_model(directory: Path) -> Path:
    """Eight layers, so that rounding adds up as it does in a real model; small, because this CPU has no bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.08, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w1").save_pretrained(
        directory
    )
    return directory


def _config(model: Path, scratch: Path, rate: float) -> Config:
    return Config.model_validate({
        "policy": {"model": str(model), "directory": str(scratch), "publish": "lora"},
        "vllm": {"port": free_port(), "max_model_len": 512, "extra_args": ["--dtype", "bfloat16"], "kv_cache_gib": 1},
        "trainer": {"report_to": [], "dtype": "bfloat16", "learning_rate": rate, "threads": 1},
    })  # fmt: skip


@contextmanager
def _vllm(config: Config, scratch: Path) -> Iterator[str]:
    program = vllm_program(config)
    server = Server(program.argv, config.vllm.port, env=program.env, log=scratch / "vllm.log", patience_s=600.0)
    try:
        yield f"{server.url}/v1"
    finally:
        server.stop()


if __name__ == "__main__":
    main()
