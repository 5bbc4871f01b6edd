"""Verifying: old weights are told from new ones by as many tokens as it takes, and by names where none suffice."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lightning_proxy.core.errors import PublishError
from lightning_proxy.serving.vllm import VllmServer
from lightning_proxy.trainer import verify
from lightning_proxy.trainer.verify import SURE, Verification, WeightEvidence
from support.training import Bench, DeafServer, HonestServer, Start, require_seen_clearly

NOISE = 0.05  # what bfloat16 does to a log-probability
PROMPTS = 4


def found(moved: float, stale: bool, dice: random.Random) -> WeightEvidence:
    """What is found where two steps' weights are `moved` apart, and rounding is in all that is computed."""
    evidence = WeightEvidence()
    for asked in range(verify.ROUNDS):
        if not evidence.may_become_clear:
            break
        for _ in range(verify.MORE_ANSWERS * verify.MORE_TOKENS if asked else PROMPTS * verify.VERIFIED_TOKENS):
            old = dice.gauss(-2, 1)
            new = old + dice.gauss(0, moved)
            evidence.add(*([value + dice.gauss(0, NOISE)] for value in (old if stale else new, new, old)))
    return evidence


def test_a_difference_above_the_noise_is_told_and_below_it_there_are_no_false_alarms() -> None:
    dice = random.Random(0)
    for moved in (1.5 * NOISE, 4 * NOISE):
        stale = [found(moved, True, dice) for _ in range(100)]
        assert sum(not evidence.is_old for evidence in stale) <= 5, moved
        assert not any(found(moved, False, dice).is_old for _ in range(100)), moved
    for moved in (0.0, NOISE / 10):
        assert sum(found(moved, False, dice).is_old for _ in range(400)) <= 2, moved


class RoundingServer(HonestServer):
    """Its log-probabilities are as far from the trainer's as those of bfloat16."""

    dice = random.Random(0)

    def _sample(self, *given: Any) -> tuple[list[int], list[float]]:
        ids, logprobs = super()._sample(*given)
        return ids, [value + self.dice.gauss(0, NOISE) for value in logprobs]


class RoundingDeafServer(DeafServer, RoundingServer):
    """Names new weights rightly and serves the old ones, with rounding."""


class MisnamingServer(RoundingServer):
    """Has loaded the adapter from elsewhere."""

    async def _load(self, request: web.Request) -> web.Response:
        answer = await super()._load(request)
        self.adapters = dict.fromkeys(self.adapters, "/elsewhere")
        return answer


class ForgettingServer(RoundingServer):
    """Has files of the adapter that somebody has exchanged."""

    async def _load(self, request: web.Request) -> web.Response:
        answer = await super()._load(request)
        for path in self.adapters.values():
            file = Path(path, "adapter_model.safetensors")
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        return answer


LOOSE = {"verify_tolerance": 0.5}


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_old_weights_are_noticed_below_the_tolerance(bench: Start, publish: str) -> None:
    """At this learning rate a step moves log-probabilities by more than rounding, and by less than is tolerated."""
    async with bench(publish, RoundingDeafServer, policy=LOOSE, learning_rate=0.005) as b:
        with pytest.raises(PublishError, match="vLLM still serves the previous weights as "):
            await b.train("t1", "t2")
        assert (await b.live())[0] == 0


