"""`status`: readiness, policy, rollouts and the last training step on one screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.config.cron import next_time
from ..api_client import ApiClient, ask
from ..command_line import brought
from ..formats import count, duration, number, plain, print_json, sparkline
from .steps import steps_table

if TYPE_CHECKING:
    from ...core.config.root import Config
    from ...core.config.trainer import TrainerConfig

NEWEST_STEPS = 40
NEWEST = 200  # rollouts, and calls
SHOWN_STEPS = 10
PHASES = (
    ("waiting", "wait_s"), ("collecting", "collect_s"), ("training", "step_s"), ("verifying", "verify_s"),
    ("checkpoint", "checkpoint_s"), ("publishing", "publish_s"),
)  # fmt: skip


def show_status(config: Config, *, as_json: bool) -> bool:
    """Print the state of the system and return whether it is ready."""
    url = ApiClient.of(config).url
    status = ask(config, read_status)
    status["next_step"] = next_step(config.trainer, status, time.time())
    if as_json:
        print_json({"url": url, **status})
    else:
        console = Console(highlight=False)
        console.print(status_view(status, url, time.time()))
        if len(status["steps"]) > 1:
            console.print("", steps_table(status["steps"][-SHOWN_STEPS:]), sep="\n")
    return is_ready(status)


async def read_status(api: ApiClient) -> dict[str, Any]:
    """Ask the proxy for everything that `status` shows. ApiError if it is not there."""
    ready = await api.readiness()
    if ready["store"] != "ok":
        return {
            "ready": ready, "policy": None, "steps": [], "rewards": [], "rollouts": {}, "waiting": 0, "dropped": {},
            "unrewarded": 0, "other_rewards": {}, "untrainable": {}, "publishing": None, "standstill": None,
            "uncounted": None, "collapse": None, "verified": None, "plugins": [], "recent": None,
        }  # fmt: skip
    steps = (await api.request("GET", "/policy/steps", params={"limit": str(NEWEST_STEPS)}))["data"][::-1]
    rewards = [step["metrics"]["reward_mean"] for step in steps if "reward_mean" in step["metrics"]]
    counts = await api.request("GET", "/status")
    return {"ready": ready, "policy": await api.policy(), "steps": steps, "rewards": rewards, **counts}


def next_step(config: TrainerConfig, status: dict[str, Any], now: float) -> str:
    """Return the condition that the trainer waits for, by its configuration."""
    schedule, rollouts = config.schedule, f"{count(status['waiting'])} complete rollouts wait"
    last = (status["policy"] or {}).get("last_step")
    if config.max_steps is not None and last is not None and last["step"] >= config.max_steps:
        return f"none, trainer.max_steps ({config.max_steps}) are done; {rollouts}"
    match schedule.when:
        case "rollouts":
            return f"{rollouts}; a round begins with {count(schedule.every_rollouts)}"
        case "times":
            return f"{rollouts}; the next round begins {datetime.fromtimestamp(next_time(schedule.at, now)):%a %H:%M}"
        case "idle":
            return f"{rollouts}; while the machine is idle"
    return f"{rollouts}; it takes {config.tasks_per_step} groups of {config.group_size}"


def status_view(status: dict[str, Any], url: str, now: float) -> Table:
    """Return a grid of names and values that fits 80 columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    ready, policy = status["ready"], status["policy"]
    table.add_row("proxy", Text(f"{ready['status']}  {url}", "green" if is_ready(status) else "red"))
    for part in ("store", "upstream"):
        table.add_row(part, plain(ready[part], "green" if ready[part] == "ok" else "red"))
    if over := ready.get("retention"):
        table.add_row("retention", plain(over, "red"))
    for server in ready.get("down", []):
        table.add_row("down", plain(server, "red"))
    if policy is None:
        return table
    since = f" for {duration(now - policy['live_at'])}" if policy["live_at"] else ""
    served = ", ".join([policy["served_model"] or "the base model", *policy["adapters"].values()])
    table.add_row("policy", plain(f"version {policy['live_version']} live{since} ({policy['publish']}, {served})"))
    for name, seen in _verified(status["verified"], now):
        table.add_row(name, seen)
    for line in policy.get("warnings", ()):
        table.add_row("warning", plain(line, "yellow"))
    for rows in brought("status_rows"):
        for name, value in rows(status):
            table.add_row(name, value)
    if status["publishing"]:
        why = f"not possible: {status['publishing']}\n`lightning-proxy doctor` says what to do"
        table.add_row("publishing", plain(why, "yellow"))
    if status["plugins"]:
        table.add_row("plugins", plain(", ".join(status["plugins"])))
    if collapse := policy["collapse"]:
        from ...store.training import Collapse

        table.add_row("stopped", plain(f"for {duration(now - collapse['at'])}: {Collapse(**collapse).story}", "red"))
    for mode, counts in sorted(status["rollouts"].items(), reverse=True):
        shown = ", ".join(f"{count(n)} {name}" for name, n in sorted(counts.items()))
        table.add_row(f"rollouts, {mode}", shown)
    if not collapse:
        table.add_row("next step", status["next_step"])
    for name, found in _not_trained_on(status):
        table.add_row(name, found)
    for name, value in step_facts(policy["last_step"], now):
        table.add_row(name, value)
    if len(status["rewards"]) > 1:
        first, *_, last = status["rewards"]
        table.add_row("reward by step", f"{sparkline(status['rewards'])}  {number(first)} → {number(last)}")
    return table


