"""Verifying: old weights are told from new ones by as many tokens as it takes, and by names where none suffice."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.errors import PublishError
from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import VllmServer
from lightning_proxy.trainer.verify import MORE_ANSWERS, MORE_TOKENS, ROUNDS, SURE, VERIFIED_TOKENS, WeightEvidence
from support.training import HonestServer, bench, require_seen_clearly

NOISE = 0.05  # what bfloat16 does to a log-probability
PROMPTS = 4


def found(moved: float, stale: bool, dice: random.Random) -> WeightEvidence:
    """What is found where two steps' weights are `moved` apart, and rounding is in all that is computed."""
    evidence = WeightEvidence()
    for asked in range(ROUNDS):
        if not evidence.may_become_clear:
            break
        rows, length = (MORE_ANSWERS, MORE_TOKENS) if asked else (PROMPTS, VERIFIED_TOKENS)
        old = [[dice.gauss(-2, 1) for _ in range(length)] for _ in range(rows)]
        new = [[value + dice.gauss(0, moved) for value in row] for row in old]
        served, old, new = (
            [[value + dice.gauss(0, NOISE) for value in row] for row in many]
            for many in (old if stale else new, old, new)
        )
        for answer in zip(served, new, old, strict=True):
            evidence.add(*answer)
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

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().sample(body)
        own = answer["logprobs"]["token_logprobs"]
        answer["logprobs"]["token_logprobs"] = [value + self.dice.gauss(0, NOISE) for value in own]
        return answer


class RoundingDeafServer(RoundingServer):
    """Says yes to new weights, names them rightly, and goes on serving the old ones."""

    def load(self, name: str, path: str) -> None:
        self.models[name] = self.models["base"]


class MisnamingServer(RoundingServer):
    """Has loaded the adapter from elsewhere."""

    def load(self, name: str, path: str) -> None:
        super().load(name, path)
        self.roots[name] = "/elsewhere"


class ForgettingServer(RoundingServer):
    """Has files of the adapter that somebody has exchanged."""

    def load(self, name: str, path: str) -> None:
        super().load(name, path)
        file = Path(path, "adapter_model.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


LOOSE = {"verify_tolerance": 0.5}


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_old_weights_are_noticed_below_the_tolerance(base: Path, tmp_path: Path, publish: str) -> None:
    """At this learning rate a step moves log-probabilities by more than rounding, and by less than is tolerated."""
    async with bench(base, tmp_path, publish, RoundingDeafServer, policy=LOOSE, learning_rate=0.005) as b:
        await b.groups("t1", "t2")
        with pytest.raises(PublishError, match="vLLM still serves the previous weights as "):
            await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 0


@pytest.mark.parametrize("rolled_back", [False, True])
async def test_new_weights_are_compared_with_the_live_ones_after_a_restart_and_after_a_rollback(
    base: Path, tmp_path: Path, rolled_back: bool
) -> None:
    async with bench(base, tmp_path, "merged", RoundingServer, policy=LOOSE, learning_rate=0.005) as b:
        loop = b.loop()
        for tasks in (("t1", "t2"), ("t3", "t4")):
            await b.groups(*tasks)
            await loop.run(asyncio.Event(), once=True)
        if rolled_back:
            swap = Swap(b.store, b.vllm, b.mode, b.config.policy.directory)
            await swap.activate(await b.store.versions.get(0))
        else:
            loop = b.loop()
        b.server.load = lambda *_: None  # says yes to new weights from now on, and ignores them
        await b.groups("t5", "t6")
        for _ in range(2):  # at the second start the last step is not published
            with pytest.raises(PublishError, match="vLLM still serves the previous weights as "):
                await loop.run(asyncio.Event(), once=True)
            assert (await b.store.versions.live()).version == (0 if rolled_back else 2)
            loop = b.loop()


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_where_answers_do_not_tell_names_do_and_that_is_said(
    base: Path, tmp_path: Path, publish: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with bench(base, tmp_path, publish, RoundingServer, policy=LOOSE, learning_rate=1e-6) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.verified) == (1, True)
        step = await b.store.steps.last()
        assert step is not None
        assert 0.2 * NOISE < step.metrics["verify_difference"] < 2 * NOISE
        assert abs(step.metrics["verify_deviations"]) < SURE
        names = "its label" if publish == "merged" else "its name and its files"
        assert step.metrics["verified_by"] == names
    (line,) = [r.getMessage() for r in caplog.records if "is verified by" in r.getMessage()]
    names = (
        "base is verified by its label" if publish == "merged" else "policy-v1 is verified by its name and its files"
    )
    assert line.startswith(names) and "alone: the log-probabilities of " in line


@pytest.mark.parametrize(
    ("server", "said"), [(MisnamingServer, "from ['/elsewhere'], not from"), (ForgettingServer, "does not hold")]
)
async def test_a_wrong_name_or_file_is_noticed_where_answers_do_not_tell(
    base: Path, tmp_path: Path, server: type[HonestServer], said: str
) -> None:
    async with bench(base, tmp_path, "lora", server, policy=LOOSE, learning_rate=1e-6) as b:
        await b.groups("t1", "t2")
        with pytest.raises(PublishError) as error:
            await b.loop().run(asyncio.Event(), once=True)
        assert said in error.value.message


# Merged weights of one server: live at once, and verified before weights move again ---------------------------------


async def test_an_idle_trainer_verifies_what_is_live(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "merged") as b:
        await b.groups("t1", "t2")
        stop = asyncio.Event()
        training = asyncio.create_task(b.loop().run(stop))
        async with asyncio.timeout(60):
            while not (live := await b.store.versions.live()).verified or not live.version:
                assert not training.done()
                await asyncio.sleep(0.01)
        await require_seen_clearly(b.store, 1)
        stop.set()
        await training


async def test_a_version_made_live_by_hand_while_the_old_one_is_verified_stays_live(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path, "merged") as b:
        loop, sample = b.loop(), VllmServer.sample
        await loop.resume()
        await b.groups("t1", "t2")
        assert await loop.train_once()
        assert not (await b.store.versions.live()).verified

        async def rolls_back(*given: Any) -> Any:
            swap = Swap(b.store, b.vllm, "merged", b.config.policy.directory)
            if (await b.store.versions.live()).version:
                await swap.activate(await b.store.versions.get(0))
            return await sample(*given)

        monkeypatch.setattr(VllmServer, "sample", rolls_back)
        await b.groups("t3", "t4")
        await loop.train_once()
        assert b.server.label.startswith("0-")
        versions = await b.store.versions.all()
        assert [(v.version, v.status, v.verified) for v in versions] == [
            (0, "live", True), (1, "ready", False), (2, "failed", False)
        ]  # fmt: skip
