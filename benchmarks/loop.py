"""The demo's task learned twice on this machine, one after the other: `make bench-loop`, `--help` for its options.

- lightning-proxy: `lightning-proxy demo` as it is: vLLM, proxy, trainer and agents.
- TRL: GRPOTrainer with its own generation (transformers, no vLLM), on the same tasks, requests, rewards, model, LoRA,
  batch, rate and seed. All of them are read from the demo's files, its configuration and its agent.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

from report import Page, option

from lightning_proxy.commands.command_line import telemetry_off
from lightning_proxy.commands.demo.demo import CONFIG, EXAMPLE
from lightning_proxy.core.config.file import load_config

OURS, TRL = "lightning-proxy", "TRL"
SAMPLE, TRAIN, PUBLISH, VERIFY = "sample", "train", "save and load", "wait for verification"
ROWS = 10  # of a table of rewards
# Seconds from a step's end until its version is ...
STAGES = ("written to files", "loaded by vLLM and live", "the first call's answer", "proven by log-probabilities")
# Of each version: its step's end, when it went live, and the end of the first call that it alone answered.
PUBLISHED = """
SELECT versions.version, finished_at, versions.live_at, MIN(calls.started_at + calls.latency_ms / 1000)
FROM policy_versions AS versions JOIN steps ON steps.version = versions.version
LEFT JOIN calls ON calls.policy_version = versions.version AND calls.status = 'ok'
WHERE versions.live_at IS NOT NULL GROUP BY versions.version
"""
# Of each step: when its first rollout was opened, the last one rewarded, all claimed, and the weights trained.
STEPS = """
SELECT MIN(rollouts.created_at), MAX(rewarded_at), steps.created_at, steps.finished_at, metrics
FROM steps JOIN rollouts ON steps.step IN (rollouts.step, dropped_by)
WHERE steps.status = 'trained' GROUP BY steps.step ORDER BY steps.step
"""
NOTES = """\
Both take one optimizer step over 8 tasks × 8 rollouts, with advantages scaled in the group and the same optimizer.
Minutes count from the first training rollout. A step's seconds go from one batch's rewards to the next one's.

- lightning-proxy samples through agents of their own processes, the proxy and vLLM. A version is verified while it is
  sampled from. What is left of that is the wait for verification.
- TRL generates in the trainer's process, with the weights that it trains: nothing is saved, loaded or verified.
  Its ratios of probabilities are 1, so it corrects nothing. It trains in 8 passes of 8 padded rows.
- The loss is `cispo` here and `grpo` there: TRL's `cispo` weighs tokens alike. At ratios of 1 the gradients are equal.
- TRL draws the tasks in an order of its own.
""".splitlines()


@dataclass(frozen=True)
class Learned:
    """How a side learned: for each step its mean reward, the rollouts so far, and when the trainer had them.

    `start_s` passed before the first rollout. `parts`: the seconds from then to the same of the next step.
    """

    start_s: float
    rewards: Sequence[float]
    rollouts: Sequence[int]
    ready_s: Sequence[float]
    parts: Sequence[Mapping[str, float]]

    def part(self, name: str) -> float:
        return fmean(parts.get(name, 0.0) for parts in self.parts)

    @property
    def step_s(self) -> float:
        return fmean(sum(parts.values()) for parts in self.parts)

    def reward(self, steps: int, of: int) -> str:
        """The mean of the last `of` of the first `steps`."""
        return f"{fmean(self.rewards[max(0, steps - of) : steps]):.2f}" if steps else "-"


class Served(threading.Thread):
    """Notes, every 50 ms of a demo, which versions are in files and verified: later nothing says since when."""

    def __init__(self, store: Path) -> None:
        super().__init__(daemon=True)
        self._store, self._stopped = store, threading.Event()
        self.written, self.proven = dict[int, float](), dict[int, float]()

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{self._store}?mode=ro", uri=True)) as store:
                for version, path, verified in store.execute("SELECT version, path, verified FROM policy_versions"):
                    if path and version not in self.written:
                        with suppress(OSError):  # its directory is renamed once it is whole
                            self.written[version] = Path(path).stat().st_mtime
                    if verified:
                        self.proven.setdefault(version, time.time())

    def stop(self) -> Iterator[Sequence[float | None]]:
        """For each version, the seconds from its step's end to each of `STAGES`, None where it did not come to it."""
        self._stopped.set()
        self.join()
        with closing(sqlite3.connect(self._store)) as store:
            for version, trained, live, answered in store.execute(PUBLISHED):
                ends = (self.written.get(version), live, answered, self.proven.get(version))
                yield [end and end - trained for end in ends]


