"""A training step in one line of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from ..formats import count, duration, share

Metrics = Mapping[str, Any]
GAP = "  "
PHASES = {"wait": "wait_s", "train": "step_s", "publish": "publish_s"}
# What may be left out of a step's line, from the end.
OPTIONAL = {
    "reward_std": "± {:.2f}",
    "groups": "{} groups",
    "tokens": "{}",
    "kl": "kl {:.2g}",
    "guide_kl": "guide_kl {:.2g}",
    "masked": "{:,.0f} masked",
    "clip_share": "{:.0%} clipped",
    "entropy": "entropy {:.2g}",
    "lr": "lr {:.2g}",
    "staleness_mean": "staleness {:.2g}",
    "times": "{}",
}
NOT_AT_0 = ("masked", "clip_share", "staleness_mean")
STYLES = {"reward_std": "green", "times": "dim"}


def step_line(step: int, metrics: Metrics, width: int | None = None) -> Text:
    """Return one step in at most `width` columns. What may be left out is, from the end."""
    parts = list(_parts(step, metrics))
    while width is not None and sum(len(text) + len(GAP) for text, *_ in parts) - len(GAP) > width:
        last = max((i for i, (_, _, optional) in enumerate(parts) if optional), default=None)
        if last is None:
            break
        del parts[last]
    return Text(GAP).join(Text(text, style) for text, style, _ in parts)


def _parts(step: int, metrics: Metrics) -> Iterator[tuple[str, str, bool]]:
    """Yield text, style and whether it may be left out of each part."""
    yield f"step {step}", "bold", False
    if method := metrics.get("method"):
        measured = ""
        if (held_out := metrics.get("held_out_loss")) is not None:
            measured = f", held out {metrics['held_out_loss_before']:.3f} → {held_out:.3f}"
        if (right := metrics.get("held_out_accuracy")) is not None:
            measured = f", held out {share(metrics['held_out_accuracy_before'])} → {share(right)} right"
        yield f"{method} loss {metrics['loss']:.3f}{measured}", "magenta", False
    if (mean := metrics.get("reward_mean")) is not None:
        yield f"reward {mean:.3f}", "green", False
    tokens, speed = metrics.get("trained_tokens"), metrics.get("trained_tokens_per_s")
    values = {
        **metrics,
        "groups": _groups(metrics),
        "tokens": "" if tokens is None else f"{count(tokens)} tokens{'' if speed is None else f' at {count(speed)}/s'}",
        # The sampled tokens that taught nothing: a loss's mask dropped them, or top_p under the present weights.
        "masked": metrics.get("masked_tokens", 0) + metrics.get("outside_tokens", 0),
        "times": ", ".join(f"{name} {duration(metrics[key])}" for name, key in PHASES.items() if key in metrics),
    }
    for name, text in OPTIONAL.items():
        if (value := values.get(name)) or (value == 0 and name not in NOT_AT_0):
            yield text.format(value), STYLES.get(name, ""), True
    if warnings := metrics.get("warnings"):
        yield f"warning: {', '.join(warnings)}", "yellow", False
    if (version := metrics.get("version")) is not None:
        yield f"version {version:.0f}", "cyan", False
    else:
        fate = "skipped" if metrics.get("skipped") else "stopped" if "collapse" in metrics else "not published"
        yield fate, "yellow" if fate == "not published" else "red", False


def _groups(metrics: Metrics) -> str:
    """The groups whose rewards differed / all groups."""
    if "groups" not in metrics:
        return ""
    trained = metrics.get("groups_trained")
    return count(metrics["groups"]) if trained is None else f"{count(trained)}/{count(metrics['groups'])}"
