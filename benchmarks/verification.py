"""Does publishing notice a server that serves old weights? `python benchmarks/verification.py --help`.

A real vLLM in bfloat16 on a CPU, with LoRA, gets the adapter of one optimizer step after the other. Its answers are
compared with the trainer's weights twice: as the product does after publishing them, where an alarm is false; and as if
the next step's adapter had been published and these, the stale ones, were still served, where silence is a miss.
`--keep FILE` writes what was measured, and `--from FILE` judges it again without measuring.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from servers import Server, free_port
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_proxy.commands.vllm import vllm_program
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.policy.operator import operator_headers
from lightning_proxy.proxy.policy.vllm import VllmServer, operator_session
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample

RATES = (2e-4, 5e-5, 2e-5, 5e-6, 1e-6)
TRAINED = 4  # answers of each publication
PROMPT, VOCABULARY = 8, 1000


class Publication(NamedTuple):
    """Log-probabilities of each answer's tokens: as served, by the trainer's weights, and by those one step later."""

    rate: float
    served: list[list[float]]
    ours: list[list[float]]
    later: list[list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's directory; by default one with random weights")
    parser.add_argument("--publications", type=int, default=40, help="for each learning rate")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--keep", type=Path, help="write what was measured there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, (args.keep or Path("/dev/null")).open("w") as kept:
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
            await server.load_adapter(name, str(directory))
            answers = await asyncio.gather(*(server.sample(name, prompt, args.tokens) for prompt in chosen))
            await server.unload_adapter(name)
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
        "vllm": {"port": free_port(), "max_model_len": 512, "dtype": "bfloat16", "kv_cache_gib": 1},
        "trainer": {"report_to": [], "dtype": "bfloat16", "learning_rate": rate},
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
