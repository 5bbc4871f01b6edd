"""Lists what is on board: packages that plug in, what training uses, upstreams with their state, the proxy's rooms."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from typing import Any

from ..config.plugins import GROUP
from ..config.root import Config
from ..config.trainer import TrainerConfig
from ..on_board import ON_BOARD
from ..upstreams.health import Health, replica_name

PACKAGE = "lightning-proxy"


def board(config: Config, health: Health) -> dict[str, Any]:
    """Return all of it as JSON. Without a vLLM upstream, as over a store alone, nothing says what training uses."""
    training = _training(config.trainer) if config.policy_upstream is not None else []
    return {
        "version": version(PACKAGE),
        "plugins": [{"what": "plugin", "name": name} | _package_of(name) for name in config.plugins],
        "training": [{"what": what, "name": name} | _source_of(name) for what, name in training],
        "upstreams": _upstreams(config, health),
        "rooms": [{"name": room.rpartition(".")[2], "about": _about(room)} for room in ON_BOARD],
    }


def _training(trainer: TrainerConfig) -> list[tuple[str, str]]:
    credits = [trainer.credit] if isinstance(trainer.credit, str) else [*dict.fromkeys(trainer.credit.values())]
    named = [("loss", trainer.loss or trainer.loss_type), ("context_loss", trainer.context_loss)]
    baseline = None if isinstance(trainer.credit, str) and ":" in trainer.credit else trainer.baseline
    found = [*(("credit", name) for name in credits), ("baseline", baseline), *named]
    return [(what, name) for what, name in found if name]


def _source_of(name: str) -> dict[str, Any]:
    """The package of FILE.py:NAME, PLUGIN:NAME or a NAME of ours."""
    source, _, _ = name.rpartition(":")
    if source.endswith(".py"):
        return {"package": source, "version": None}
    return _package_of(source) if source else {"package": PACKAGE, "version": version(PACKAGE)}


def _package_of(plugin: str) -> dict[str, Any]:
    for entry in entry_points(group=GROUP, name=plugin):
        if entry.dist is not None:
            return {"package": entry.dist.name, "version": entry.dist.version}
    return {"package": plugin, "version": None}


def _upstreams(config: Config, health: Health) -> list[dict[str, Any]]:
    found = []
    for upstream in config.upstreams:
        for url in upstream.urls or ("",):
            watched = (upstream.name, url) in health.problems
            problem = health.problems.get((upstream.name, url))
            state = "unknown" if not watched else "up" if problem is None else "down"
            server = replica_name(url) if url else ""
            about = {"upstream": upstream.name, "kind": upstream.kind, "server": server, "state": state}
            found.append({**about, "problem": problem})
    return found


def _about(room: str) -> str:
    """The first line of what the room's plugin says of itself, or else its section of the configuration."""
    path = f"{__package__.rpartition('.')[0]}.{room}"
    plugs_in = find_spec(f"{path}.plugin") is not None
    said = import_module(f"{path}.plugin").plugin if plugs_in else import_module(f"{path}.config")
    return (said.__doc__ or "").partition("\n")[0].replace("`", "").rstrip(".")
