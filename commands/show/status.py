"""`status`: readiness, policy, rollouts and the last training steps on one screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ...core.tokens import NO_TOKEN_IDS
from ..api_client import ApiClient, ask
from ..command_line import brought
from ..formats import count, duration, facts, plain, print_json, print_view
from .steps import step_line

if TYPE_CHECKING:
    from ...core.config.root import Config
    from ...core.config.trainer import TrainerConfig

NEWEST_STEPS = 40
NEWEST = 200  # rollouts, and calls
SHOWN_STEPS = 10
Json = dict[str, Any]


def show_status(config: Config, *, as_json: bool) -> bool:
    """Print the state of the system and return whether it is ready."""
    url, now = ApiClient.of(config).url, time.time()
    status = ask(config, read_status)
    if status["policy"] is not None:
        status["next_step"] = next_step(config.trainer, status, now)
    is_ready = status["ready"]["status"] != "not ready"
    if as_json:
        print_json({"url": url, **status})
    else:
        console = Console()
        width = console.width if console.is_terminal else None
        steps = [(step["step"], {**step["metrics"], "version": step["version"]}) for step in status["steps"]]
        lines = [step_line(step, metrics, width) for step, metrics in steps[-SHOWN_STEPS:]]
        print_view(facts(_rows(status, url, is_ready, now)), *lines, soft_wrap=True)
    return is_ready


async def read_status(api: ApiClient) -> Json:
    """Ask the proxy for everything that `status` shows, or for its readiness alone if its store is unavailable."""
    ready = await api.readiness()
    if ready["store"] != "ok":
        return {"ready": ready, "policy": None, "steps": []}
    steps = await api.request("GET", "/policy/steps", params={"limit": str(NEWEST_STEPS)})
    counts = await api.request("GET", "/status")
    return {"ready": ready, "policy": await api.policy(), "steps": steps["data"][::-1], **counts}


def next_step(config: TrainerConfig, status: Json, now: float) -> str:
    """Return what the trainer waits for, according to its configuration."""
    schedule, rollouts = config.schedule, f"{count(status['waiting'])} complete rollouts wait"
    last = status["policy"]["last_step"]
    if config.max_steps is not None and last is not None and last["step"] >= config.max_steps:
        return f"none, trainer.max_steps ({config.max_steps}) is reached; {rollouts}"
    match schedule.when:
        case "rollouts":
            return f"{rollouts}; a round begins at {count(schedule.every_rollouts)}"
        case "times":
            return f"{rollouts}; the next round begins {datetime.fromtimestamp(schedule.next_time(now)):%a %H:%M}"
    takes = f"it takes {config.tasks_per_step} groups of {config.group_size}"
    return f"{rollouts}; {takes}{', or single rollouts in their place' * config.compares_with_earlier}"


def _rows(status: Json, url: str, is_ready: bool, now: float) -> Iterator[tuple[str, Text | str]]:
    ready, policy = status["ready"], status["policy"]
    yield "proxy", Text(f"{ready['status']}  {url}", "green" if is_ready else "red")
    for part in ("store", "upstream"):
        yield part, plain(ready[part], "green" if ready[part] == "ok" else "red")
    problems = [("retention", ready.get("retention")), *(("down", server) for server in ready.get("down", []))]
    yield from ((name, plain(problem, "red")) for name, problem in problems if problem)
    if policy is None:
        return
    since = f" for {duration(now - policy['live_at'])}" if policy["live_at"] else ""
    served = ", ".join([policy["served_model"] or "the base model", *policy["adapters"].values()])
    yield "policy", f"version {policy['live_version']} live{since} ({policy['publish']}, {served})"
    if (seen := status["verified"]) is not None:  # when it went live, and since
        if seen["version"]:
            yield "verified", plain(seen["story"], "" if seen["verified"] else "yellow")
        if (at := seen["probed_at"]) is not None:
            outcome = seen["problem"] or "its answers have not changed"
            when = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC, {duration(now - at)} ago"
            yield "probed", plain(f"{when}: {outcome}", "red" if seen["problem"] else "")
    for rows in brought("status_rows"):
        yield from rows(status)
    if status["publishing"]:
        why = f"not possible: {status['publishing']}\n`lightning-proxy doctor` says what to do"
        yield "publishing", plain(why, "yellow")
    if status["plugins"]:
        yield "plugins", ", ".join(status["plugins"])
    if collapse := policy["collapse"]:
        from ...store.training import Collapse

        yield "stopped", plain(f"for {duration(now - collapse['at'])}: {Collapse(**collapse).story}", "red")
    for mode, counts in sorted(status["rollouts"].items(), reverse=True):
        yield f"rollouts, {mode}", ", ".join(f"{count(n)} {name}" for name, n in sorted(counts.items()))
    if not collapse:
        yield "next step", status["next_step"]
    for name, story in _not_trained_on(status):
        yield name, plain(story, "yellow")
    if (step := policy["last_step"]) is None:
        yield "last step", "none yet"
        return
    metrics, ended = step["metrics"], step["finished_at"] or now
    yield "last step", f"{duration(now - ended)} ago"
    if metrics.get("skipped"):
        yield "  skipped", metrics.get("skipped_because", "it had nothing to train on")
    if "left_out_because" in metrics:
        yield "  left out", metrics["left_out_because"]
    for warning in metrics.get("warnings", {}).values():
        if warning != metrics.get("skipped_because"):
            yield "  warning", warning


def _not_trained_on(status: Json) -> Iterator[tuple[str, str]]:
    """Yield names and texts that say what is not trained on and why, and what keeps steps from being made."""
    newest = f"of the newest {count(NEWEST)}"
    if dropped := status["dropped"]:
        yield "dropped", f"{newest} rollouts: {_counted(dropped)}"
    if untrainable := status["untrainable"]:
        hint = "\n`lightning-proxy doctor` says what the policy server lacks" if NO_TOKEN_IDS in untrainable else ""
        yield "not trained on", f"{newest} calls: {_counted(untrainable)}{hint}"
    if unrewarded := status["unrewarded"]:
        others = _counted(status["other_rewards"])
        came = f"trainer.reward_weights has no weight for the rewards that came: {others}" if others else "none came"
        yield "no reward", f"{newest} rollouts, {count(unrewarded)} completed ones have no reward that counts; {came}"
    for name, key in (("rewards", "uncounted"), ("standstill", "standstill")):
        if problem := status[key]:
            yield name, problem["story"]


def _counted(numbers: dict[str, int]) -> str:
    return "; ".join(f"{name} ({count(n)})" for name, n in numbers.items())
