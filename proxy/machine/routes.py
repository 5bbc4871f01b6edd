"""`GET /machine` and `GET /plugins`: how the machine is used, and what is on board."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from ..control.answers import ERRORS, answers
from ..control.door import AgentRoute
from ..control.parts import Parts
from ..control.requests import caller_of, parts_for_all
from ..control.status import waiting
from ..errors import Forbidden
from ..groups import Grouping
from .board import board
from .hardware import cards, disks, kept_plan, memory
from .servers import servers

# Completed, without a reward, or with a reward function that was not asked yet.
FOR_REWARD = """
SELECT COUNT(*) AS rollouts FROM rollouts INDEXED BY rollouts_claimable
WHERE mode = 'train' AND step IS NULL AND dropped IS NULL AND status <> 'running' AND task_id IS NOT NULL
      AND status = 'completed' AND (rewarded_at IS NULL OR n IN (SELECT n FROM awaiting_rewards))
"""

router = APIRouter(tags=["status"], responses=ERRORS, route_class=AgentRoute)


class Room(BaseModel):
    """Bytes. `of`: the machine, a GPU by its number, or the disk of the store or of the policy."""

    of: str
    total: int
    used: int


class ServerSeen(BaseModel):
    """A vLLM server of the policy, by its own metrics: calls, tokens since its start, the used share of its KV cache.

    `problem`: why it did not say.
    """

    server: str
    running: int | None = None
    waiting: int | None = None
    read_tokens: int | None = None
    sampled_tokens: int | None = None
    cache: float | None = None
    problem: str | None = None


class Queue(BaseModel):
    """Rollouts, but for `groups`, which wait for siblings. `complete` ones wait for a step, which takes `per_step`."""

    running: int
    for_reward: int
    groups: int
    complete: int
    per_step: int


class MachineSeen(BaseModel):
    """`plan`: GiB on a card, by what they are for, as `up` shared the GPUs out; null without one. `at`: Unix time."""

    at: float
    memory: list[Room]
    disks: list[Room]
    plan: dict[str, dict[str, float]] | None
    servers: list[ServerSeen]
    waiting: Queue


class OnBoard(BaseModel):
    """`what`: plugin, credit, baseline, loss or context_loss. Without a `version` it is a file of your own."""

    what: str
    name: str
    package: str
    version: str | None


class UpstreamServer(BaseModel):
    """`state`: `unknown` where nobody looks (`health_check_s`)."""

    upstream: str
    kind: str
    server: str
    state: Literal["up", "down", "unknown"]
    problem: str | None


class RoomSeen(BaseModel):
    name: str
    about: str


class Board(BaseModel):
    version: str
    plugins: list[OnBoard]
    training: list[OnBoard]
    upstreams: list[UpstreamServer]
    rooms: list[RoomSeen]


@router.get("/machine", response_model=None, responses=answers(MachineSeen))
async def get_machine(request: Request) -> dict[str, Any]:
    """Memory beside its plan, disks, what the policy's servers do, and what waits; of the machine that answers this."""
    p = await _parts(request)
    gpus, (own, of_disks, plan), seen, queue = await asyncio.gather(
        cards(), asyncio.to_thread(lambda: (memory(), disks(p.config), kept_plan(p.config.policy))),
        servers(p), _queue(p),
    )  # fmt: skip
    return {
        "at": time.time(), "memory": own + gpus, "disks": of_disks, "plan": plan,
        "servers": seen, "waiting": queue,
    }  # fmt: skip


@router.get("/plugins", response_model=None, responses=answers(Board))
async def get_plugins(request: Request) -> dict[str, Any]:
    """What is on board: packages that plug in, what training uses, upstreams with their state, the proxy's rooms."""
    p = await _parts(request)
    return await asyncio.to_thread(board, p.config, p.health)


async def _parts(request: Request) -> Parts:
    p = await parts_for_all(request)
    if caller_of(request).sight.own:
        raise Forbidden("this key sees its own rollouts only")
    return p


async def _queue(p: Parts) -> dict[str, int]:
    trainer = p.config.trainer
    groups = await p.store.waiting.groups(grouping=Grouping.of(trainer))
    row = await p.store.database.one(FOR_REWARD)
    return {
        "running": (await p.store.rollouts.counts()).get(("train", "running"), 0),
        "for_reward": 0 if row is None else row["rollouts"],
        "groups": sum(not group.complete for group in groups),
        "complete": await waiting(p),
        "per_step": trainer.rollouts_per_step,
    }