def _verified(seen: dict[str, Any] | None, now: float) -> Iterator[tuple[str, Text]]:
    """The lines about how the live version was seen to be served: when it went live, and since."""
    if seen is None:
        return
    if seen["version"]:
        yield "verified", plain(seen["story"], "" if seen["verified"] else "yellow")
    if (at := seen["probed_at"]) is not None:
        found = seen["problem"] or "it answers as at first"
        when = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC, {duration(now - at)} ago"
        yield "probed", plain(f"{when}: {found}", "red" if seen["problem"] else "")


def _not_trained_on(status: dict[str, Any]) -> Iterator[tuple[str, Text]]:
    """The lines about records that cannot be trained on, with the reasons."""
    if dropped := status["dropped"]:
        reasons = "; ".join(f"{reason} ({count(n)})" for reason, n in dropped.items())
        yield "dropped", plain(f"of the newest {count(NEWEST)} rollouts: {reasons}")
    if untrainable := status["untrainable"]:
        from ...core.tokens import NO_TOKEN_IDS

        reasons = "; ".join(f"{reason} ({count(n)})" for reason, n in untrainable.items())
        hint = "\n`lightning-proxy doctor` says what the policy server lacks" if NO_TOKEN_IDS in untrainable else ""
        yield "not trained on", plain(f"of the newest {count(NEWEST)} calls: {reasons}{hint}", "yellow")
    if unrewarded := status["unrewarded"]:
        names = ", ".join(f"{name} ({count(n)})" for name, n in status["other_rewards"].items())
        came = f"trainer.reward_weights leaves out what came: {names}" if names else "none came"
        seen = f"{count(unrewarded)} completed of the newest {count(NEWEST)} rollouts have none that counts"
        yield "no reward", plain(f"{seen}; {came}", "yellow")
    if uncounted := status["uncounted"]:
        yield "rewards", plain(uncounted["story"], "yellow")
    if standstill := status["standstill"]:
        yield "standstill", plain(standstill["story"], "yellow")


def step_facts(step: dict[str, Any] | None, now: float) -> list[tuple[str, str]]:
    """Return the last training step in words. Metrics that the step lacks are left out."""
    if step is None:
        return [("last step", "none yet")]
    metrics: dict[str, Any] = step["metrics"]
    facts = [("last step", f"{step['step']}, {duration(now - (step['finished_at'] or now))} ago")]
    if metrics.get("skipped"):
        because = metrics.get("skipped_because", "it had nothing to train on, or its numbers were not finite")
        facts.append(("  skipped", because))
    if "left_out_because" in metrics:
        facts.append(("  left out", metrics["left_out_because"]))
    others = [what for what in metrics.get("warnings", {}).values() if what != metrics.get("skipped_because")]
    facts += [("  warning", what) for what in others]
    if "reward_mean" in metrics:
        spread = f"{number(metrics['reward_mean'])} ± {number(metrics.get('reward_std'))}"
        facts.append(("  reward", f"{spread}, greatest {number(metrics.get('reward_max'))}"))
    if "rollouts" in metrics:
        facts.append(("  rollouts", f"{count(metrics['rollouts'])} in {count(metrics.get('groups'))} groups"))
        equal, stale = count(metrics.get("groups_equal")), count(metrics.get("rollouts_stale"))
        facts.append(("  dropped", f"{equal} groups with equal rewards, {stale} stale rollouts"))
    if len(tasks := metrics.get("reward_by_task") or {}) > 1:
        ordered = sorted(tasks, key=lambda task: tasks[task]["mean"])
        worst, best = (f"{task[:24]} {number(tasks[task]['mean'])}" for task in (ordered[0], ordered[-1]))
        facts.append(("  tasks", f"{len(tasks)}, from {worst} to {best}"))
    if "trained_tokens" in metrics:
        kinds = [name for name in ("trained", "masked", "outside", "computed") if f"{name}_tokens" in metrics]
        facts.append(("  tokens", ", ".join(f"{count(metrics[f'{name}_tokens'])} {name}" for name in kinds)))
    times = [f"{name} {duration(metrics[key])}" for name, key in PHASES if key in metrics]
    facts += [("  time", ", ".join(times))] if times else []
    names = (
        "loss", "held_out_loss", "lr", "grad_norm", "advantage_mean", "advantage_std", "ratio_mean", "kl",
        "sampler_difference", "kl_base", "guide_kl", "entropy", "clip_share", "staleness_mean", "merge_rate",
    )  # fmt: skip
    numbers = [f"{name} {number(metrics[name])}" for name in names if name in metrics]
    return facts + ([("  numbers", ", ".join(numbers))] if numbers else [])


def is_ready(status: dict[str, Any]) -> bool:
    return bool(status["ready"]["status"] != "not ready")
