"""The demo's options, and the ordinary config.yaml that it writes for them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from ...core.errors import ConfigError
from ..eval.report import save
from ..system.processes import free_port, make_directory

EXAMPLE = Path(__file__).parents[2] / "examples" / "addition"
CONFIG = "config.yaml"
OPTIONS = "demo.json"  # marks a demo's directory
GROUP_SIZE = 8
Api = Literal["chat", "messages", "responses"]
AGENTS: dict[Api, str] = {"chat": "demo_agent.py", "messages": "messages_agent.py", "responses": "responses_agent.py"}
TASKS_PER_STEP = 8


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """`repeat` is the number of answers per held-out task and evaluation. `ahead` is that of `run`.

    With `ahead` above 0 the agent keeps running during a step. Its answers are then one version old and teach less.
    The agent speaks `api`.
    """

    steps: int = 90
    seed: int = 0
    directory: Path = Path("lightning-demo")
    model: Path | None = None
    repeat: int = 8
    ahead: float = 0.0
    api: Api = "chat"


def begin(options: DemoOptions) -> DemoOptions:
    """Make the demo's directory, or empty it if an earlier demo worked there, and keep the options for `resumed`.

    ConfigError if it holds anything else.
    """
    directory = make_directory(options.directory, "--dir")
    if any(directory.iterdir()):
        if _kept_options(directory) is None:
            raise ConfigError(f"{directory} is not empty and not an earlier demo's: choose another --dir")
        shutil.rmtree(directory)
        directory.mkdir()
    options = replace(options, directory=directory, model=options.model and options.model.absolute())
    paths = {"directory": str(directory), "model": options.model and str(options.model)}
    save(asdict(options) | paths, directory / OPTIONS)
    return options


def resumed(directory: Path) -> DemoOptions:
    """Return the options with which the demo in `directory` began. ConfigError if none did."""
    if (kept := _kept_options(directory)) is None:
        raise ConfigError(f"--resume: no demo was begun in {directory}")
    return DemoOptions(**kept | {"directory": directory.absolute(), "model": kept["model"] and Path(kept["model"])})


def _kept_options(directory: Path) -> dict[str, Any] | None:
    try:
        kept: dict[str, Any] = json.loads((directory / OPTIONS).read_text())
        return kept if kept["directory"] == str(directory.absolute()) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_config(directory: Path, model: Path, options: DemoOptions) -> Path:
    """Write the system's configuration, with ports that are free now."""
    proxy_port, vllm_port = free_port(), free_port()
    data: dict[str, Any] = {
        "proxy": {"port": proxy_port},
        "store": {"url": f"sqlite:///{directory / 'lightning.db'}"},
        "upstreams": [{"name": "policy", "base_url": f"http://127.0.0.1:{vllm_port}/v1"}],
        "policy": {"model": str(model), "publish": "merged", "directory": str(directory / "policy")},
        "vllm": {"port": vllm_port, "max_model_len": 512, "kv_cache_gib": 1.0},
        "trainer": {
            "group_size": GROUP_SIZE,
            "tasks_per_step": TASKS_PER_STEP,
            "lora_rank": 16,
            "poll_s": 0.1,
            "max_steps": options.steps,
            "seed": options.seed,
        },
    }
    path = directory / CONFIG
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path