def learn_by_demo(directory: Path, steps: int, model: Path | None) -> tuple[Learned, Sequence[Sequence[float | None]]]:
    """Return how the demo learned, and for each version the seconds until each of `STAGES`."""
    options = ["--steps", str(steps), "--dir", str(directory), *(["--model", str(model)] if model else [])]
    started, served = time.time(), Served(directory / "lightning.db")
    served.start()
    subprocess.run([sys.executable, "-m", "lightning_proxy.cli", "demo", *options], check=True)
    with closing(sqlite3.connect(directory / "lightning.db")) as store:
        steps_taken = list(store.execute(STEPS))
    first, metrics = steps_taken[0][0], [json.loads(text) for *_, text in steps_taken]
    parts = [
        {TRAIN: trained - claimed, PUBLISH: opened - trained, SAMPLE: rewarded - opened, VERIFY: following - rewarded}
        for (_, _, claimed, trained, _), (opened, rewarded, following, *_) in pairwise(steps_taken)
    ]
    ready = [claimed - first for _, _, claimed, *_ in steps_taken]
    rollouts = list(accumulate(int(one["rollouts"]) for one in metrics))
    return Learned(first - started, [one["reward_mean"] for one in metrics], rollouts, ready, parts), [*served.stop()]


def learn_by_trl(directory: Path, steps: int) -> Learned:
    """Let TRL learn what the demo in `directory` learned."""
    started = time.perf_counter()
    trainer = trl_trainer(directory, steps)
    generate, times = trainer._generate_and_score_completions, []

    def timed(inputs: Any) -> Any:
        begin = time.perf_counter()
        result = generate(inputs)
        times.append((begin, time.perf_counter()))
        return result

    trainer._generate_and_score_completions = timed
    trainer.train()
    first = times[0][0]
    parts = [{SAMPLE: end - begin, TRAIN: begin - before} for (_, before), (begin, end) in pairwise(times)]
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    rollouts = [trainer.args.generation_batch_size * (n + 1) for n in range(len(times))]
    return Learned(first - started, rewards, rollouts, [end - first for _, end in times], parts)


def trl_trainer(directory: Path, steps: int) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from lightning_proxy.trainer.rate import rate_of
    from lightning_proxy.trainer.weights import load_model, lora_config, uses_autocast, weight_dtype

    config = load_config(directory / CONFIG)
    settings, path = config.trainer, str(config.policy.model)
    sys.path.insert(0, str(EXAMPLE))
    agent = import_module("demo_agent")
    tasks = [json.loads(line) for line in (directory / "tasks" / "train.jsonl").read_text().splitlines()]
    requests = [request(agent, task) for task in tasks]

    def reward(completions: Any, a: Sequence[int], b: Sequence[int], **_: Any) -> list[float]:
        sums = map(sum, zip(a, b, strict=True))
        return [agent.score(answer["content"], right) for (answer,), right in zip(completions, sums, strict=True)]

    model, tokenizer = load_model(path, weight_dtype(settings)), AutoTokenizer.from_pretrained(path)
    args = GRPOConfig(
        output_dir=str(directory / "trl"), use_cpu=not torch.cuda.is_available(), bf16=uses_autocast(settings),
        gradient_checkpointing=False, disable_dropout=True, max_grad_norm=settings.max_grad_norm, seed=settings.seed,
        learning_rate=rate_of(settings, model.config.hidden_size).value, lr_scheduler_type=settings.lr_scheduler,
        warmup_steps=settings.warmup_steps, report_to="none", save_strategy="no", disable_tqdm=True,
        loss_type="grpo", num_generations=settings.group_size, max_steps=steps, logging_steps=1,
        per_device_train_batch_size=settings.group_size, gradient_accumulation_steps=settings.tasks_per_step,
        temperature=requests[0]["temperature"], max_completion_length=requests[0]["max_tokens"],
    )  # fmt: skip
    dataset = Dataset.from_list([{"prompt": r["messages"], **task} for r, task in zip(requests, tasks, strict=True)])
    lora = lora_config(settings, model)
    return GRPOTrainer(model, reward, args, dataset, processing_class=tokenizer, peft_config=lora)


