"""Training runs that collapse: publication stops, or goes back, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import VllmServer
from lightning_proxy.trainer import collapse
from lightning_proxy.trainer.publish import Publisher
from support.training import ABSURD, bench, sample_varied


async def test_a_policy_that_collapses_is_trained_no_further_until_it_is_rolled_back(
    base: Path, tmp_path: Path
) -> None:
    async with bench(base, tmp_path, **ABSURD) as b:
        await sample_varied(b, 0)
        await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 1
        await sample_varied(b, 1)
        for _ in range(2):  # a restart changes nothing
            await b.groups("t5", "t6", "t7", "t8")
            await b.loop().run(asyncio.Event(), once=True)
            collapse = await b.store.steps.collapse()
            assert collapse is not None and (collapse.sign, collapse.go_back_to) == ("reward", 0)
            last = await b.store.steps.last()
            assert last is not None and last.step == 1
        swap = Swap(b.store, b.vllm, "merged", b.config.policy.directory)
        await swap.activate(await b.store.versions.get(0))
        await b.loop(learning_rate=0.01).run(asyncio.Event(), once=True)
        _, second, *_ = await b.store.steps.all()
        assert (second.base, second.version, await b.store.steps.collapse()) == (0, 2, None)


async def test_a_policy_that_collapses_is_rolled_back_by_itself_if_so_configured(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, **ABSURD, collapse={"action": "rollback"}) as b:
        await sample_varied(b, 0)
        await b.loop().run(asyncio.Event(), once=True)
        await sample_varied(b, 1)
        await b.loop(max_steps=1).run(asyncio.Event())
        assert (await b.store.versions.live()).version == 1, "it is done, and looks no more"
        await b.loop().run(asyncio.Event(), once=True)
        steps = await b.store.steps.all()
        assert [(step.base, step.version) for step in steps[:2]] == [(0, 1), (0, 2)]
        assert steps[0].metrics["collapse"]["sign"] == "reward"


async def test_a_step_that_was_stopped_is_committed_and_never_published(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path, collapse={"max_kl": 1e-9}) as b:
        monkeypatch.setattr(collapse, "STEPS", 2)
        rollouts = await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        rollouts += await b.groups("t3", "t4")
        for _ in range(2):
            await b.loop().run(asyncio.Event(), once=True)
            waiting = await b.groups("t5", "t6")
            first, last = await b.store.steps.all()
            assert (first.version, list(first.metrics["warnings"])) == (1, ["kl"])
            assert (last.base, last.version, last.metrics["collapse"]["sign"]) == (1, None, "kl")
            assert last.checkpoint is not None and "publish_s" in last.metrics
            assert (await b.store.versions.live()).version == 1
        assert await b.steps_of(rollouts) == {1, 2} and await b.steps_of(waiting) == {None}
        swap = Swap(b.store, b.vllm, "merged", b.config.policy.directory)
        await swap.activate(await b.store.versions.get(1))  # not the weights after step 2
        loop = b.loop(max_steps=3)
        await loop.run(asyncio.Event(), once=True)
        last = await b.store.steps.last()
        assert last is not None and (last.step, last.base) == (3, 1)
        assert "collapse" not in last.metrics, "one step in a row"


async def test_a_collapse_that_shows_while_a_step_waits_to_be_published_stops_it(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(base, tmp_path) as b:
        for task in ("t1", "t2"):
            for reward in (1.0,) * 9 + (0.0,):
                await b.rollout(task, reward)
        await b.loop(group_size=10).run(asyncio.Event(), once=True)
        await b.groups("t3", "t4")
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr(Publisher, "publish", None)
            with pytest.raises(TypeError):
                await b.loop().run(asyncio.Event(), once=True)
        for _ in range(20):
            for task in ("t1", "t2"):
                await b.rollout(task, 0.0, version=1)
        stop = asyncio.Event()
        training = asyncio.create_task(b.loop().run(stop))
        while (collapse := await b.store.steps.collapse()) is None:
            await asyncio.sleep(0.02)
        assert collapse.sign == "reward" and (await b.store.versions.live()).version == 1
        await b.store.versions.set_live(1)
        await b.groups("t5", "t6")
        while (await b.store.versions.live()).version == 1:
            await asyncio.sleep(0.02)
        stop.set()
        await training
        assert [(s.base, s.version) for s in await b.store.steps.all()] == [(0, 1), (1, None), (1, 2)]
        assert "policy version 1 is live: training continues from it" in caplog.text, "not from step 2"


async def test_versions_that_may_be_gone_back_to_keep_files_and_checkpoints_also_after_a_kill(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        for step in range(1, 7):
            await b.groups(f"t{step}", f"u{step}")
            if step == 6:
                with monkeypatch.context() as killed, pytest.raises(TypeError):
                    killed.setattr(VllmServer, "sample", None)
                    await b.loop().run(asyncio.Event(), once=True)
            await b.loop().run(asyncio.Event(), once=True)
        versions = {v.version: v.path is not None for v in await b.store.versions.all()}
        assert versions == {0: False, 1: True, 2: False, 3: True, 4: True, 5: True, 6: True}
        assert (tmp_path / "policy/checkpoints/1").is_dir()
