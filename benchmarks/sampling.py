"""Are the ratios 1 with unchanged weights? Samples from a real vLLM in float32 with each way to sample, and scores.

For each way it prints the mean ratio of the trainer's probability to the sampler's, the KL, the share of tokens whose
ratio is outside of the clip range, and the share of tokens left out: once with the temperature alone, and once with all
that the trainer computes again (docs/training.md). It ends with an error if a mean ratio is then not 1.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import Page, option
from servers import Server, free_port

from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.commands.vllm import vllm_program
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.records import ModelCall
from lightning_proxy.core.tokens import Tokens
from lightning_proxy.proxy.dialects.as_chat.recorded import as_chat
from lightning_proxy.proxy.dialects.chat import ChatApi
from lightning_proxy.serving.vllm import VllmServer, operator_session
from lightning_proxy.trainer.collect.sampled import Sampled
from lightning_proxy.trainer.rows.prefix_tree import micro_batches
from lightning_proxy.trainer.rows.samples import SamplingOf, rollout_samples
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Sample, Sampling

Json = dict[str, Any]
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
       "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["city", "people"], "additionalProperties": False}  # fmt: skip
# Two sums with their calls, so that a small model makes one, too; at this temperature it makes mistakes.
CALLED = [
    {"role": role, "content": content.format(a=a, b=b, c=a + b)}
    for a, b in ((2, 3), (41, 7))
    for role, content in (
        ("user", "What is {a}+{b}?"),
        ("assistant", '<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'),
        ("user", "The tool says {c}."),
        ("assistant", "It is {c}."),
    )
]
CALLING: Json = {"messages": [*CALLED, {"role": "user", "content": "What is 17+25?"}], "temperature": 1.3}
WAYS: dict[str, Json] = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "top_p 0.7": {"top_p": 0.7},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 20": {"top_k": 20},
    "min_p 0.1": {"min_p": 0.1},
    "temperature 0.7, top_p 0.8, top_k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "repetition_penalty 1.2": {"repetition_penalty": 1.2},
    "frequency_penalty 0.5, presence_penalty 0.5": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {"260": 3.0, "28": -5.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(2, 2000))},
    "min_tokens 30": {"min_tokens": 30},
    "response_format json_object": {"response_format": {"type": "json_object"}},
    "response_format json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    },
    "structured_outputs choice": {"structured_outputs": {"choice": ["Paris is large.", "Paris is small."]}},
    "structured_outputs regex": {"structured_outputs": {"regex": "[A-Z][a-z]{3,9} (is|was) [a-z ]{3,30}"}},
    "tools, not strict": {"tools": [TOOL]},
    "tools, strict": {"tools": [STRICT]},
    "tools, not strict, called": {"tools": [TOOL], **CALLING},
    "tools, strict, called": {"tools": [STRICT], **CALLING},
    "tools, parallel_tool_calls false, called": {"tools": [TOOL], "parallel_tool_calls": False, **CALLING},
    "tool_choice required": {"tools": [TOOL], "tool_choice": "required"},
    "tool_choice named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    "json_schema, top_p 0.9, repetition_penalty 1.1": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
        "top_p": 0.9, "repetition_penalty": 1.1,
    },
}  # fmt: skip
ASKED = ("Tell me of a city and its people.", "What is 17+25? Use your tools.", "Say hello to Ada.")


TOLERANCE = 0.005


class Measured(NamedTuple):
    """Of the sampled tokens: mean ratio and KL, the shares outside of the clip range and left out."""

    ratio: float
    kl: float
    clipped: float
    left_out: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's directory; the demo's by default")
    parser.add_argument("--url", help="a vLLM that runs already, as http://127.0.0.1:8100/v1")
    parser.add_argument("--template", type=Path, default=Path(__file__).parent.parent / "examples/tools.jinja")
    parser.add_argument("--answers", type=int, default=12, help="for each way")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--only", default="", help="ways whose names match this regular expression")
    option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        config = _config(args.model or prepare_model(cache_directory()), Path(scratch), args.template)
        with _vllm(config, args.url, Path(scratch)) as url:
            true = asyncio.run(_measure(config, url, args))
    sys.exit(None if true else f"a mean ratio is further than {TOLERANCE} from 1")


async def _measure(config: Config, url: str, args: argparse.Namespace) -> bool:
    """Whether every mean ratio is 1 to within the tolerance."""
    trainer = LightningTrainer(config.trainer, config.policy)
    rows, true = [], True
    async with operator_session() as session:
        server = VllmServer(session, url, {})
        for name, more in WAYS.items():
            if re.search(args.only, name):
                calls = await _sampled(server, more, args.answers, args.tokens)
                sampled = Sampled(server, as_chat)
                await sampled.look(calls)
                before = _measured(trainer, calls, lambda call: Sampling(call.temperature))
                after = _measured(trainer, calls, sampled.of)
                rows.append((name, *_cells(before), *_cells(after), f"{after.left_out:.1%}"))
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
                true = true and abs(after.ratio - 1) <= TOLERANCE
    page = Page("Ratios of unchanged weights, by how an answer is sampled")
    head = ("before: ratio", "KL", "clipped", "after: ratio", "KL", "clipped", "tokens left out")
    page.table("", ("sampled with", *head), rows)
    page.save(args.page)
    return true


async def _sampled(server: VllmServer, more: Json, answers: int, tokens: int) -> list[ModelCall]:
    model = await server.base_model()

    async def one(number: int) -> ModelCall:
        asked: Json = {"messages": [{"role": "user", "content": ASKED[number % len(ASKED)]}], "max_tokens": tokens}
        request = {**asked, "seed": number, **more}
        sent, _ = ChatApi("chat").inject(request | {"model": model})
        answer = await server._read("/v1/chat/completions", dict, sent)
        found = Tokens()
        found.add(answer)
        return _call(number, request, found)

    return list(await asyncio.gather(*(one(number) for number in range(answers))))


def _call(number: int, request: Json, found: Tokens) -> ModelCall:
    reason = found.untrainable_reason("ok", request)
    return ModelCall(
        call_id=str(number), rollout_id=str(number), seq=0, agent=None, endpoint="chat/completions", status="ok",
        model=None, policy_version=0, policy_versions=(0,), request=request, response=None,
        prompt_token_ids=found.prompt_token_ids, choices=found.choices, usage=found.usage, tool_calls=(), reward=None,
        trainable=reason is None, untrainable_reason=reason, error=None, http_status=200, started_at=0.0, ttft_ms=None,
        latency_ms=None, upstream=None, extends=None, superseded_by=None,
    )  # fmt: skip


def _measured(trainer: LightningTrainer, calls: Sequence[ModelCall], sampled: SamplingOf) -> Measured:
    log_ratios, config = _log_ratios(trainer, _rows(calls, sampled)), trainer.settings
    ratios = log_ratios.exp()
    return Measured(
        ratio=float(ratios.mean()),
        kl=float((ratios - 1 - log_ratios).mean()),
        clipped=float(((ratios < 1 - config.clip_low) | (ratios > 1 + config.clip_high)).float().mean()),
        left_out=1 - len(log_ratios) / sum(len(call.response_token_ids) for call in calls),
    )


def _cells(measured: Measured) -> str:
    return f"{measured.ratio:.4f}", f"{measured.kl:.5f}", f"{measured.clipped:.1%}"


def _rows(calls: Sequence[ModelCall], sampled: SamplingOf) -> list[Sample]:
    made = (rollout_samples([c], [1.0], task_id="t", max_tokens=10**6, sampled=sampled) for c in calls)
    return [sample for rows in made for sample in rows.samples]


@torch.no_grad()
def _log_ratios(trainer: LightningTrainer, samples: Sequence[Sample]) -> torch.Tensor:
    """The log-ratios of the sampled tokens, without those that the policy would not sample."""
    found: list[float] = []
    for batch in micro_batches(samples, trainer._cost):
        for sample, row in zip(batch.samples, trainer._score(batch).logprobs.tolist(), strict=True):
            pairs = [(a, b) for a, b, m in zip(row, sample.logprobs, sample.mask, strict=False) if m]
            found += [a - b for a, b in pairs if not math.isinf(a)]
    return torch.tensor(found)


def _config(model: Path, scratch: Path, template: Path) -> Config:
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(template)]
    return Config.model_validate({
        "policy": {"model": str(model), "directory": str(scratch), "publish": "merged"},
        "vllm": {"port": free_port(), "max_model_len": 1024, "extra_args": tools},
        "trainer": {"report_to": []},
    })  # fmt: skip


@contextmanager
def _vllm(config: Config, url: str | None, scratch: Path) -> Iterator[str]:
    if url is not None:
        yield url
        return
    program = vllm_program(config)
    server = Server(program.argv, config.vllm.port, env=program.env, log=scratch / "vllm.log", patience_s=300.0)
    try:
        yield f"{server.url}/v1"
    finally:
        server.stop()


if __name__ == "__main__":
    main()