def request(agent: Any, task: Mapping[str, int]) -> Mapping[str, Any]:
    """What the agent asks of a model."""
    with patch.object(agent, "OpenAI") as client:
        agent.answer(task["a"], task["b"])
    return client.return_value.chat.completions.create.call_args.kwargs


def seconds(ours: Learned, trl: Learned) -> Iterator[Sequence[str]]:
    for name in (TRAIN, PUBLISH, SAMPLE, VERIFY):
        yield name, *(f"{one.part(name):.1f} ({one.part(name) / one.step_s:.0%})" for one in (ours, trl))
    yield "a step", f"**{ours.step_s:.1f}**", f"**{trl.step_s:.1f}**, {trl.step_s / ours.step_s:.2f} times as long"
    yield "start, before the first training rollout", *(f"{one.start_s:.0f}" for one in (ours, trl))


def until_proven(versions: Sequence[Sequence[float | None]]) -> Iterator[Sequence[str]]:
    for stage, found in zip(STAGES, zip(*versions, strict=True), strict=True):
        known = [value for value in found if value is not None]
        if known:
            yield stage, f"{median(known):.1f}", f"{min(known):.1f} to {max(known):.1f}", str(len(known))


def by_rollouts(ours: Learned, trl: Learned, every: int) -> Iterator[Sequence[str]]:
    for step in range(every, min(len(ours.rewards), len(trl.rewards)) + 1, every):
        rollouts = f"{ours.rollouts[step - 1]}, {trl.rollouts[step - 1]}"
        yield rollouts, *(one.reward(step, every) for one in (ours, trl))


def by_minutes(ours: Learned, trl: Learned, every: int) -> Iterator[Sequence[str]]:
    for n in range(1, ROWS + 1):
        mark = max(ours.ready_s[-1], trl.ready_s[-1]) * (n / ROWS)
        taken = [(one, sum(at <= mark for at in one.ready_s)) for one in (ours, trl)]
        yield f"{mark / 60:.1f}", *(f"{one.reward(steps, every)} ({steps})" for one, steps in taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each; 2 at least")
    parser.add_argument("--quick", action="store_true", help="two steps, to see that it works")
    parser.add_argument("--dir", type=Path, default=Path("lightning-loop"), help="the demo's; it is emptied first")
    parser.add_argument("--model", type=Path, help="in place of the demo's")
    option(parser)
    options = parser.parse_args()
    steps, directory = 2 if options.quick else options.steps, options.dir.absolute()
    # Read when torch is loaded: threads wait for each other as those of the demo's trainer do.
    os.environ.update({"OMP_WAIT_POLICY": "PASSIVE"} | telemetry_off())
    (ours, versions), trl = learn_by_demo(directory, steps, options.model), learn_by_trl(directory, steps)
    page = Page("The demo compared with TRL's own loop")
    every, head = max(1, steps // ROWS), (OURS, TRL)
    page.text(NOTES)
    page.table("Seconds of a step, means:", ("", *head), seconds(ours, trl))
    head_of = ("a version is", "median", "least to most", "versions")
    page.table("Seconds after the end of the step that made it:", head_of, until_proven(versions))
    page.table(f"Mean reward by rollouts, each of {every} steps:", ("rollouts", *head), by_rollouts(ours, trl, every))
    page.table("Mean reward by minutes (steps so far):", ("minutes", *head), by_minutes(ours, trl, every))
    (directory / "steps.json").write_text(json.dumps({OURS: asdict(ours), TRL: asdict(trl)}))
    page.save(options.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