@pytest.mark.parametrize("rolled_back", [False, True])
async def test_new_weights_are_compared_with_live_ones_after_a_rollback(bench: Start, rolled_back: bool) -> None:
    async with bench("merged", RoundingServer, policy=LOOSE, learning_rate=0.005) as b:
        loop = b.loop()
        for tasks in (("t1", "t2"), ("t3", "t4")):
            await b.train(*tasks, loop=loop)
        if rolled_back:
            await b.activate(0)
        else:
            loop = b.loop()
        b.server._open = lambda path: b.server._loaded["base"]  # says yes to new weights from now on, and ignores them
        await b.groups("t5", "t6")
        for _ in range(2):  # at the second start the last step is not published
            with pytest.raises(PublishError, match="vLLM still serves the previous weights as "):
                await b.train(loop=loop)
            assert (await b.live())[0] == (0 if rolled_back else 2)
            loop = b.loop()


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_where_answers_do_not_tell_names_do(bench: Start, publish: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with bench(publish, RoundingServer, policy=LOOSE, learning_rate=1e-6) as b:
        await b.train("t1", "t2")
        assert await b.live() == (1, 1, True)
        metrics = (await b.last()).metrics
        assert 0.2 * NOISE < metrics["verify_difference"] < 2 * NOISE and abs(metrics["verify_deviations"]) < SURE
    model, names = ("base", "its label") if publish == "merged" else ("policy-v1", "its name and its files")
    assert metrics["verified_by"] == names
    (line,) = [r.getMessage() for r in caplog.records if "is verified by" in r.getMessage()]
    assert line.startswith(f"{model} is verified by {names}") and "alone: the log-probabilities of " in line


@pytest.mark.parametrize(
    ("server", "said"), [(MisnamingServer, "reports are ['/elsewhere']"), (ForgettingServer, "does not hold")]
)
async def test_wrong_names_or_files_are_noticed_too(bench: Start, server: type[HonestServer], said: str) -> None:
    async with bench("lora", server, policy=LOOSE, learning_rate=1e-6) as b:
        with pytest.raises(PublishError) as error:
            await b.train("t1", "t2")
        assert said in error.value.message


# Merged weights of one server: live at once, and verified by agents' answers before weights move again ----------------


@asynccontextmanager
async def first_version(bench: Start, **settings: Any) -> AsyncIterator[tuple[Bench, Any]]:
    """A loop after its first step: version 1 is live and not verified."""
    async with bench(**settings) as b:
        loop = b.loop()
        await loop.resume()
        await b.groups("t1", "t2")
        assert await loop.train_once()
        assert await b.live() == (1, 1, False)
        yield b, loop


@asynccontextmanager
async def running(bench: Start) -> AsyncIterator[Bench]:
    """A trainer that runs and whose version 1 is live; in the end it is verified."""
    async with bench(group_size=16) as b:
        await b.groups("t1", "t2")
        stop = asyncio.Event()
        training = asyncio.create_task(b.loop().run(stop))
        async with asyncio.timeout(60):
            while (await b.live())[0] == 0:
                assert not training.done()
                await asyncio.sleep(0.01)
            yield b
            while not (await b.live())[2]:
                await asyncio.sleep(0.01)
        stop.set()
        await training
        assert len(await b.store.steps.all()) == 1
        await require_seen_clearly(b.store, 1)


async def test_answers_of_agents_verify_and_vllm_is_not_asked(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmServer, "sample", None)
    async with first_version(bench) as (b, loop):
        for task in ("t3", "t4") * 4:
            await b.sampled(task, version=1)
        assert await loop.train_once()
        assert (await b.store.versions.get(1)).verified and (await b.live())[0] == 2
        await require_seen_clearly(b.store, 1)


async def test_a_trainer_that_waits_for_rollouts_verifies(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmServer, "sample", None)
    monkeypatch.setattr("lightning_proxy.trainer.publish.QUIET_S", 3600.0)
    async with running(bench) as b:
        for _ in range(16):
            await b.sampled("t3", version=1)  # one group, and a step takes two


async def test_a_version_that_answers_nobody_is_asked_at_last(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.publish.QUIET_S", 0.1)
    async with running(bench) as b:
        pass
    assert b.server.label.startswith("1-")


async def test_a_rollback_by_hand_during_verification_stays(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with first_version(bench) as (b, loop):
        sample = VllmServer.sample

        async def rolls_back(*given: Any) -> Any:
            if (await b.live())[0]:
                await b.activate(0)
            return await sample(*given)

        monkeypatch.setattr(VllmServer, "sample", rolls_back)
        await b.groups("t3", "t4")
        await loop.train_once()
        assert b.server.label.startswith("0-")
        versions = [(v.version, v.status, v.verified) for v in await b.store.versions.all()]
        assert versions == [(0, "live", True), (1, "ready", False), (2, "failed", False)]


async def test_a_name_is_no_proof_where_agents_got_old_weights(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tells_nothing(*_: Any) -> WeightEvidence:
        return WeightEvidence()

    monkeypatch.setattr(Verification, "_ask", tells_nothing)
    async with first_version(bench, server=DeafServer) as (b, loop):
        for task in ("t3", "t4") * 4:
            await b.sampled(task, version=1)
        with pytest.raises(PublishError, match="agents got answers from the previous weights"):
            await loop.train_once()
