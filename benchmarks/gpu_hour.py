"""The first hour on a GPU as one command: `make gpu-hour`, `--help` for its options.

1. Reverse-text as prime-rl has it: 20 steps of 8 texts x 16 rollouts, 128 tokens at most, all weights at 3e-6.
2. The calculator example with a model of 1.5B parameters.

Both are lessons of `examples/learn.py`: held-out tasks, training, held-out tasks again. Without a GPU, or with --small,
both run with SmolLM2-135M-Instruct, which imitates a teacher first, for one step: to see that all parts work.
At the end the figures are printed, as tables and as one line of JSON. What could not be measured is not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import cards
from report import Page, made, option

Json = dict[str, Any]
LEARN = Path(__file__).parents[1] / "examples" / "learn.py"
CLI = (sys.executable, "-m", "lightning_proxy.cli")
MODELS = {"reverse_text": "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT", "calculator": "Qwen/Qwen2.5-1.5B-Instruct"}
SMALL = ("--steps", "1", "--imitate", "24", "--samples", "1")
STAGES = {"base": "before", "sft": "after imitation", "rl": "after RL"}
# Of each step of RL: when its first rollout was opened, the last one rewarded, and the weights trained; its rollouts.
STEPS = """
SELECT MIN(rollouts.created_at), MAX(rewarded_at), steps.finished_at, COUNT(*), metrics
FROM steps JOIN rollouts ON steps.step IN (rollouts.step, dropped_by)
WHERE steps.status = 'trained' AND mode = 'train' AND metrics NOT LIKE '%"optimizer_steps"%'
GROUP BY steps.step ORDER BY steps.step
"""
SAMPLED = """
SELECT SUM(json_extract(calls.usage, '$.completion_tokens')) FROM calls JOIN rollouts USING (rollout_id)
WHERE mode = 'train' AND rollouts.created_at >= ?
"""


def learned(example: str, options: Sequence[str], directory: Path, env: Mapping[str, str]) -> Json:
    """Let the example learn; return what was measured."""
    command = [sys.executable, str(LEARN), example, "--dir", str(directory), *options]
    started = time.time()
    with cards.Watch() as watch:
        to_its_end(command, os.environ | env)
    (result,) = json.loads((directory / "results.json").read_text())
    lesson, held_out = directory / "seed-0", result["held_out"].items()
    return {
        "example": example,
        "model": result["model"],
        "minutes": round((time.time() - started) / 60, 2),
        "held_out": {name: {key: row[key] for key in ("mean_reward", "interval")} for name, row in held_out},
        **measured(lesson / "lightning.db", watch.looks),
        "plan": planned(lesson / "config.yaml") if watch.looks else None,
    }


def to_its_end(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Run a command. CalledProcessError if it fails; Ctrl-C ends it as it ends itself, with all that it started."""
    with subprocess.Popen(command, env=env) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            code = child.wait()
    if code:
        raise subprocess.CalledProcessError(code, command)


def measured(store: Path, looks: Sequence[Mapping[int, cards.Look]]) -> Json:
    """Return the curve, seconds of a step, tokens a second and the cards' figures of a lesson's steps of RL."""
    with closing(sqlite3.connect(store)) as db:
        rows = list(db.execute(STEPS))
        begin, end = (rows[0][0], rows[-1][2]) if rows else (0.0, 0.0)
        tokens = db.execute(SAMPLED, (begin,)).fetchone()[0] or 0
    metrics = [json.loads(text) for *_, text in rows]
    if not rows:
        return {"steps": 0, "curve": [], "cards": cards.seen(looks, begin, end)}
    return {
        "steps": len(rows),
        "rollouts": [count for *_, count, _ in rows],
        "curve": [one["reward_mean"] for one in metrics],
        "step_s": (end - begin) / len(rows),
        "sampling_s": fmean(rewarded - opened for opened, rewarded, *_ in rows),
        "training_s": fmean(one["step_s"] for one in metrics),
        "publishing_s": _mean(metrics, "publish_s"),
        "sampled_tokens": tokens,
        "sampled_tokens_per_s": tokens / (end - begin),
        "trained_tokens_per_s": _mean(metrics, "trained_tokens_per_s"),
        "cards": cards.seen(looks, begin, end),
    }


def _mean(metrics: Sequence[Json], name: str) -> float | None:
    values = [one[name] for one in metrics if name in one]
    return fmean(values) if values else None


