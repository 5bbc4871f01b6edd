"""A training step in one line of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from ..formats import count, duration, share

Metrics = Mapping[str, Any]
GAP = Text("  ")
PHASES = {"wait": "wait_s", "train": "step_s", "publish": "publish_s"}
NUMBERS = {
    "kl": "kl {:.2g}",
    "guide_kl": "guide_kl {:.2g}",
    "masked_tokens": "{:,.0f} masked",
    "clip_share": "{:.0%} clipped",
    "entropy": "entropy {:.2g}",
    "lr": "lr {:.2g}",
    "staleness_mean": "staleness {:.2g}",
}
NOT_AT_0 = ("masked_tokens", "clip_share", "staleness_mean")


def step_line(step: int, metrics: Metrics, width: int | None = None) -> Text:
    """Return one step as a line. Details that do not fit into `width` columns are left out, from the end."""
    begin, details, end = [Text(f"step {step}", "bold"), *_begin(metrics)], [*_details(metrics)], [*_end(metrics)]
    while width is not None and details and len(GAP.join([*begin, *details, *end])) > width:
        details.pop()
    return GAP.join([*begin, *details, *end])


def _begin(metrics: Metrics) -> Iterator[Text]:
    if method := metrics.get("method"):
        measured = ""
        if (held_out := metrics.get("held_out_loss")) is not None:
            measured = f", held out {metrics['held_out_loss_before']:.3f} → {held_out:.3f}"
        if (right := metrics.get("held_out_accuracy")) is not None:
            measured = f", held out {share(metrics['held_out_accuracy_before'])} → {share(right)} right"
        yield Text(f"{method} loss {metrics['loss']:.3f}{measured}", "magenta")
    if (mean := metrics.get("reward_mean")) is not None:
        yield Text(f"reward {mean:.3f}", "green")


def _details(metrics: Metrics) -> Iterator[Text]:
    if (deviation := metrics.get("reward_std")) is not None:
        yield Text(f"± {deviation:.2f}", "green")
    if (groups := metrics.get("groups")) is not None:
        trained = metrics.get("groups_trained")  # their rewards differed
        yield Text(f"{count(groups)} groups" if trained is None else f"{count(trained)}/{count(groups)} groups")
    if (tokens := metrics.get("trained_tokens")) is not None:
        speed = metrics.get("trained_tokens_per_s")
        yield Text(f"{count(tokens)} tokens" + (f" at {count(speed)}/s" if speed is not None else ""))
    # Sampled tokens taught nothing where a loss's mask dropped them, or top_p under the current weights.
    masked = metrics.get("masked_tokens", 0) + metrics.get("outside_tokens", 0)
    for name, text in NUMBERS.items():
        value = masked if name == "masked_tokens" else metrics.get(name)
        if value or (value == 0 and name not in NOT_AT_0):
            yield Text(text.format(value))
    if times := ", ".join(f"{name} {duration(metrics[key])}" for name, key in PHASES.items() if key in metrics):
        yield Text(times, "dim")


def _end(metrics: Metrics) -> Iterator[Text]:
    if warnings := metrics.get("warnings"):
        yield Text(f"warning: {', '.join(warnings)}", "yellow")
    if (version := metrics.get("version")) is not None:
        yield Text(f"version {version:.0f}", "cyan")
    elif metrics.get("skipped") or "collapse" in metrics:
        yield Text("skipped" if metrics.get("skipped") else "stopped", "red")
    else:
        yield Text("not published", "yellow")
