"""`status`: readiness, policy, rollouts and the last training step on one screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ...core.tokens import NO_TOKEN_IDS
from ..api_client import ApiClient, ask
from ..command_line import brought
from ..formats import count, duration, number, plain, print_json, print_view, sparkline
from .steps import step_line, steps_table

if TYPE_CHECKING:
    from ...core.config.root import Config
    from ...core.config.trainer import TrainerConfig

NEWEST_STEPS = 40
NEWEST = 200  # rollouts, and calls
SHOWN_STEPS = 10
NUMBERS = (
    "loss", "held_out_loss", "lr", "grad_norm", "advantage_mean", "advantage_std", "ratio_mean", "kl",
    "sampler_difference", "kl_base", "guide_kl", "entropy", "clip_share", "staleness_mean", "merge_rate",
)  # fmt: skip

Json = dict[str, Any]


def show_status(config: Config, *, as_json: bool) -> bool:
    """Print the state of the system and return whether it is ready."""
    url = ApiClient.of(config).url
    status = ask(config, read_status)
    status["next_step"] = next_step(config.trainer, status, time.time())
    if as_json:
        print_json({"url": url, **status})
    else:
        grid = Table.grid(padding=(0, 2))  # fits 80 columns
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in _rows(status, url, time.time()):
            grid.add_row(name, value)
        print_view(grid, *(("", steps_table(status["steps"][-SHOWN_STEPS:])) if len(status["steps"]) > 1 else ()))
    return is_ready(status)


async def read_status(api: ApiClient) -> Json:
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


def next_step(config: TrainerConfig, status: Json, now: float) -> str:
    """Return the condition that the trainer waits for, by its configuration."""
    schedule, rollouts = config.schedule, f"{count(status['waiting'])} complete rollouts wait"
    last = (status["policy"] or {}).get("last_step")
    if config.max_steps is not None and last is not None and last["step"] >= config.max_steps:
        return f"none, trainer.max_steps ({config.max_steps}) are done; {rollouts}"
    match schedule.when:
        case "rollouts":
            return f"{rollouts}; a round begins with {count(schedule.every_rollouts)}"
        case "times":
            return f"{rollouts}; the next round begins {datetime.fromtimestamp(schedule.next_time(now)):%a %H:%M}"
        case "idle":
            return f"{rollouts}; while the machine is idle"
    return f"{rollouts}; it takes {config.tasks_per_step} groups of {config.group_size}"


def _rows(status: Json, url: str, now: float) -> Iterator[tuple[str, Text | str]]:
    ready, policy = status["ready"], status["policy"]
    yield "proxy", Text(f"{ready['status']}  {url}", "green" if is_ready(status) else "red")
    for part in ("store", "upstream"):
        yield part, plain(ready[part], "green" if ready[part] == "ok" else "red")
    if over := ready.get("retention"):
        yield "retention", plain(over, "red")
    for server in ready.get("down", []):
        yield "down", plain(server, "red")
    if policy is None:
        return
    since = f" for {duration(now - policy['live_at'])}" if policy["live_at"] else ""
    served = ", ".join([policy["served_model"] or "the base model", *policy["adapters"].values()])
    yield "policy", plain(f"version {policy['live_version']} live{since} ({policy['publish']}, {served})")
    if (seen := status["verified"]) is not None:  # when it went live, and since
        if seen["version"]:
            yield "verified", plain(seen["story"], "" if seen["verified"] else "yellow")
        if (at := seen["probed_at"]) is not None:
            outcome = seen["problem"] or "it answers as at first"
            when = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC, {duration(now - at)} ago"
            yield "probed", plain(f"{when}: {outcome}", "red" if seen["problem"] else "")
    for line in policy.get("warnings", ()):
        yield "warning", plain(line, "yellow")
    for rows in brought("status_rows"):
        yield from rows(status)
    if status["publishing"]:
        why = f"not possible: {status['publishing']}\n`lightning-proxy doctor` says what to do"
        yield "publishing", plain(why, "yellow")
    if status["plugins"]:
        yield "plugins", plain(", ".join(status["plugins"]))
    if collapse := policy["collapse"]:
        from ...store.training import Collapse

        yield "stopped", plain(f"for {duration(now - collapse['at'])}: {Collapse(**collapse).story}", "red")
    for mode, counts in sorted(status["rollouts"].items(), reverse=True):
        yield f"rollouts, {mode}", ", ".join(f"{count(n)} {name}" for name, n in sorted(counts.items()))
    if not collapse:
        yield "next step", status["next_step"]
    yield from _not_trained_on(status)
    for name, text in step_facts(policy["last_step"], now):
        yield name, plain(text)
    if len(status["rewards"]) > 1:
        first, *_, last = status["rewards"]
        yield "reward by step", f"{sparkline(status['rewards'])}  {number(first)} → {number(last)}"


def _not_trained_on(status: Json) -> Iterator[tuple[str, Text]]:
    """Records that cannot be trained on, with the reasons."""
    if dropped := status["dropped"]:
        yield "dropped", plain(f"of the newest {count(NEWEST)} rollouts: {_counted(dropped, '; ')}")
    if untrainable := status["untrainable"]:
        hint = "\n`lightning-proxy doctor` says what the policy server lacks" if NO_TOKEN_IDS in untrainable else ""
        seen = f"of the newest {count(NEWEST)} calls: {_counted(untrainable, '; ')}"
        yield "not trained on", plain(seen + hint, "yellow")
    if unrewarded := status["unrewarded"]:
        others = _counted(status["other_rewards"], ", ")
        came = f"trainer.reward_weights leaves out what came: {others}" if others else "none came"
        seen = f"{count(unrewarded)} completed of the newest {count(NEWEST)} rollouts have none that counts"
        yield "no reward", plain(f"{seen}; {came}", "yellow")
    for name, key in (("rewards", "uncounted"), ("standstill", "standstill")):
        if problem := status[key]:
            yield name, plain(problem["story"], "yellow")


def _counted(numbers: dict[str, int], separator: str) -> str:
    return separator.join(f"{name} ({count(n)})" for name, n in numbers.items())


def step_facts(step: Json | None, now: float) -> Iterator[tuple[str, str]]:
    """Yield the last training step in words. Metrics that the step lacks are left out."""
    if step is None:
        yield "last step", "none yet"
        return
    m: Json = step["metrics"]
    ago = duration(now - (step["finished_at"] or now))
    yield "last step", f"{ago} ago: {step_line(step['step'], {**m, 'version': step.get('version')}).plain}"
    if m.get("skipped"):
        yield "  skipped", m.get("skipped_because", "it had nothing to train on, or its numbers were not finite")
    if "left_out_because" in m:
        yield "  left out", m["left_out_because"]
    for warning in m.get("warnings", {}).values():
        if warning != m.get("skipped_because"):
            yield "  warning", warning
    if len(tasks := m.get("reward_by_task") or {}) > 1:
        worst, *_, best = sorted(tasks, key=lambda task: tasks[task]["mean"])
        worst, best = (f"{task[:24]} {number(tasks[task]['mean'])}" for task in (worst, best))
        yield "  tasks", f"{len(tasks)}, from {worst} to {best}"
    if "trained_tokens" in m:
        kinds = [name for name in ("trained", "masked", "outside", "computed") if f"{name}_tokens" in m]
        yield "  tokens", ", ".join(f"{count(m[f'{name}_tokens'])} {name}" for name in kinds)
    if numbers := [f"{name} {number(m[name])}" for name in NUMBERS if name in m]:
        yield "  numbers", ", ".join(numbers)


def is_ready(status: Json) -> bool:
    return bool(status["ready"]["status"] != "not ready")