def planned(config: Path) -> dict[int, float] | None:
    """Return the GiB of each card that `lightning-proxy plan` shares out; None where it makes no plan."""
    command = [*CLI, "--config", str(config), "plan", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return gib_by_card(json.loads(done.stdout)) if done.returncode == 0 else None


def gib_by_card(plan: Json) -> dict[int, float]:
    """Return the planned GiB of each card, of vLLM and trainer together where they share it."""
    found: dict[int, float] = {}
    for side in ("vllm", "trainer"):
        for number in plan["settings"][f"{side}.devices"]:
            found[number] = found.get(number, 0.0) + sum(plan[f"{side}_gib"].values())
    return found


def lines(one: Json) -> Iterator[tuple[str, str]]:
    """The rows of a lesson's table."""
    for name, row in one["held_out"].items():
        low, high = row["interval"]["low"], row["interval"]["high"]
        yield f"held-out reward {STAGES[name]}", f"{row['mean_reward']:.2f} ({low:.2f} to {high:.2f})"
    yield "minutes, all in all", f"{one['minutes']:.1f}"
    yield "steps of RL", str(one["steps"])
    if one["steps"]:
        yield "rollouts of each", ", ".join(str(count) for count in dict.fromkeys(one["rollouts"]))
        yield "reward of each", " ".join(f"{reward:.2f}" for reward in one["curve"])
        parts = {name: one[f"{name}_s"] for name in ("sampling", "training", "publishing")}
        of = ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if value is not None)
        yield "seconds a step", f"{one['step_s']:.1f}: {of} (they overlap)"
        yield "tokens sampled a second, over all of it", f"{one['sampled_tokens_per_s']:,.0f}"
        if one["trained_tokens_per_s"] is not None:
            yield "tokens trained a second, in a step", f"{one['trained_tokens_per_s']:,.0f}"
    yield from of_cards(one["cards"], one["plan"])


def of_cards(found: Mapping[int, Json], plan: Mapping[int, float] | None) -> Iterator[tuple[str, str]]:
    """Rows of the cards' share of the time, and of memory beside the plan."""
    if not found:
        yield "card", "no GPU"
    for number, card in found.items():
        busy = "not said" if card["busy"] is None else f"{card['busy']:.0f} % of the time"
        yield f"card {number} busy ({card['name']})", busy
        taken = "not said" if card["gib"] is None else f"{card['gib']:.1f}"
        of_plan = f"{plan[number]:.1f}" if plan and number in plan else "no plan"
        yield f"card {number}, GiB at most; planned", f"{taken}; {of_plan}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="SmolLM2 and one step each, as without a GPU: minutes")
    parser.add_argument("--steps", type=int, default=20, help="of RL, of each")
    for example, model in MODELS.items():
        name = f"--{example.replace('_', '-')}-model"
        parser.add_argument(name, dest=example, default=model, metavar="MODEL", help="of the hub, or a directory")
    parser.add_argument("--tasks", type=Path, metavar="FILE", help="texts to reverse, one a line; otherwise made ones")
    parser.add_argument("--only", choices=MODELS, help="one of the two")
    parser.add_argument("--dir", type=Path, default=Path("lightning-gpu-hour"))
    option(parser)
    options = parser.parse_args()
    there = cards.look()
    small = options.small or not there
    env = {"REVERSE_TEXTS": str(options.tasks.absolute())} if options.tasks else {}
    page = Page("The first hour on a GPU" + (", small: SmolLM2-135M-Instruct" if small else ""))
    names = ", ".join(card.name for card in there.values()) or "no GPU"
    page.text([f"Cards: {names}. Held-out rewards with 95 % intervals; one seed."])
    runs: list[dict[str, Any]] = []
    for example in [options.only] if options.only else MODELS:
        big = ("--model", getattr(options, example), "--steps", str(options.steps))
        try:
            runs.append(learned(example, SMALL if small else big, options.dir.absolute() / example, env))
        except subprocess.CalledProcessError as error:
            print(f"gpu-hour: {example}: exit code {error.returncode}; see {options.dir / example}", file=sys.stderr)
            return int(error.returncode)
        page.table(f"{example}, {runs[-1]['model']}:", ("", "measured"), lines(runs[-1]))
    print(json.dumps(made() | {"runs": runs}))
    page.save(options.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
