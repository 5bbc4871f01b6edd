"""`policy …`: shows and compares policy versions, chooses the one that is served, and takes one out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import ConfigError, LightningError
from ..command_line import Commands, Json, brought, configuration
from ..formats import count, number, print_json, print_view, table

if TYPE_CHECKING:
    from rich.table import Table

    from ..api_client import ApiClient

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Show, compare, promote and export policy versions.")

# What the step that made a version has about its verification, as `GET /status` has it of the live one.
VERIFICATION = {"deviations": "verify_deviations", "difference": "verify_difference", "by": "verified_by"}
METRICS = {"mean": "reward", "tokens": "tokens", "latency_ms": "latency, ms"}


@app.command("list")
def list_versions(context: typer.Context, as_json: Json = False) -> None:
    """List the policy versions, oldest first. Those that are `ready` can be promoted.

    `reward` is the mean over tasks of the training rollouts that began with the version, `held out` that of those in
    mode `eval`. `verified` says by how many standard deviations (sd) vLLM's answers were those of the new weights and
    not of the old.

    Below: the best version, the test that is under way, and how the last one was decided (promotion.mode: gated).
    """
    from ..api_client import look

    async def read(api: ApiClient) -> tuple[dict[str, Any], ...]:
        steps = await api.request("GET", "/policy/steps", params={"limit": "1000", "brief": "true"})
        return await api.request("GET", "/policy/versions"), steps, await api.policy()

    versions, steps, policy = look(configuration(context), read)
    of_steps = {step["metrics"].get("version"): step["metrics"] for step in steps["data"]}
    if as_json:
        for v in versions["data"]:
            found = of_steps.get(v["version"], {})
            v["verification"] = {name: found.get(key) for name, key in VERIFICATION.items()}
        print_json(versions)
    else:
        below = (line for lines in brought("below_versions") for line in lines(policy, versions["data"]))
        print_view(versions_table(versions["data"], of_steps), *below)


@app.command()
def promote(
    context: typer.Context,
    version: Annotated[str, typer.Argument(metavar="N", help="a version's number, or `best`")],
    as_json: Json = False,
) -> None:
    """Make a version live. The trainer continues from it."""

    async def change(api: ApiClient) -> dict[str, Any]:
        number = version
        if number == "best":
            if (best := (await api.policy()).get("best")) is None:
                raise LightningError("no version is the best yet: none that can be served has a reward")
            number = best["version"]
        return await api.request("POST", "/policy/promote", {"version": int(number)})

    if version != "best" and not version.isdecimal():
        raise ConfigError(f"a version's number, or `best`, got {version!r}")
    _change(context, change, as_json)


@app.command()
def rollback(context: typer.Context, as_json: Json = False) -> None:
    """Go back to the newest usable version that is older than the live one."""
    _change(context, lambda api: api.request("POST", "/policy/rollback"), as_json)


def _change(context: typer.Context, work: Callable[[ApiClient], Awaitable[dict[str, Any]]], as_json: bool) -> None:
    from ..api_client import ask

    version = ask(configuration(context), work)
    print_json(version) if as_json else typer.echo(f"policy version {version['version']} is live")


@app.command()
def compare(
    context: typer.Context,
    a: Annotated[int, typer.Argument(metavar="A", help="a version")],
    b: Annotated[int, typer.Argument(metavar="B", help="another")],
    as_json: Json = False,
) -> None:
    """Compare version B with A by the rollouts that were recorded: rewards, tokens and latency, paired by task.

    Held-out rollouts are compared if both versions have some of a common task, else those of training.
    """
    from ..api_client import ask

    path = f"/policy/compare?a={a}&b={b}&costs=true"
    found = ask(configuration(context), lambda api: api.request("GET", path))
    mode, tasks = found["mode"], found["data"]
    mend = f"`lightning-proxy eval --tasks FILE --models {a},{b} -- COMMAND` gives both the same tasks"
    for side, version in (("a", a), ("b", b)):
        if not found[f"rollouts_{side}"]:
            raise LightningError(f"policy version {version} has no rewarded {mode} rollouts of a task; {mend}")
    if not tasks:
        raise LightningError(f"policy versions {a},{b} have no task in common in mode {mode}; {mend}")
    found["metrics"] = {name: metric for name in METRICS if (metric := _compared(tasks, name)) is not None}
    if as_json:
        return print_json(found)
    shown = table("", right=(f"version {a}", f"version {b}", f"above {a}", "95 %", "p", "tasks"))
    for name, metric in found["metrics"].items():
        low, high = (_shown(metric["interval"][end]) for end in ("low", "high"))
        numbers = [_shown(metric[side]) for side in ("a", "b", "difference")]
        shown.add_row(METRICS[name], *numbers, f"{low} to {high}", f"{metric['p']:.4f}", str(metric["tasks"]))
    rollouts = [f"{count(sum(task[side]['rollouts'] for task in tasks))} of version {found[side]}" for side in "ab"]
    return print_view(f"{mode} rollouts of {found['tasks']} common tasks: {' and '.join(rollouts)}", shown)


def _compared(tasks: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Compare one number of both versions over the tasks where both have it; None without any."""
    from ...core.statistics import compare

    pairs = [(task["a"][name], task["b"][name]) for task in tasks]
    ours, theirs = ([pair[i] for pair in pairs if None not in pair] for i in (1, 0))
    return {"a": fmean(theirs), "b": fmean(ours), **asdict(compare(ours, theirs))} if ours else None


def _shown(value: float) -> str:
    return number(value) if abs(value) < 1000 else count(value)


def versions_table(versions: list[dict[str, Any]], of_steps: Mapping[int | None, dict[str, Any]]) -> Table:
    """Return a table with one line per version; a star marks the live one. `of_steps`: their steps' metrics."""
    held = ["held out"] if any(v.get("evaluation") or v["rewards"].get("eval") for v in versions) else []
    rows = []
    for v in versions:
        status, verified, of_step = v["status"], "no", of_steps.get(v["version"], {})
        if status == "ready" and not v["live"] and (obstacle := v["obstacle"]) is not None:
            status = "files gone" if "gone" in obstacle else "other mode"
        if v["verified"]:  # how clearly, as far as that was recorded and answers told it
            deviations = of_step.get("verify_deviations")
            verified = "yes" if deviations is None or "verified_by" in of_step else f"{deviations:.3g} sd"
        live_at = time.localtime(v["live_at"] or v["created_at"])
        when = time.strftime("%m-%d %H:%M" if held else "%Y-%m-%d %H:%M", live_at)
        made = ("base model", None, None) if v["version"] == 0 else (v["publish"], verified, when)
        rewards = (_mean(v["rewards"].get("train")) or None, *(_held_out(v) for _ in held))
        rows.append((v["version"], "*" if v["live"] else "", status, v["step"], *rewards, *made))
    names = ("version", "", "status", "step", "reward", *held, "published", "verified", "when")
    shown = table(*names, rows=rows, padding=(0, 1))
    shown.columns[0].justify = shown.columns[3].justify = "right"
    return shown


def _held_out(version: Mapping[str, Any]) -> str:
    evaluation, seen = version.get("evaluation"), _mean(version["rewards"].get("eval"))
    if evaluation is None:
        return seen
    if evaluation["ended_at"] is None:
        return "begun"
    return seen or ("failed" if evaluation["reward"] is None else f"{evaluation['reward']:.3f}")


def _mean(reward: Mapping[str, Any] | None) -> str:
    return "" if reward is None else f"{reward['mean']:.3f}"
