"""Training runs that collapse: publication stops, or goes back, also after a restart."""

import asyncio
from pathlib import Path

import pytest

from lightning_proxy.serving.vllm import VllmServer
from lightning_proxy.trainer import collapse
from lightning_proxy.trainer.publish import Publisher
from support.training import ABSURD, Start, sample_varied


async def test_a_policy_that_collapses_is_trained_no_further_until_it_is_rolled_back(bench: Start) -> None:
    async with bench(**ABSURD) as b:
        await sample_varied(b, 0)
        await b.train()
        assert (await b.live())[0] == 1
        await sample_varied(b, 1)
        for _ in range(2):  # a restart changes nothing
            await b.train("t5", "t6", "t7", "t8")
            found = await b.store.steps.collapse()
            assert found is not None and (found.sign, found.go_back_to) == ("reward", 0)
            assert (await b.last()).step == 1
        await b.activate(0)
        await b.train(learning_rate=0.01)
        _, second, *_ = await b.store.steps.all()
        assert (second.base, second.version, await b.store.steps.collapse()) == (0, 2, None)


async def test_a_policy_that_collapses_is_rolled_back_by_itself_if_so_configured(bench: Start) -> None:
    async with bench(**ABSURD, collapse={"action": "rollback"}) as b:
        await sample_varied(b, 0)
        await b.train()
        await sample_varied(b, 1)
        await b.loop(max_steps=1).run(asyncio.Event())
        assert (await b.live())[0] == 1, "it is done, and looks no more"
        await b.train()
        steps = await b.store.steps.all()
        assert [(step.base, step.version) for step in steps[:2]] == [(0, 1), (0, 2)]
        assert steps[0].metrics["collapse"]["sign"] == "reward"


async def test_a_stopped_step_is_committed_and_never_published(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(collapse={"max_kl": 1e-9}) as b:
        monkeypatch.setattr(collapse, "STEPS", 2)
        rollouts = await b.train("t1", "t2")
        rollouts += await b.groups("t3", "t4")
        for _ in range(2):
            await b.train()
            waiting = await b.groups("t5", "t6")
            first, last = await b.store.steps.all()
            assert (first.version, list(first.metrics["warnings"])) == (1, ["kl"])
            assert (last.base, last.version, last.metrics["collapse"]["sign"]) == (1, None, "kl")
            assert last.checkpoint is not None and "publish_s" in last.metrics
            assert (await b.live())[0] == 1
        assert await b.steps_of(rollouts) == {1, 2} and await b.steps_of(waiting) == {None}
        await b.activate(1)  # not the weights after step 2
        await b.train(max_steps=3)
        last = await b.last()
        assert (last.step, last.base) == (3, 1)
        assert "collapse" not in last.metrics, "one step in a row"


async def test_a_collapse_stops_a_step_that_waits_to_be_live(bench: Start, caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as b:
        for task in ("t1", "t2"):
            for reward in (1.0,) * 9 + (0.0,):
                await b.rollout(task, reward)
        await b.train(group_size=10)
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr(Publisher, "publish", None)
            with pytest.raises(TypeError):
                await b.train("t3", "t4")
        for task in ("t1", "t2") * 20:
            await b.rollout(task, 0.0, version=1)
        stop = asyncio.Event()
        training = asyncio.create_task(b.loop().run(stop))
        while (found := await b.store.steps.collapse()) is None:
            await asyncio.sleep(0.02)
        assert found.sign == "reward" and (await b.live())[0] == 1
        await b.store.versions.set_live(1)
        await b.groups("t5", "t6")
        while (await b.live())[0] == 1:
            await asyncio.sleep(0.02)
        stop.set()
        await training
        assert [(s.base, s.version) for s in await b.store.steps.all()] == [(0, 1), (1, None), (1, 2)]
        assert "policy version 1 is live: training continues from it" in caplog.text, "not from step 2"


async def test_versions_that_may_be_gone_back_to_keep_files_and_checkpoints_also_after_a_kill(
    bench: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench() as b:
        for step in range(1, 6):
            await b.train(f"t{step}", f"u{step}")
        with monkeypatch.context() as killed, pytest.raises(TypeError):
            killed.setattr(VllmServer, "sample", None)
            await b.train("t6", "u6")
        await b.train()
        versions = {v.version: v.path is not None for v in await b.store.versions.all()}
        assert versions == {0: False, 1: True, 2: False, 3: True, 4: True, 5: True, 6: True}
        assert (tmp_path / "policy/checkpoints/1").is_dir()
