"""Steps on a Tinker service: the exact datums, resume, faults, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, TrainingUnavailable
from lightning_proxy.trainer.types import Batch, Sample

pytest.importorskip("tinker", reason="the client of the Tinker API is not installed")

from lightning_proxy.features.tinker import trainer as plugin
from lightning_proxy.features.tinker.tinker_trainer import TinkerTrainer
from lightning_proxy.features.tinker.trainer import check_backend
from support.played_tinker import SIGNATURE, PlayedTinker, played_tinker
from support.sections import with_features
from support.training import bench

# The client leaves connections to the collector, and threads that a process of tests had better not share with others.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.long]
PROMPT, ANSWER = (3, 4), (5, 6, 7)


@pytest.fixture(autouse=True, scope="module")
def left_open() -> None:
    """Nothing is looked for: the client's thread keeps its loop and connections for as long as the process runs."""


@pytest.fixture
def service(base: Path) -> Iterator[PlayedTinker]:
    with played_tinker(base) as played:
        yield played
        while OPEN:
            OPEN.pop().close()
    gc.collect()


OPEN: list[Any] = []


def trainer(base: Path, directory: Path, service: PlayedTinker, **settings: Any) -> TinkerTrainer:
    config = configured(base, directory, service, **settings)
    OPEN.append(TinkerTrainer(config.trainer, config.policy))
    return OPEN[-1]


def configured(base: Path, directory: Path, service: PlayedTinker, **settings: Any) -> Config:
    ours = {"backend": True, "tinker": {"base_url": service.url}, "report_to": [], "lora_rank": 4}
    policy = {"model": str(base), "publish": "lora", "directory": directory}
    return with_features(policy=policy, trainer={**ours, "learning_rate": 0.05, **settings})


def sample(name: str, advantage: float, temperature: float = 1.0) -> Sample:
    mask, n = (0,) * len(PROMPT) + (1,) * len(ANSWER), len(PROMPT + ANSWER)
    given = tuple(-3.0 * m for m in mask), tuple(advantage * m for m in mask)
    return Sample(name, "t", PROMPT + ANSWER, mask, *given, tuple(temperature if m else 1.0 for m in mask[:n]))


def batch(step: int = 1, *samples: Sample) -> Batch:
    chosen = samples or (sample("a", 1.0), sample("b", -1.0))
    return Batch(step, chosen, tuple(s.rollout_id for s in chosen), compared=len(chosen))


def test_the_service_gets_tokens_sampled_logprobs_and_weighted_advantages(
    base: Path, tmp_path: Path, service: PlayedTinker
) -> None:
    metrics = trainer(base, tmp_path, service).step(batch())
    body, data = dict(service.got)["forward_backward"]
    assert body.loss_fn == "cispo"
    assert dict(body.loss_fn_config) == {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}
    assert [sorted(datum) for datum in data] == [["advantages", "logprobs", "target_tokens", "tokens"]] * 2
    assert data[0]["tokens"].tolist() == [3, 4, 5, 6]
    assert data[0]["target_tokens"].tolist() == [4, 5, 6, 7]
    assert data[0]["logprobs"].tolist() == [0.0, -3.0, -3.0, -3.0]
    np.testing.assert_allclose(data[0]["advantages"], [0.0, *(3 * [1 / 6])], rtol=1e-6)  # two rollouts, three tokens
    np.testing.assert_allclose(data[1]["advantages"], [0.0, *(3 * [-1 / 6])], rtol=1e-6)
    adam = dict(service.got)["optim_step"]["adam_params"]
    assert (adam["learning_rate"], adam["grad_clip_norm"], adam["beta2"], adam["eps"]) == (0.05, 1.0, 0.999, 1e-8)
    assert (metrics["skipped"], metrics["trained_tokens"], metrics["lr"]) == (0.0, 6.0, 0.05)
    assert service.keys == {"tml-none"}


