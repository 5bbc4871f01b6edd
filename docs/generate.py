"""Generates docs/settings.md and docs/step-metrics.md: `python docs/generate.py`.

Keys, defaults, names and units come from the code. What a setting means is written in settings.md itself, after its
default, and stays there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from lightning_proxy.core.config.file import fields_of
from lightning_proxy.core.config.root import Config
from lightning_proxy.trainer.report.metric_schema import all_metrics

DOCS = Path(__file__).parent
SETTINGS, METRICS = DOCS / "settings.md", DOCS / "step-metrics.md"
SETTING = re.compile(r"^- `([^`]+)` \(`.*?`\): (.+)$", re.MULTILINE)

SETTINGS_BEGIN = """# All settings

Each key with its default and meaning; features come last. [config.yaml](../config.yaml) shows the usual ones.

```yaml
# config.yaml holds only what you change
proxy: {port: 9000}
trainer: {tasks_per_step: 4}
```

A variable sets a key, too: `LIGHTNING_TRAINER__LEARNING_RATE=2e-5`.
It wins over the file, and an option of a command over both.
A wrong key or value ends the command with one line that names it. Times are in seconds.
"""

METRICS_BEGIN = """# All numbers of a training step

[page.md](page.md#look-at-these-numbers-first) says which to look at first.

```sh
lightning-proxy status --json      # the last steps, with all of these
```
"""

ABOUT_METRICS = {
    "eval": "Numbers of `evaluation`, only in trackers ([eval.md](eval.md#evaluate-new-versions-while-you-train)).",
    "guides": "These come with `teacher` ([methods.md](methods.md#learn-from-a-larger-model)). "
    "`advantage` above is without them.",
    "tuning": "A run of `train --method sft`, `dpo` or `kto` is one step. Its tokens are those of all epochs.",
    "sft": "The `loss` of `--method sft` is the mean cross-entropy of the answers' tokens in the last epoch, in nats.",
    "dpo": "The `loss` of `--method dpo` is the mean over the pairs in the last epoch; without learning it is 0.693. "
    "The log-odds compare the chosen answer with the rejected one, relative to the weights that the run began with.",
    "kto": "The `loss` of `--method kto` is the mean over the rows in the last epoch; without learning it is 0.5.",
    "preferences": "Held-out answers are compared: dpo each pair, kto each thumbs-up answer with each "
    "thumbs-down answer.",
}


def settings(known: dict[str, str]) -> str:
    """Return the page of all keys, with the meanings that are known."""
    order = {key: n for n, key in enumerate(known)}  # the page's own; a new key comes at the end of its section
    parts: dict[str, list[tuple[int, str]]] = {}
    config = Config()
    for name, kind in fields_of(Config).items():
        parts[name] = sorted(
            (order.get(key, len(order)), f"- `{key}` (`{shown}`): {known.get(key, 'TODO')}\n")
            for key, shown in _keys(name, kind, getattr(config, name))
        )
    core = sorted(Config.model_fields, key=lambda name: parts[name][0][0])
    sections = [*core, *sorted(parts.keys() - {*core})]
    return "\n".join([
        SETTINGS_BEGIN, *(f"## {name}\n\n" + "".join(line for _, line in parts[name]) for name in sections)
    ])  # fmt: skip


def meanings(page: str) -> dict[str, str]:
    """Return what each setting of a page means."""
    return dict(SETTING.findall(page))


def metrics() -> str:
    """Return the page of all metrics."""
    groups: dict[str, list[str]] = {}
    for metric in all_metrics().values():
        unit = "" if metric.unit == "count" else f" ({metric.unit})"
        groups.setdefault(metric.group, []).append(f"- `{metric.name}`{unit}: {metric.meaning}")
    parts = [METRICS_BEGIN]
    for group, lines in groups.items():
        about = f"{ABOUT_METRICS[group]}\n\n" if group in ABOUT_METRICS else ""
        parts.append(f"## {group}\n\n{about}" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _keys(name: str, kind: Any, default: Any) -> Iterator[tuple[str, str]]:
    (item,) = get_args(kind) if get_args(kind) and isinstance(default, list) and default else (None,)
    if isinstance(item, type) and issubclass(item, BaseModel):
        name, kind, default = f"{name}[]", item, default[0]
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        yield name, _shown(default)
    else:
        for key, field in kind.model_fields.items():
            yield from _keys(f"{name}.{key}", field.annotation, getattr(default, key))


def _shown(default: Any) -> str:
    return str(default) if isinstance(default, str | Path) else json.dumps(default)


if __name__ == "__main__":
    SETTINGS.write_text(settings(meanings(SETTINGS.read_text() if SETTINGS.exists() else "")))
    METRICS.write_text(metrics())
