"""A second system, derived from the user's configuration: a proxy, a store and a policy directory of its own."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from ....core.config.root import Config
from ....core.config.trainer import TrainerConfig
from ....core.errors import LightningError
from ....serving.mode import publish_mode
from ....serving.operator import key_file, operator_headers
from ....trainer.plan import model_config, shape_of
from ....trainer.rate import WIDTH, rate_of
from ...put_back import LearnJournal
from ...serve import uvicorn_options
from ...system.processes import free_port

REWARD = "doctor"  # the name of its rewards: those that an agent posts for itself do not count
GROUP_SIZE, TASKS = 8, 4
# A few steps with less are too small for a server's answers to show.
LEAST_RATE = {"lora": 1e-4, "full": 1e-5}
TINY = 1e-9  # a rate that is as good as none is not raised: it is what there is to find


@contextmanager
def second_system(config: Config, *, own_agent: bool) -> Iterator[tuple[Config, LearnJournal]]:
    """Make the directories and the configuration, and remove the directories at the end.

    The store is beside the user's, and weights are below `policy.directory`, which the policy's servers see.
    `own_agent`: the user's agent works, whose name and credit count.
    """
    name = f"lightning-doctor-{secrets.token_hex(2)}"
    beside = config.policy.directory if config.store.is_postgres else config.store.path.parent
    weights = config.policy.directory.absolute() / name
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=beside.absolute()) as directory:
        try:
            weights.mkdir(parents=True)
            operator_headers(config.policy.directory)  # makes the key
            shutil.copy(key_file(config.policy.directory), key_file(weights))
            second = _second(config, Path(directory), weights, own_agent=own_agent)
            yield second, LearnJournal(name, publish_mode(config) == "merged", (directory, str(weights)))
        finally:
            shutil.rmtree(weights, ignore_errors=True)


def _second(config: Config, directory: Path, weights: Path, *, own_agent: bool) -> Config:
    """The user's configuration, but for what would reach the user's own store, servers' names or trackers.

    Of the features' sections only that of a service that trains is kept: no judge, teacher, gate or telemetry.
    """
    services = {section.name for section in config.sections if not section.trains_here}
    sections: dict[str, Any] = config.model_dump(include={*Config.model_fields, *services})
    sections["proxy"] = {"port": free_port()}
    sections["store"] = {"url": f"sqlite:///{directory / 'store.db'}"}
    sections["rewards"], sections["rollouts"] = {}, {}
    sections["policy"] |= {"directory": weights, "publish": publish_mode(config), "adapters": {}}
    rate = own_rate(config)
    sections["trainer"] |= {
        "group_size": GROUP_SIZE, "tasks_per_step": TASKS, "reward_weights": {REWARD: 1},
        "learning_rate": rate if rate < TINY else max(rate, LEAST_RATE[config.trainer.weights]),
        "schedule": {}, "lr_scheduler": "constant", "warmup_steps": 0, "max_steps": None, "dynamic_sampling": False,
        "lone_rollouts": "drop", "context_loss": None, "air": {}, "collapse": {"action": "off"}, "report_to": [],
        **({} if own_agent else {"agents": None, "agent_credit": "team"}),
    }  # fmt: skip
    named = config.trainer.credits.values()
    if not own_agent or not all(name in TrainerConfig.functions["credit"] or ":" in name for name in named):
        sections["trainer"]["credit"] = "uniform"
    return Config.model_validate(sections)


def own_rate(config: Config) -> float:
    """Return the user's learning rate, which `auto` takes from the model's width."""
    shape = shape_of(model_config(str(config.policy.model)) or {})
    return rate_of(config.trainer, shape.hidden if shape else WIDTH).value


@asynccontextmanager
async def served(config: Config) -> AsyncIterator[None]:
    """Serve the proxy of this configuration until the block is left."""
    from uvicorn import Config as Settings
    from uvicorn import Server

    from ....proxy.app import create_app

    server = Server(Settings(create_app(config), loop="asyncio", **uvicorn_options(config.proxy)))
    thread = threading.Thread(target=server.run, daemon=True)  # signals are this process's own
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise LightningError("the second proxy could not start; see the lines above")
            await asyncio.sleep(0.05)
        yield
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join)
