"""Rollouts of a running system for rewarders, and what they were given."""

from __future__ import annotations

import asyncio
from typing import Any


def answers(system: Any, text: str) -> None:
    """Let the policy's server answer so from now on."""
    system.vllm.answer = lambda _: {"role": "assistant", "content": text}


async def completed(system: Any, rollout_id: str, answer: str = "yes", **headers: str) -> None:
    """A rollout with one call, ended without a reward."""
    answers(system, answer)
    assert (await system.chat(rollout_id, **headers))[0] == 200
    assert (await system.call("POST", f"/rollouts/{rollout_id}/end", {"status": "completed"}))[0] == 200


async def group(system: Any, *texts: str, task: str = "t", ended: bool = True) -> list[str]:
    """Siblings that were opened together, with these answers."""
    opened = (await system.call("POST", "/rollouts", {"task_id": task, "n": len(texts)}))[1]
    ids = [one["rollout_id"] for one in opened]
    for rollout_id, text in zip(ids, texts, strict=True):
        answers(system, text)
        assert (await system.chat(rollout_id))[0] == 200
        if ended:
            await system.call("POST", f"/rollouts/{rollout_id}/end", {"status": "completed"})
    return ids


async def given(system: Any, rollout_id: str) -> list[dict[str, Any]]:
    """The rewards of a rollout, once none is awaited."""
    async with asyncio.timeout(20):
        while (found := (await system.call("GET", f"/rollouts/{rollout_id}"))[1])["awaits_reward"]:
            await asyncio.sleep(0.05)
    return list(found["rewards"])


async def rewards(system: Any, ids: list[str]) -> list[dict[str, Any]]:
    """The newest reward of each, once nothing is awaited; one of None where there is none."""
    return [[{"reward": None}, *await given(system, one)][-1] for one in ids]


async def values(system: Any, ids: list[str]) -> list[float | None]:
    return [one["reward"] for one in await rewards(system, ids)]
