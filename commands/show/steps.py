"""Training steps in a terminal: one line each, or a table of the last ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..formats import count, duration, number, share

Metrics = Mapping[str, Any]
GAP = "  "


def step_line(step: int, metrics: Metrics, width: int | None = None) -> Text:
    """Return one step in at most `width` columns. The least important parts are left out first."""
    parts = [part for part in _parts(step, metrics) if part[1]]
    room, shown = width, []
    for part in sorted(parts):
        if room is None or len(part[1]) <= room:
            shown.append(part)
            room = None if room is None else room - len(part[1]) - len(GAP)
    return Text(GAP).join(Text(text, style) for rank, text, style in parts if (rank, text, style) in shown)


def steps_table(steps: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of steps from `GET /policy/steps` that fits 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for name in ("step", "reward", "±", "groups", "tokens", "kl", "clip", "entropy", "train", "publish", "version"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(str(step["step"]), *_cells(step["metrics"], step["version"]))
    return table


def _cells(metrics: Metrics, version: int | None) -> list[str]:
    numbers = [number(metrics.get(name)) for name in ("reward_mean", "reward_std")]
    sampled = [number(metrics.get("kl"), 2), share(metrics.get("clip_share")), number(metrics.get("entropy"), 2)]
    seconds = [_seconds(metrics.get(name)) for name in ("step_s", "publish_s")]
    shown = _unpublished(metrics, "-") if version is None else str(version)
    return [*numbers, _groups(metrics), _short(metrics.get("trained_tokens")), *sampled, *seconds, shown]


def _parts(step: int, metrics: Metrics) -> list[tuple[int, str, str]]:
    """(rank, text, style) of each part, in order of appearance. Rank 0 matters most."""
    names = ("reward_mean", "reward_std", "kl", "clip_share", "entropy", "trained_tokens_per_s")
    mean, std, kl, clipped, entropy, speed = (metrics.get(name) for name in names)
    version = metrics.get("version")
    fate = _unpublished(metrics, "not published") if version is None else f"version {version:.0f}"
    tokens, per_second = metrics.get("trained_tokens"), "" if speed is None else f" at {count(speed)}/s"
    loss, held_out = metrics.get("loss"), metrics.get("held_out_loss")
    measured = "" if held_out is None else f", held out {metrics['held_out_loss_before']:.3f} → {held_out:.3f}"
    if (right := metrics.get("held_out_accuracy")) is not None:
        measured = f", held out {share(metrics['held_out_accuracy_before'])} → {share(right)} right"
    return [
        (0, f"step {step}", "bold"),
        (2, f"{method} loss {loss:.3f}{measured}" if (method := metrics.get("method")) else "", "magenta"),
        (1, "" if mean is None else f"reward {mean:.3f}", "green"),
        (3, "" if std is None else f"± {std:.2f}", "green"),
        (4, f"{groups} groups" if (groups := _groups(metrics)) != "-" else "", ""),
        (6, "" if tokens is None else f"{count(tokens)} tokens{per_second}", ""),
        (7, "" if kl is None else f"kl {number(kl, 2)}", ""),
        (7, f"guide_kl {number(guided, 2)}" if (guided := metrics.get("guide_kl")) is not None else "", ""),
        (6, f"{count(masked)} masked" if (masked := _masked(metrics)) else "", ""),
        (8, "" if not clipped else f"{share(clipped)} clipped", ""),
        (9, "" if entropy is None else f"entropy {number(entropy, 2)}", ""),
        (10, f"lr {rate:.2g}" if (rate := metrics.get("lr")) is not None else "", ""),
        (10, f"staleness {number(stale, 2)}" if (stale := metrics.get("staleness_mean")) else "", ""),
        (5, _times(metrics), "dim"),
        (2, f"warning: {', '.join(warnings)}" if (warnings := metrics.get("warnings")) else "", "yellow"),
        (2, fate, "red" if fate in ("skipped", "stopped") else "yellow" if version is None else "cyan"),
    ]


def _unpublished(metrics: Metrics, otherwise: str) -> str:
    return "skipped" if metrics.get("skipped") else "stopped" if "collapse" in metrics else otherwise


def _masked(metrics: Metrics) -> float:
    """The sampled tokens that taught nothing: a loss's mask dropped them, or top_p under the present weights."""
    return float(metrics.get("masked_tokens", 0) + metrics.get("outside_tokens", 0))


def _times(metrics: Metrics) -> str:
    phases = (("wait", "wait_s"), ("train", "step_s"), ("publish", "publish_s"))
    return ", ".join(f"{name} {_seconds(metrics[key])}" for name, key in phases if key in metrics)


def _groups(metrics: Metrics) -> str:
    """The groups whose rewards differed / all groups."""
    if "groups" not in metrics:
        return "-"
    trained = metrics.get("groups_trained")
    return count(metrics["groups"]) if trained is None else f"{count(trained)}/{count(metrics['groups'])}"


def _short(value: float | None) -> str:
    """A count in few characters: 940, 3.2k, 1.5M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value is not None and value >= size:
            return f"{value / size:.1f}{unit}"
    return count(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)