def test_a_mean_on_the_service_is_undone(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    mean = {"base_url": service.url, "reduction": "mean"}
    metrics = trainer(base, tmp_path, service, tinker=mean).step(batch())
    _, data = dict(service.got)["forward_backward"]
    np.testing.assert_allclose(data[0]["advantages"], [0.0, *(3 * [8 / 6])], rtol=1e-6)  # times 4 tokens, 2 rows
    assert metrics["loss"] == pytest.approx(trainer(base, tmp_path, service).step(batch())["loss"], rel=1e-5)


def test_answers_at_other_temperatures_are_left_out_by_name(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    t = trainer(base, tmp_path, service)
    assert t.step(batch(1, sample("a", 1.0), sample("hot", -1.0, 1.5)))["trained_tokens"] == 3
    assert t.left_out_because is not None
    assert "hot" in t.left_out_because
    assert t.step(batch(2, sample("hot", -1.0, 1.5)))["skipped"] == 1
    assert t.skipped_because is not None
    assert service.count("optim_step") == 1


def test_a_wrong_sampler_skips_the_step(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    t, n = trainer(base, tmp_path, service), len(PROMPT + ANSWER)
    given = [replace(sample(str(i), (-1.0) ** i), versions=(2,), logprobs=(-9.0,) * n) for i in range(90)]
    wrong = t.step(replace(batch(1, *given), version=2))
    assert (wrong["skipped"], wrong["trained_tokens"], service.count("optim_step")) == (1, 270, 0)
    assert wrong["sampler_difference"] > 0.3 and t.skipped_because == t.warnings["sampler"]
    assert t.step(replace(batch(2, *given), version=3))["skipped"] == 0, "of an earlier version"
    assert t.warnings == {}


def test_a_killed_trainer_goes_on_exactly_from_its_last_checkpoint(
    base: Path, tmp_path: Path, service: PlayedTinker
) -> None:
    steady = trainer(base, tmp_path / "steady", service)
    steady.step(batch(1))
    steady.step(batch(2))
    killed = trainer(base, tmp_path / "killed", service)
    killed.step(batch(1))
    killed.save(tmp_path / "1")
    killed.step(batch(2))  # sent, applied, and not committed
    resumed = trainer(base, tmp_path / "killed", service)
    assert resumed.load(tmp_path / "1") == 1
    resumed.step(batch(2))
    rows = [[*PROMPT, *ANSWER]]
    assert resumed.logprobs(rows) == steady.logprobs(rows)


def test_auto_keeps_the_rate_of_a_checkpoint(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    first = trainer(base, tmp_path, service, learning_rate="auto")
    assert first.step(batch(1))["lr"] == first.rate.value
    assert "on a service" in first.rate.reason
    earlier = trainer(base, tmp_path, service)
    earlier.step(batch(1))
    earlier.save(tmp_path / "1")
    resumed = trainer(base, tmp_path, service, learning_rate="auto")
    resumed.load(tmp_path / "1")
    assert resumed.step(batch(2))["lr"] == 0.05


@pytest.mark.parametrize("route", ["forward_backward", "optim_step", "save_weights"])
@pytest.mark.parametrize("fault", ["503", "lost"])
def test_a_request_that_is_sent_again_counts_once(
    base: Path, tmp_path: Path, service: PlayedTinker, route: str, fault: str
) -> None:
    steady = trainer(base, tmp_path, service)
    steady.step(batch())
    service.faults[route] = [fault]
    shaken = trainer(base, tmp_path, service)
    shaken.step(batch())
    assert service.faults[route] == []
    assert service.count("optim_step") == 2
    assert shaken.logprobs([[*PROMPT, *ANSWER]]) == steady.logprobs([[*PROMPT, *ANSWER]])


@pytest.mark.parametrize("route", ["forward_backward", "optim_step", "save_weights"])
@pytest.mark.parametrize("fault", ["failed", "forgotten"])
async def test_after_a_fault_the_step_is_taken_again_from_the_last_state(
    base: Path, tmp_path: Path, service: PlayedTinker, route: str, fault: str
) -> None:
    async with bench(base, tmp_path, publish="lora", **_settings(service)) as b:
        rollouts = await b.groups("t1", "t2")
        loop = b.loop()
        OPEN.append(b.trainer)
        await loop.resume()
        service.faults[route] = [fault]
        await loop.run(asyncio.Event(), once=True)
        assert await b.steps_of(rollouts) == {1}
        assert [*service.models.values()][-1].steps == 1
        version = await b.store.versions.live()
        assert (version.version, version.verified) == (1, True)
        step = await b.store.steps.of_version(1)
        assert step is not None
        assert (step.metrics["verify_deviations"], step.metrics["verified_by"]) == (0, "its name and its files")


def _settings(service: PlayedTinker) -> dict[str, Any]:
    return {"backend": True, "tinker": {"base_url": service.url}, "lora_rank": 4}


def test_what_the_service_refuses_is_one_clear_error(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    service.faults["forward_backward"] = ["refused"]
    with pytest.raises(ConfigError, match=r"^tinker: .* cannot take a step with the loss cispo: .*refused"):
        trainer(base, tmp_path, service).step(batch())


def test_a_fault_that_stays_ends_the_training(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    t = trainer(base, tmp_path, service)
    service.faults["optim_step"] = ["failed"] * 3
    for _ in range(2):
        with pytest.raises(TrainingUnavailable, match="optim_step failed"):
            t.step(batch())
    with pytest.raises(ConfigError, match=r"optim_step failed.*\(3 times\)"):
        t.step(batch())


@pytest.mark.parametrize("answers", [[], ["403"], ["503"]])
def test_the_address_of_the_weights_is_told_to_nobody(
    base: Path, tmp_path: Path, service: PlayedTinker, caplog: pytest.LogCaptureFixture, answers: list[str]
) -> None:
    t = trainer(base, tmp_path, service)
    t.save(tmp_path / "0")
    service.faults["files"] = list(answers)
    with caplog.at_level(logging.INFO):
        if answers:
            with pytest.raises(TrainingUnavailable, match=f"answered {answers[0]}") as told:
                t.save_weights(tmp_path / "v1", merged=False)
            assert SIGNATURE not in str(told.value)
        else:
            t.save_weights(tmp_path / "v1", merged=False)
    ours = [record.getMessage() for record in caplog.records if record.name != "aiohttp.access"]  # the played server's
    assert SIGNATURE not in "".join(ours)


def test_a_refused_download_is_no_outage(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    t = trainer(base, tmp_path, service)
    t.save(tmp_path / "0")
    service.faults["files"] = ["403"] * 3
    for _ in range(2):
        with pytest.raises(TrainingUnavailable):
            t.save_weights(tmp_path / "v1", merged=False)
        t.load(tmp_path / "0")
    with pytest.raises(ConfigError, match=r"answered 403.*\(3 times\)"):
        t.save_weights(tmp_path / "v1", merged=False)


def test_a_wrong_key_is_one_clear_error(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    with pytest.raises(ConfigError, match="api_key must start with"):
        trainer(base, tmp_path, service, tinker={"base_url": service.url, "api_key": "wrong"}).save(tmp_path / "0")


@pytest.mark.parametrize(
    ("section", "settings", "named"),
    [
        ("trainer", {"loss_type": "sapo"}, "trainer.loss_type sapo (it can do cispo, grpo, dapo, bnpo, dr_grpo)"),
        ("trainer", {"importance_level": "sequence"}, "trainer.importance_level sequence"),
        ("trainer", {"kl_coef": 0.1}, "trainer.kl_coef 0.1"),
        ("trainer", {"entropy": {"coef": 0.1}}, "trainer.entropy"),
        ("trainer", {"teacher": {"base_url": "http://127.0.0.1:1/v1"}}, "teacher"),
        ("trainer", {"weights": "full"}, "trainer.weights full"),
        ("trainer", {"loss": "mine.py:loss"}, "trainer.loss mine.py:loss"),
        ("trainer", {"lora_alpha": 64}, "trainer.lora_alpha 64"),
        ("policy", {"publish": "merged"}, "policy.publish merged"),
        ("policy", {"adapters": {"writer": ["writer"]}}, "policy.adapters"),
    ],
)
def test_what_cannot_be_done_there_is_refused_by_name(section: str, settings: dict[str, Any], named: str) -> None:
    values: dict[str, Any] = {"trainer": {}, "policy": {}, "tinker": {"enabled": True}}
    values[section] |= settings
    with pytest.raises(ConfigError) as refused:
        check_backend(with_features(**values))
    assert named in refused.value.message
    assert refused.value.exit_code == 2


def test_other_methods_and_several_processes_are_refused() -> None:
    config = Config.model_validate({"tinker": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"--method dpo; several trainer processes"):
        check_backend(config, "dpo", launched=True)
    check_backend(Config(), "dpo", launched=True)


def test_without_the_client_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-proxy\[tinker\]'"):
        check_backend(Config.model_validate({"tinker": {"enabled": True}}))
