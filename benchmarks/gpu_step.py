"""The trainer's step on models with random weights, for a machine with a GPU: `python benchmarks/gpu_step.py`.

It needs torch, transformers, peft, accelerate and what the settings are read with (pydantic, cronsim), but no vLLM, no
TRL, no network and no model. On a CPU it takes small shapes. Each case has a process of its own.

- step: tokens a second, and the peak of memory compared with what `lightning-proxy plan` computes.
- rounding: how far gradients in bfloat16 are from those in float32, on a small shape.
- tree: forward and backward over what rows share, with the mask's kernel, against rows that share nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Page, machine, option
from train import (
    PRESETS,
    Work,
    forget_peak,
    peak_bytes,
    recorded_calls,
    relative_difference,
    rows_of,
    save_random_model,
    synchronize,
)

from lightning_proxy.core.config.root import Config
from lightning_proxy.trainer.plan import shape_of, trainer_needs
from lightning_proxy.trainer.rows.prefix_tree import build_tree
from lightning_proxy.trainer.step.scoring import score
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch

CUDA = torch.cuda.is_available()
SMALL = "smollm2-135m"
CASES = [f"{model}:{weights}" for model in ("qwen2.5-1.5b", "qwen2.5-7b") for weights in ("lora", "full")]
SECONDS = 480


class Case:
    def __init__(self, directory: Path, model: str, work: Work, layers: int | None, **trainer: Any) -> None:
        shape = PRESETS[model]
        if layers:
            shape.num_hidden_layers, shape.layer_types = layers, ["full_attention"] * layers
        if not (directory / "model").exists():
            with torch.device("cuda" if CUDA else "cpu"):
                save_random_model(shape, directory / "model")
        settings = {"report_to": [], "max_tokens_per_batch": 8192, "max_sample_tokens": 8192, "max_grad_norm": 1e9}
        policy = {"model": str(directory / "model"), "directory": str(directory / "policy")}
        self.config = Config.model_validate({"policy": policy, "trainer": settings | trainer})
        self.trainer, self.shape = LightningTrainer(self.config.trainer, self.config.policy), shape
        torch.manual_seed(1)
        for name, parameter in self.trainer.model.named_parameters():
            if "lora_B" in name:  # it begins as zero: A would have no gradient
                torch.nn.init.normal_(parameter, std=0.02)
        self.rows = rows_of(recorded_calls(work, shape.vocab_size, seed=0), merged=True)
        self.batch = Batch(1, tuple(self.rows), tuple({row.rollout_id for row in self.rows}))

    def gradient(self) -> torch.Tensor:
        self.trainer.forward_backward(self.batch)
        grads = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        return torch.cat([grad.flatten().float().cpu() for grad in grads])

    def step(self) -> dict[str, float]:
        return self.trainer.step(self.batch)


def timed(rounds: int, work: Callable[[], object]) -> float:
    """The median of the seconds; a first round, in which kernels are compiled, does not count."""
    seconds = []
    for _ in range(rounds + 1):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def step(case: Case, rounds: int) -> dict[str, Any]:
    forget_peak()
    tokens = case.step()["computed_tokens"]
    peak, seconds, shape = peak_bytes(), timed(rounds, case.step), shape_of(case.shape.to_dict())
    assert shape is not None
    needs = trainer_needs(shape, case.config, min(8192, int(tokens)), checkpointing=False, on_cpu=not CUDA)
    return {"tokens": tokens, "seconds": seconds, "peak": peak / 2**30, "plan": sum(needs.values())}


def rounding(directory: Path, work: Work, layers: int) -> dict[str, Any]:
    found = [Case(directory, SMALL, work, layers, dtype=dtype).gradient() for dtype in ("bfloat16", "float32")]
    return {"differs": relative_difference(*found)}


def tree(case: Case, rounds: int) -> dict[str, Any]:
    model, rows, precision = case.trainer.policy_model, case.rows, partial(torch.autocast, enabled=CUDA)
    shared = build_tree([row.token_ids[:-1] for row in rows])

    def by_tree() -> None:
        with precision(model.device.type, torch.bfloat16):
            score(model, shared, rows).logprobs.sum().backward()

    def by_rows() -> None:
        for row in rows:  # all are as long, so there is nothing to pad; a pass each, as all of their logits may not fit
            ids, mask = (torch.tensor(x, device=model.device) for x in (row.token_ids, row.mask))
            with precision(model.device.type, torch.bfloat16):
                logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, mask[1:].bool()]
            logits.float().log_softmax(-1).gather(1, ids[1:][mask[1:].bool()][:, None]).sum().backward()

    return {"tree": timed(rounds, by_tree), "rows": timed(rounds, by_rows), "nodes": len(shared)}


def measured(case: str, options: argparse.Namespace) -> dict[str, Any]:
    work, layers = Work(*map(int, options.work.split(","))), options.layers
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if case == "rounding":
            return rounding(directory, work, layers or 4)
        model, _, weights = case.partition(":")
        if model == "tree":
            return tree(Case(directory, options.model or CASES[0].partition(":")[0], work, layers), options.rounds)
        return step(Case(directory, model, work, layers, weights=weights), options.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=PRESETS, help="this shape alone; default: of 1.5B and of 7B")
    parser.add_argument("--layers", type=int, help="of the model's; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", default="8,6,1000,100,100", help="siblings,turns,prompt,answered,observed")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    option(parser)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(options.case, options)))
        return 0
    cases = [f"{options.model}:{weights}" for weights in ("lora", "full")] if options.model else CASES
    ends, rows = time.monotonic() + SECONDS, dict[str, Any]()
    for case in ("rounding", "tree", *cases):
        command = [sys.executable, *sys.argv, "--case", case]
        try:
            left = max(1, ends - time.monotonic())
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=left)
            rows[case] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.SubprocessError:
            rows[case] = None
    page = Page("The trainer's step on random weights")
    page.text([f"On {torch.cuda.get_device_name() if CUDA else machine()}: {options.work}, {options.rounds} rounds."])
    page.table("A step:", ("case", "tokens", "tokens a second", "peak, GiB", "plan, GiB"), [
        (case, f"{r['tokens']:,.0f}", f"{r['tokens'] / r['seconds']:,.0f}", f"{r['peak']:.1f}", f"{r['plan']:.1f}")
        for case in cases if (r := rows[case])
    ])  # fmt: skip
    if row := rows["rounding"]:
        page.text([f"Gradients in bfloat16 differ from float32's by {row['differs']:.1e} of their length."])
    if row := rows["tree"]:
        ratio = row["rows"] / row["tree"]
        page.text([f"A pass over the tree of {row['nodes']:,} nodes: {row['tree']:.3f} s; over rows: {ratio:.1f} ×."])
    page.save(options.page)
    if failed := [case for case, row in rows.items() if row is None]:
        print(f"FAILED, or not done in {SECONDS} s: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
