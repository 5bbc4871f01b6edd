"""How new weights are published, and of which model, is decided once, in the store; who was told otherwise says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from contract.system import ok
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.serving import mode
from lightning_proxy.serving.mode import check_base_model, decide, publish_mode
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.command_line import lightning
from support.models import save_small_model
from support.served import saved_version


def told(config: Config, **policy: Any) -> Config:
    """The configuration with other keys of its policy."""
    return config.model_copy(update={"policy": config.policy.model_copy(update=policy)})


async def decided_on(gpu: bool, config: Config, store: Store, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a trainer decides on a machine with a GPU, or without."""
    with monkeypatch.context() as patch:
        patch.setattr(mode, "has_gpu", lambda: gpu)
        return await decide(config, store, "trainer")


async def test_a_proxy_without_a_gpu_serves_what_a_trainer_with_one_publishes(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode, "has_gpu", lambda: False)
    async with start(publish="auto") as system, system.store() as store:
        assert (await system.get("/policy"))["publish"] == "merged"
        assert await decided_on(True, system.config, store, monkeypatch) == "lora"
        await store.versions.set_live(await saved_version(store, "lora", tmp_path), 1, verified=True)
        while (await system.get("/policy"))["publish"] != "lora":
            await asyncio.sleep(0.02)  # the proxy looks every second
        await system.get("/readyz")
        _, answer = await system.chat("r1")
        assert answer["choices"][0]["message"]["content"].startswith("by policy-v1 ")


async def test_what_one_machine_has_decided_holds_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"store": {"url": f"sqlite:///{tmp_path}/s.db"}})
    async with opened(config.store) as database:
        store = Store(database)
        assert await decided_on(True, config, store, monkeypatch) == "lora"
        assert await decided_on(False, config, store, monkeypatch) == "lora"
        assert await decided_on(True, told(config, publish="merged"), store, monkeypatch) == "merged"
        assert await decided_on(True, config, store, monkeypatch) == "merged"
    assert publish_mode(config) == "merged", "vLLM is started as the store says"
    elsewhere = Config.model_validate({"store": {"url": f"sqlite:///{tmp_path}/other.db"}})
    assert publish_mode(elsewhere) == ("lora" if mode.has_gpu() else "merged")
    assert not (tmp_path / "other.db").exists()


def test_all_weights_are_published_merged_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in (True, False):
        monkeypatch.setattr(mode, "has_gpu", lambda gpu=gpu: gpu)
        assert publish_mode(Config.model_validate({"trainer": {"weights": "full"}})) == "merged"
    for policy, named in (
        ({"publish": "lora"}, "set policy.publish to merged"),
        ({"adapters": {"w": ["w"]}}, "policy.adapters"),
    ):
        with pytest.raises(ValueError, match=f"trainer.weights full .*{named}"):
            Config.model_validate({"trainer": {"weights": "full"}, "policy": policy})


async def test_a_proxy_and_a_trainer_that_were_told_otherwise_say_so(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(publish="merged") as system, system.store() as store:
        await decide(system.config, store, "trainer")
        assert "policy.publish" not in caplog.text
        await decide(told(system.config, publish="lora"), store, "trainer")
        (line,) = [r.getMessage() for r in caplog.records if "policy.publish" in r.getMessage()]
        assert line.startswith("policy.publish is lora for this trainer, and merged for the proxy since ")
        while "publish" not in (ready := (await system.call("GET", "/readyz"))[1]):
            await asyncio.sleep(0.02)
        assert ready["status"] == "degraded", "calls are still answered"
        assert ready["publish"].startswith("policy.publish is merged for this proxy, and lora for the trainer since ")
        checks = {check["name"]: check for check in (await system.lightning("doctor", "--json")).json}
        assert checks["publish mode"]["outcome"] == "failed"
        assert checks["publish mode"]["found"] == "policy.publish is merged here, but the store has lora"


def test_any_card_is_a_gpu_unless_it_is_hidden_from_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert not mode.has_gpu()
    (tmp_path / "nvidia3").touch()
    assert mode.has_gpu()
    for visible, expected in (("3", True), ("", False), ("-1", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert mode.has_gpu() == expected


# The base model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A configuration with version 1 in its store."""
    from contract.model import learning, play  # imports torch

    directory = tmp_path_factory.mktemp("trained")
    with learning(directory, save_small_model(directory / "first"), "lora") as proxy:
        config = load_config(proxy.config)
        check_base_model(told(config, model="second"))  # nothing was published yet
        play(proxy, "r")
        ok(proxy.run("train", "--once"))
    return config


def test_only_another_model_is_refused_whatever_has_become_of_its_checkpoint(trained: Config, tmp_path: Path) -> None:
    check_base_model(trained)
    check_base_model(told(trained, model=None))
    check_base_model(told(trained, model=str(tmp_path / "elsewhere" / "first")))  # moved
    second = told(trained, model=str(tmp_path / "second"))
    with pytest.raises(ConfigError, match="trained on .*first: set it back, or start over with another store.url"):
        check_base_model(second)
    store = tmp_path / "s.db"
    elsewhere = second.model_copy(update={"store": trained.store.model_copy(update={"url": f"sqlite:///{store}"})})
    check_base_model(elsewhere)
    assert not store.exists()
    store.write_bytes(b"no store")
    check_base_model(elsewhere)


def test_every_command_that_would_use_it_refuses_in_one_line(trained: Config, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    settings = told(trained, model=str(save_small_model(tmp_path / "second"))).model_dump(mode="json")
    settings["vllm"]["port"] = urlsplit(settings["upstreams"][0]["base_url"]).port
    path.write_text(yaml.safe_dump(settings))
    for command in (["serve"], ["train"], ["vllm"], ["up", "--logs", tmp_path / "logs"]):
        code, _, err = lightning("--config", path, *command)
        assert (code, err.count("\n"), "set it back" in err) == (2, 1, True), err
